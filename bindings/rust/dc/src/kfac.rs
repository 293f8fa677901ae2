//! The layers of K-FAC and their batches.

use crate::error::{check, Error, Result, Status};
use crate::kinds::Kfac;
use crate::options::KfacApproximation;
use crate::sys;
use crate::tensor::{Element, Tensor};
use std::mem::size_of;

/// The description of a layer.
#[derive(Clone, Debug)]
pub struct KfacLayer {
    raw: sys::dc_sample_layer,
    approximation: KfacApproximation,
    too_long: Option<String>,
}

impl KfacLayer {
    fn of_kind(kind: i32) -> KfacLayer {
        let mut raw = sys::dc_sample_layer::default();
        unsafe { sys::dc_sample_layer_init(&mut raw, size_of::<sys::dc_sample_layer>()) };
        raw.kind = kind;
        KfacLayer { raw, approximation: KfacApproximation::Expand, too_long: None }
    }

    /// A linear layer: inputs `[N, T, i]` for N samples, deltas `[N, T, o]`, weight `[o, i]`, bias `[o]`. T stands for
    /// any number of dimensions for positions, also none.
    pub fn linear() -> KfacLayer {
        KfacLayer::of_kind(sys::DC_SAMPLE_LINEAR)
    }

    /// A convolution over 1 to 3 dimensions, for each of which `kernel` has a length: inputs `[N, c, spatial]`, deltas
    /// `[N, o, spatial']`, weight `[o, c / groups, kernel]`, bias `[o]`.
    pub fn conv(kernel: &[i64]) -> KfacLayer {
        let mut layer = KfacLayer::of_kind(sys::DC_SAMPLE_CONV);
        layer.raw.kernel = layer.lengths("kernel", kernel);
        layer
    }

    /// Sets the groups of a convolution's channels.
    pub fn groups(mut self, groups: i32) -> KfacLayer {
        self.raw.groups = groups;
        self
    }

    /// Sets the strides of a convolution, one for each dimension.
    pub fn stride(mut self, stride: &[i64]) -> KfacLayer {
        self.raw.stride = self.lengths("stride", stride);
        self
    }

    /// Sets the zero padding of a convolution's input, for each dimension.
    pub fn padding(mut self, padding: &[i64]) -> KfacLayer {
        self.raw.padding = self.lengths("padding", padding);
        self
    }

    /// Sets the dilation of a convolution's kernel, for each dimension.
    pub fn dilation(mut self, dilation: &[i64]) -> KfacLayer {
        self.raw.dilation = self.lengths("dilation", dilation);
        self
    }

    /// Sets how the positions of a sample are treated.
    pub fn approximation(mut self, approximation: KfacApproximation) -> KfacLayer {
        self.approximation = approximation;
        self
    }

    /// C has three dimensions; more are an error when the layer is added.
    fn lengths(&mut self, what: &str, given: &[i64]) -> [i64; 3] {
        let mut three = [0; 3];
        if given.len() > three.len() {
            self.too_long = Some(format!("{what} = {given:?}, must have 1 to 3 numbers"));
        }
        three.iter_mut().zip(given).for_each(|(to, from)| *to = *from);
        three
    }
}

impl Kfac {
    /// Declares a layer by the indices of its weight and its bias, which must be in one group. It must be called before
    /// the first step; with a communicator, in the same way on all ranks. Returns the layer's own index.
    pub fn add_layer(&mut self, layer: &KfacLayer, weight: i64, bias: Option<i64>) -> Result<i64> {
        if let Some(text) = &layer.too_long {
            return Err(Error::new(Status::INVALID, text));
        }
        let (approximation, mut index) = (layer.approximation.into(), 0);
        check(unsafe {
            let bias = bias.unwrap_or(-1);
            sys::dc_kfac_add_layer(self.as_ptr(), &layer.raw, approximation, weight, bias, &mut index)
        })?;
        Ok(index)
    }

    /// Accumulates a batch for the update of a layer's factors in the next step: the layer's inputs, and the gradients
    /// of its outputs, in float32, float16 or bfloat16. The gradients are multiplied by `loss_scale` to become those of
    /// each sample's own loss: it is the number of samples if the loss was their mean. The call does not communicate,
    /// so each rank may call it as often as it needs.
    pub fn accumulate<X: Element, D: Element>(
        &mut self,
        layer: i64,
        inputs: &Tensor<'_, X>,
        deltas: &Tensor<'_, D>,
        loss_scale: f64,
    ) -> Result<()> {
        check(unsafe { sys::dc_kfac_accumulate(self.as_ptr(), layer, &inputs.view(), &deltas.view(), loss_scale) })
    }
}
