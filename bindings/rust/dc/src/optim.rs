//! AdamW over whole parameters or this rank's parts of them.

use crate::device::{Device, Stream};
use crate::error::{check, Error, Result, Status};
use crate::sys;
use crate::tensor::{view, view_of, Element};
use std::mem::size_of;
use std::ops::Range;
use std::ptr::{self, NonNull};

/// The numbers of [`AdamW`]; see `dc_adamw_options`. A zero is a zero here.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct AdamWOptions {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub amsgrad: bool,
    pub maximize: bool,
    pub check_finite: bool,
}

impl Default for AdamWOptions {
    fn default() -> AdamWOptions {
        AdamWOptions {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            amsgrad: false,
            maximize: false,
            check_finite: false,
        }
    }
}

/// An AdamW with float32 weights, all in one group.
///
/// ```
/// let mut adamw = dc::AdamW::new(&dc::Device::open("cpu")?, 1, &dc::AdamWOptions::default())?;
/// adamw.add_param(&[2, 2], 0..4)?;
/// adamw.set_lr(0.5)?;
/// let mut weights = [1.0f32; 4];
/// adamw.step(&mut [(&mut weights, &[2.0, 2.0, -2.0, -2.0])], 1.0)?;
/// assert_eq!(weights, [0.5, 0.5, 1.5, 1.5]);
/// # Ok::<(), dc::Error>(())
/// ```
#[derive(Debug)]
pub struct AdamW(NonNull<sys::dc_optimizer>);

// Its functions are of the class [handle]: one thread at a time.
unsafe impl Send for AdamW {}

impl AdamW {
    /// Makes one. threads: 0 for as many as the process may run on.
    pub fn new(device: &Device, threads: i32, options: &AdamWOptions) -> Result<AdamW> {
        let or_none = |value: f64| if value == 0.0 { -1.0 } else { value };
        let options = sys::dc_adamw_options {
            struct_size: size_of::<sys::dc_adamw_options>(),
            beta1: or_none(options.beta1),
            beta2: or_none(options.beta2),
            eps: or_none(options.eps),
            weight_decay: options.weight_decay,
            amsgrad: options.amsgrad.into(),
            maximize: options.maximize.into(),
            check_finite: options.check_finite.into(),
            reserved0: 0,
        };
        let work = sys::dc_linalg_options { struct_size: size_of::<sys::dc_linalg_options>(), threads, plain: 1 };
        let (mut linalg, mut optimizer) = (ptr::null_mut(), ptr::null_mut());
        check(unsafe { sys::dc_linalg_create(device.as_ptr(), &work, &mut linalg) })?;
        let made = check(unsafe { sys::dc_adamw_create(linalg, &options, &mut optimizer) });
        unsafe { sys::dc_linalg_destroy(linalg) }; // the optimizer has what it needs
        made.map(|()| AdamW(NonNull::new(optimizer).expect("an optimizer")))
    }

    /// Adds a parameter, of which this rank has `part`, flattened.
    pub fn add_param(&mut self, shape: &[i64], part: Range<i64>) -> Result<i64> {
        let mut index = 0;
        check(unsafe {
            sys::dc_optimizer_add_param(
                self.0.as_ptr(),
                0,
                shape.as_ptr(),
                shape.len() as i32,
                part.start,
                part.end.saturating_sub(part.start),
                sys::DC_FLOAT32,
                &mut index,
            )
        })?;
        Ok(index)
    }

    /// Sets the learning rate, which begins as 1e-3.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        check(unsafe { sys::dc_optimizer_set_lr(self.0.as_ptr(), 0, lr) })
    }

    /// Puts steps in the order of a stream; None: of the calling thread.
    ///
    /// # Safety
    /// A step on a stream uses its slices after the call returned: the caller keeps them alive, reads and writes them
    /// only when the stream has passed it, and keeps the stream until another is set or the optimizer is dropped.
    pub unsafe fn set_stream(&mut self, stream: Option<&Stream>) -> Result<()> {
        check(sys::dc_optimizer_set_stream(self.0.as_ptr(), stream.map_or(ptr::null_mut(), Stream::as_ptr)))
    }

    /// Names float32 numbers on the optimizer's device that each later step reads when it takes place: gradients are
    /// divided by `loss_scale`, and a step that finds another number than 0 in `found_inf` changes nothing. None: none.
    ///
    /// # Safety
    /// Both point to memory of the device where weights are, which lives until others are named and the steps that read
    /// them are done.
    pub unsafe fn set_loss_scale(
        &mut self,
        loss_scale: Option<NonNull<f32>>,
        found_inf: Option<NonNull<f32>>,
    ) -> Result<()> {
        let one = [1];
        let tensor = |number: Option<NonNull<f32>>| number.map(|n| view(n.as_ptr().cast(), &one, f32::DTYPE));
        let (scale, found) = (tensor(loss_scale), tensor(found_inf));
        let pointer = |number: &Option<sys::dc_tensor>| number.as_ref().map_or(ptr::null(), |n| n as *const _);
        check(sys::dc_optimizer_set_loss_scale(self.0.as_ptr(), pointer(&scale), pointer(&found)))
    }

    /// Makes a step with the weights and gradients of each parameter, in the order in which they were added.
    pub fn step(&mut self, parts: &mut [(&mut [f32], &[f32])], grad_scale: f64) -> Result<()> {
        if parts.iter().any(|(weights, grads)| weights.len() != grads.len()) {
            return Err(Error::new(Status::SHAPE, "weights and gradients must be of one length".to_string()));
        }
        let lengths: Vec<[i64; 1]> = parts.iter().map(|(weights, _)| [weights.len() as i64]).collect();
        let weights: Vec<_> =
            parts.iter_mut().zip(&lengths).map(|(p, n)| view(p.0.as_mut_ptr().cast(), n, f32::DTYPE)).collect();
        let grads: Vec<_> = parts.iter().zip(&lengths).map(|(p, n)| view_of(p.1, n)).collect();
        check(unsafe {
            sys::dc_optimizer_step(
                self.0.as_ptr(),
                weights.as_ptr(),
                grads.as_ptr(),
                size_of::<sys::dc_tensor>(),
                parts.len() as i64,
                grad_scale,
            )
        })
    }

    /// The most steps that any parameter has made.
    pub fn steps(&self) -> i64 {
        unsafe { sys::dc_optimizer_steps(self.0.as_ptr()) }
    }

    /// This rank's state as bytes.
    pub fn save(&mut self) -> Result<Vec<u8>> {
        let mut bytes = 0;
        check(unsafe { sys::dc_optimizer_save_size(self.0.as_ptr(), &mut bytes) })?;
        let mut state = vec![0u8; bytes];
        check(unsafe { sys::dc_optimizer_save(self.0.as_ptr(), state.as_mut_ptr().cast(), bytes) })?;
        Ok(state)
    }

    /// Takes a state that [`AdamW::save`] gave, with the same parameters.
    pub fn load(&mut self, state: &[u8]) -> Result<()> {
        check(unsafe { sys::dc_optimizer_load(self.0.as_ptr(), state.as_ptr().cast(), state.len()) })
    }
}

impl Drop for AdamW {
    fn drop(&mut self) {
        unsafe { sys::dc_optimizer_destroy(self.0.as_ptr()) }
    }
}
