//! Optimizers over whole parameters, or this rank's parts of them.

use crate::comm::{Abort, Comm};
use crate::device::Stream;
use crate::error::{c_name, check, Error, Result, Status};
use crate::kinds::{Distributed, Kind};
use crate::linalg::Linalg;
use crate::parts::{Param, Part};
use crate::report::lengths;
use crate::stats::OptimizerStats;
use crate::sys;
use crate::tensor::{output, view, DType, Element, Tensor};
use std::marker::PhantomData;
use std::mem::size_of;
use std::ptr::{self, NonNull};

/// An optimizer of a [`Kind`]. A parameter is known by its index, in the order in which they were added. Weights and
/// gradients stay the caller's and are borrowed for each step; the state is the optimizer's.
///
/// It is `Send`, and used by one thread at a time:
///
/// ```compile_fail
/// fn shared<T: Sync>() {}
/// shared::<dc::Muon>();
/// ```
///
/// Weights cannot be used while a step borrows them, nor one's state be read while a step changes it:
///
/// ```compile_fail
/// fn step(adamw: &mut dc::AdamW, weights: &mut [f32], grad: &[f32]) {
///     let mut parts = [dc::Part::new(weights, grad)];
///     weights[0] = 1.0;
///     adamw.step(&mut parts, 1.0).unwrap();
/// }
/// ```
///
/// ```compile_fail
/// fn step(adamw: &mut dc::AdamW, weights: &mut [f32], grad: &[f32]) -> f32 {
///     let mean = adamw.state::<f32>(0, "exp_avg").unwrap();
///     adamw.step(&mut [dc::Part::new(weights, grad)], 1.0).unwrap();
///     mean.data()[0]
/// }
/// ```
#[derive(Debug)]
pub struct Optimizer<K: Kind> {
    raw: NonNull<sys::dc_optimizer>,
    abort: Option<Abort>,
    kind: PhantomData<K>,
}

// Its functions are of the thread class [handle]: one thread at a time.
unsafe impl<K: Kind> Send for Optimizer<K> {}

impl<K: Kind> Optimizer<K> {
    fn create(linalg: &Linalg, comm: Option<&Comm>, options: &K) -> Result<Optimizer<K>> {
        let (ranks, mut raw) = (comm.map_or(ptr::null_mut(), Comm::as_ptr), ptr::null_mut());
        check(unsafe { options.create(linalg.as_ptr(), ranks, &mut raw) })?;
        let raw = NonNull::new(raw).expect("an optimizer");
        Ok(Optimizer { raw, abort: comm.map(Comm::abort_handle), kind: PhantomData })
    }

    /// Makes an optimizer that does all its work on this rank. The options are those of group 0.
    pub fn new(linalg: &Linalg, options: &K) -> Result<Optimizer<K>> {
        Optimizer::create(linalg, None, options)
    }

    /// The handle, for calls that only [`crate::sys`] offers.
    pub fn as_ptr(&self) -> *mut sys::dc_optimizer {
        self.raw.as_ptr()
    }

    /// Sets all options of a group; the number of groups as index adds a group.
    pub fn set_group(&mut self, group: i32, options: &K) -> Result<()> {
        check(unsafe { options.set_group(self.as_ptr(), group) })
    }

    /// Adds a parameter, and returns its index.
    pub fn add_param(&mut self, param: &Param) -> Result<i64> {
        let (shape, ndim) = (param.shape.as_ptr(), param.shape.len() as i32);
        let (offset, count) = (param.part.start, param.part.end.saturating_sub(param.part.start));
        let (group, dtype, mut index) = (param.group, param.dtype as i32, 0);
        check(unsafe {
            sys::dc_optimizer_add_param(self.as_ptr(), group, shape, ndim, offset, count, dtype, &mut index)
        })?;
        Ok(index)
    }

    /// Sets a group's learning rate, which is 1e-3 at first.
    pub fn set_lr(&mut self, group: i32, lr: f64) -> Result<()> {
        check(unsafe { sys::dc_optimizer_set_lr(self.as_ptr(), group, lr) })
    }

    /// Queues steps on a stream; `None` runs them on the calling thread. AdamW's and SGD's are then queued, the others'
    /// wait for it.
    ///
    /// # Safety
    /// A step on a stream uses its slices after the call returned. The caller keeps them alive, and reads and writes
    /// them only when the stream has passed it. It keeps the stream until another is set or the optimizer is dropped.
    pub unsafe fn set_stream(&mut self, stream: Option<&Stream>) -> Result<()> {
        check(sys::dc_optimizer_set_stream(self.as_ptr(), stream.map_or(ptr::null_mut(), Stream::as_ptr)))
    }

    /// Names float32 numbers that each later step reads when it takes place: gradients are divided by `loss_scale`, and
    /// a step that finds another number than 0 in `found_inf` changes nothing. None: none.
    ///
    /// # Safety
    /// Both point to memory which lives until others are named and the steps that read them are done.
    pub unsafe fn set_loss_scale(
        &mut self,
        loss_scale: Option<NonNull<f32>>,
        found_inf: Option<NonNull<f32>>,
    ) -> Result<()> {
        let one = [1];
        let tensor = |number: Option<NonNull<f32>>| number.map(|n| view(n.as_ptr().cast(), &one, f32::DTYPE));
        let (scale, found) = (tensor(loss_scale), tensor(found_inf));
        let pointer = |number: &Option<sys::dc_tensor>| number.as_ref().map_or(ptr::null(), |n| n as *const _);
        check(sys::dc_optimizer_set_loss_scale(self.as_ptr(), pointer(&scale), pointer(&found)))
    }

    /// Makes a step with a part of each parameter, in the order in which they were added. Gradients are multiplied by
    /// `grad_scale`. On an error nothing has changed on any rank, unless communication failed.
    pub fn step(&mut self, parts: &mut [Part<'_>], grad_scale: f64) -> Result<()> {
        let mut weights: Vec<_> = parts.iter().map(Part::weights).collect();
        let grads: Vec<_> = parts.iter().map(Part::grad).collect();
        let (size, count) = (size_of::<sys::dc_tensor>(), parts.len() as i64);
        check(unsafe {
            sys::dc_optimizer_step(self.as_ptr(), weights.as_mut_ptr(), grads.as_ptr(), size, count, grad_scale)
        })
    }

    /// The largest number of steps that any parameter has made.
    pub fn steps(&self) -> Result<i64> {
        let mut steps = 0;
        check(unsafe { sys::dc_optimizer_get_steps(self.as_ptr(), &mut steps) })?;
        Ok(steps)
    }

    /// The names of the tensors of a parameter's state on this rank.
    pub fn state_names(&mut self, index: i64) -> Result<Vec<String>> {
        let mut names = Vec::new();
        loop {
            let mut name = ptr::null();
            check(unsafe { sys::dc_optimizer_get_state_name(self.as_ptr(), index, names.len() as i64, &mut name) })?;
            if name.is_null() {
                return Ok(names);
            }
            names.push(unsafe { crate::error::text(name) }.to_owned());
        }
    }

    /// A tensor of a parameter's state.
    pub fn state<T: Element>(&mut self, index: i64, name: &str) -> Result<Tensor<'_, T>> {
        let (c_name, mut piece) = (c_name("name", name)?, output());
        check(unsafe { sys::dc_optimizer_get_state(self.as_ptr(), index, c_name.as_ptr(), &mut piece) })?;
        if piece.dtype != T::DTYPE as i32 {
            let is = DType::from_raw(piece.dtype).map_or("unknown", DType::name);
            let text = format!("name = {name:?} of parameter {index} is of {is}, not {}", T::DTYPE.name());
            return Err(Error::new(Status::DTYPE, text));
        }
        unsafe {
            let shape = lengths(piece.shape, piece.ndim);
            let data = match NonNull::new(piece.data.cast::<T>()) {
                Some(data) => std::slice::from_raw_parts(data.as_ptr(), shape.iter().product::<i64>() as usize),
                None => &[],
            };
            Tensor::new(data, &shape)
        }
    }

    /// This rank's state as bytes.
    pub fn save(&mut self) -> Result<Vec<u8>> {
        let mut bytes = 0;
        check(unsafe { sys::dc_optimizer_get_save_bytes(self.as_ptr(), &mut bytes) })?;
        let mut state = vec![0u8; bytes as usize];
        check(unsafe { sys::dc_optimizer_save(self.as_ptr(), state.as_mut_ptr().cast(), bytes) })?;
        Ok(state)
    }

    /// Loads a state that [`Optimizer::save`] returned, with the same parameters.
    pub fn load(&mut self, state: &[u8]) -> Result<()> {
        check(unsafe { sys::dc_optimizer_load(self.as_ptr(), state.as_ptr().cast(), state.len() as i64) })
    }

    /// Statistics of its memory and work on this rank.
    pub fn stats(&mut self) -> Result<OptimizerStats> {
        let size = size_of::<sys::dc_optimizer_stats>();
        let mut stats = sys::dc_optimizer_stats { struct_size: size, ..Default::default() };
        check(unsafe { sys::dc_optimizer_get_stats(self.as_ptr(), &mut stats) })?;
        Ok(stats.into())
    }
}

impl<K: Distributed> Optimizer<K> {
    /// Makes an optimizer whose ranks hold all parameters or parts of them, and share the work. It communicates over a
    /// copy of the communicator. Every rank makes the same calls, except for offsets, counts and data. If a panic drops
    /// the optimizer, the communicator is aborted, so that no other rank waits for its step.
    pub fn with_comm(linalg: &Linalg, comm: &Comm, options: &K) -> Result<Optimizer<K>> {
        Optimizer::create(linalg, Some(comm), options)
    }
}

impl<K: Kind> Drop for Optimizer<K> {
    fn drop(&mut self) {
        if let (Some(abort), true) = (&self.abort, std::thread::panicking()) {
            abort.abort("a rank panicked");
        }
        unsafe { sys::dc_optimizer_destroy(self.as_ptr()) }
    }
}
