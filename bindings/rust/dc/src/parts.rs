//! Parameters as optimizers see them: the caller's own, and those of a context.

use crate::context::{unknown, Context, Registered};
use crate::error::{Error, Result, Status};
use crate::sys;
use crate::tensor::{output, view, DType, Element};
use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::raw::c_void;

/// The description of a parameter for an optimizer.
#[derive(Clone, Debug)]
pub struct Param {
    pub(crate) shape: Vec<i64>,
    pub(crate) part: Range<i64>,
    pub(crate) group: i32,
    pub(crate) dtype: DType,
}

impl Param {
    /// A float32 parameter of group 0, which is entirely on this rank.
    pub fn new(shape: &[i64]) -> Param {
        // If the number of elements overflows, the library refuses the shape.
        let numel = shape.iter().try_fold(1i64, |product, n| product.checked_mul(*n)).unwrap_or(0);
        Param { shape: shape.to_vec(), part: 0..numel, group: 0, dtype: DType::Float32 }
    }

    /// Sets the elements that this rank has, as a range of the flattened parameter. The ranks' parts, in rank order,
    /// make up the whole, or each rank has the whole.
    pub fn part(mut self, part: Range<i64>) -> Param {
        self.part = part;
        self
    }

    /// Sets the group whose options and learning rate apply.
    pub fn group(mut self, group: i32) -> Param {
        self.group = group;
        self
    }

    /// Sets the type of the weights: float32, float16 or bfloat16. For 16-bit types the state has a float32 copy.
    pub fn dtype(mut self, dtype: DType) -> Param {
        self.dtype = dtype;
        self
    }
}

/// This rank's part of a parameter in a step: its weights, borrowed mutably, and its gradient.
#[derive(Debug)]
pub struct Part<'step> {
    weights: *mut c_void,
    grad: Option<*const c_void>,
    lengths: [[i64; 1]; 2],
    dtypes: [DType; 2],
    borrowed: PhantomData<&'step mut ()>,
}

// It stands for a &mut [W] and a &[G], whose elements are Send and Sync.
unsafe impl Send for Part<'_> {}

impl<'step> Part<'step> {
    /// Weights of the type that the parameter was added with, and a gradient of float32, float16 or bfloat16.
    pub fn new<W: Element, G: Element>(weights: &'step mut [W], grad: &'step [G]) -> Part<'step> {
        Part {
            weights: weights.as_mut_ptr().cast(),
            grad: Some(grad.as_ptr().cast()),
            lengths: [[weights.len() as i64], [grad.len() as i64]],
            dtypes: [W::DTYPE, G::DTYPE],
            borrowed: PhantomData,
        }
    }

    /// Weights without a gradient: the step leaves them and their state unchanged. The gradient must be missing on
    /// every rank.
    pub fn without_grad<W: Element>(weights: &'step mut [W]) -> Part<'step> {
        Part { grad: None, ..Part::new::<W, f32>(weights, &[]) }
    }

    pub(crate) fn weights(&self) -> sys::dc_tensor {
        view(self.weights, &self.lengths[0], self.dtypes[0])
    }

    pub(crate) fn grad(&self) -> sys::dc_tensor {
        self.grad.map_or_else(output, |grad| view(grad, &self.lengths[1], self.dtypes[1]))
    }
}

impl Registered {
    /// The memory of weights and gradient for a step. During 'step nothing else may use it.
    unsafe fn part<'step>(&mut self) -> Part<'step> {
        // The range stays within the memory, whatever was registered: the library refuses a part that is not the
        // optimizer's.
        let held = self.weights.length() as i64;
        let first = if self.sharded { 0 } else { self.part.start.clamp(0, held) };
        let count = (self.part.end - self.part.start).clamp(0, held - first);
        let dtype = self.weights.dtype();
        let weights = self.weights.as_mut_ptr().cast::<u8>().add(first as usize * dtype.size());
        let given = self.grad.length() as i64;
        // A shard that is only padding also has a gradient if other ranks have one, since the ranks' steps must agree
        // on it.
        let frozen = self.sharded && given == 0 && held > 0;
        let grad = (given >= count && !frozen).then(|| self.grad.as_mut_ptr() as *const c_void);
        let (lengths, dtypes) = ([[count]; 2], [dtype, self.grad.dtype()]);
        Part { weights: weights.cast(), grad, lengths, dtypes, borrowed: PhantomData }
    }
}

impl Context {
    /// The description of a parameter for an optimizer, with this rank's part.
    pub fn param(&self, id: i64) -> Result<Param> {
        let param = self.params.get(&id).ok_or_else(|| unknown(id))?;
        Ok(Param::new(&param.shape).part(param.part.clone()).dtype(param.weights.dtype()))
    }

    /// Lends this rank's parts of parameters for an optimizer's step, in the order in which they were added there. A
    /// parameter without a gradient, because it is frozen, is left alone. Fails when [`Context::update`] does, and
    /// where an id is named twice. Afterwards say [`Context::params_updated`]; whole weights (stages 1 and 2) are the
    /// caller's to gather.
    ///
    /// ```
    /// let device = dc::Device::open("cpu")?;
    /// let linalg = dc::Linalg::new(&device, &dc::LinalgOptions::default())?;
    /// let mut sgd = dc::Sgd::new(&linalg, &dc::SgdOptions::default())?;
    /// let mut context = dc::Context::builder().build(&device, None)?;
    /// context.register_z3_param(7, &[2], vec![1.0f32, 2.0], vec![0.0f32; 2], dc::Z3Options::default())?;
    /// context.register_graph(1, dc::Stage::Z3, &[7])?;
    /// sgd.add_param(&context.param(7)?)?;
    /// sgd.set_lr(0, 0.5)?;
    /// context.start_backward(true)?;
    /// context.reduce_grad(1, 7, &[2.0f32, 4.0])?;
    /// context.end_backward(1, false)?;
    /// sgd.step(&mut context.parts(&[7])?, 1.0)?;
    /// context.params_updated(&[7])?;
    /// assert_eq!(context.gather::<f32>(1, 7)?[..], [0.0, 0.0]);
    /// # Ok::<(), dc::Error>(())
    /// ```
    ///
    /// A step cannot change weights that are gathered:
    ///
    /// ```compile_fail
    /// fn step(mut context: dc::Context, sgd: &mut dc::Sgd) {
    ///     let full = context.gather::<f32>(1, 7).unwrap();
    ///     sgd.step(&mut context.parts(&[7]).unwrap(), 1.0).unwrap();
    ///     println!("{}", full[0]);
    /// }
    /// ```
    pub fn parts(&mut self, ids: &[i64]) -> Result<Vec<Part<'_>>> {
        let mut seen = BTreeSet::new();
        let mut part = |id: i64| {
            self.ensure_idle(id)?;
            if !seen.insert(id) {
                return Err(Error::new(Status::INVALID, format!("id = {id} is named twice, must be named once")));
            }
            let param = self.params.get_mut(&id).ok_or_else(|| unknown(id))?;
            Ok(unsafe { param.part() }) // the result borrows the context
        };
        ids.iter().map(|id| part(*id)).collect()
    }
}
