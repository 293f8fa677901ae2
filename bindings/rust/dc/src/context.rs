//! One rank's training state.

use crate::buffer::{AnyMemory, Buffer, Memory, MemoryKind};
use crate::builder::{Builder, Log};
use crate::comm::{Abort, Comm};
use crate::device::Stream;
use crate::error::{check, Error, Result, Status};
use crate::sys;
use crate::tensor::{check_shape, view, view_of, DType, Element};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::mem::{size_of, ManuallyDrop};
use std::ops::Range;
use std::ptr::{self, NonNull};

/// How much of the training state is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Nothing is sharded: whole gradients are averaged.
    Z0,
    /// Optimizer states: gradients are summed locally, and averaged in a backward that updates.
    Z1,
    /// Gradients too: every backward averages them, and each rank receives its part.
    Z2,
    /// Weights too.
    Z3,
}

/// How a sharded parameter behaves.
#[derive(Clone, Copy, Debug, Default)]
pub struct Z3Options {
    /// It stays gathered until the weights change.
    pub persistent: bool,
    /// The type in which gradients are reduced; `None`: the type in which they are passed.
    pub expected_grad_dtype: Option<DType>,
}

pub(crate) struct Registered {
    /// The shape, which gathered weights get.
    pub(crate) shape: Vec<i64>,
    pub(crate) weights: Box<dyn AnyMemory>,
    pub(crate) grad: Box<dyn AnyMemory>,
    /// This rank's part of the gradient, in elements of the flattened parameter.
    pub(crate) part: Range<i64>,
    /// Whether `weights` is this rank's shard, or the whole.
    pub(crate) sharded: bool,
}

/// One training run on one rank: its parameters, graphs, buffers and streams.
pub struct Context {
    raw: NonNull<sys::dc_context>,
    // Dropped after the library's context, which reads and writes this memory.
    pub(crate) params: ManuallyDrop<HashMap<i64, Registered>>,
    log: ManuallyDrop<Option<Box<Log>>>,
    abort: Option<Abort>,
    /// This rank, and the number of ranks, within the group that shards the parameters.
    ranks: (i32, i32),
    pub(crate) reducing: Cell<bool>,
    pub(crate) gathering: RefCell<BTreeSet<i64>>,
}

// The thread class is [handle]: any thread, but one at a time. All that a context owns is Send.
unsafe impl Send for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        if let (Some(abort), true) = (&self.abort, std::thread::panicking()) {
            abort.abort("a rank panicked");
        }
        unsafe {
            sys::dc_context_destroy(self.raw.as_ptr());
            ManuallyDrop::drop(&mut self.params);
            ManuallyDrop::drop(&mut self.log);
        }
    }
}

impl Context {
    /// `replicas`: as in `dc_config`, the number of groups of consecutive ranks that each hold all parameters; 0 means
    /// 1.
    pub(crate) fn from_raw(
        raw: NonNull<sys::dc_context>,
        log: Option<Box<Log>>,
        comm: Option<&Comm>,
        replicas: i32,
    ) -> Context {
        let group = comm.map_or(1, |comm| (comm.size() / replicas.max(1)).max(1)); // dc_init refuses other numbers
        Context {
            raw,
            params: ManuallyDrop::new(HashMap::new()),
            log: ManuallyDrop::new(log),
            abort: comm.map(Comm::abort_handle),
            ranks: comm.map_or((0, 1), |comm| (comm.rank() % group, group)),
            reducing: Cell::new(false),
            gathering: RefCell::new(BTreeSet::new()),
        }
    }

    /// Returns a builder for a context.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The handle, for calls that only [`crate::sys`] offers.
    pub fn as_ptr(&self) -> *mut sys::dc_context {
        self.raw.as_ptr()
    }

    /// Allocates zeroed memory of the library for a shard. Peers can read [`MemoryKind::Shared`] in place.
    pub fn memory<T: Element>(&self, length: usize, kind: MemoryKind) -> Result<Memory<T>> {
        let bytes = length.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::new(Status::NO_MEMORY, format!("length = {length} elements, more bytes than can be counted"))
        })?;
        let mut buffer = ptr::null_mut();
        check(unsafe { sys::dc_context_alloc(self.as_ptr(), bytes as i64, kind as i32, &mut buffer) })?;
        Ok(unsafe { Memory::from_buffer(Buffer::from_raw(buffer), length) })
    }

    /// Registers a parameter of a stage 0, 1 or 2 graph, whose weights are whole on every rank. `grad` is this rank's
    /// part of the flattened gradient, from element `offset` on; if it is empty, the parameter is frozen.
    pub fn register_param<T: Element, G: Element>(
        &mut self,
        id: i64,
        shape: &[i64],
        weights: impl Into<Memory<T>>,
        grad: impl Into<Memory<G>>,
        offset: i64,
    ) -> Result<()> {
        let (weights, grad) = (weights.into(), grad.into());
        check_shape(shape, weights.len())?;
        let part = [grad.len() as i64];
        let (whole, mut buffer) = (view(weights.as_ptr().cast(), shape, T::DTYPE), view_of(&grad, &part));
        let (lengths, ndim) = (shape.as_ptr(), shape.len() as i32);
        check(unsafe { sys::dc_register_param(self.as_ptr(), id, lengths, ndim, &whole, &mut buffer, offset) })?;
        let part = offset..offset + grad.len() as i64;
        self.keep(id, shape, weights, grad, part, false);
        Ok(())
    }

    /// Registers a sharded parameter of a stage 3 graph. `shard` is this rank's ceil(N / ranks) elements. `grad` is
    /// this rank's part of the gradient, of the same length, or empty for a frozen parameter.
    pub fn register_z3_param<T: Element, G: Element>(
        &mut self,
        id: i64,
        shape: &[i64],
        shard: impl Into<Memory<T>>,
        grad: impl Into<Memory<G>>,
        options: Z3Options,
    ) -> Result<()> {
        let (shard, grad) = (shard.into(), grad.into());
        let (held, part) = ([shard.len() as i64], [grad.len() as i64]);
        let dtype = options.expected_grad_dtype.map_or(sys::DC_DTYPE_NONE, |dtype| dtype as i32);
        let (weights, mut buffer) = (view_of(&shard, &held), view_of(&grad, &part));
        let (lengths, ndim, persistent) = (shape.as_ptr(), shape.len() as i32, i32::from(options.persistent));
        check(unsafe {
            sys::dc_register_z3_param(self.as_ptr(), id, lengths, ndim, &weights, &mut buffer, persistent, dtype)
        })?;
        let (rank, ranks) = (i64::from(self.ranks.0), i64::from(self.ranks.1));
        let numel = shape.iter().product::<i64>();
        let length = (numel + ranks - 1) / ranks;
        let part = (rank * length).min(numel)..((rank + 1) * length).min(numel); // without the padding
        self.keep(id, shape, shard, grad, part, true);
        Ok(())
    }

    fn keep<T: Element, G: Element>(
        &mut self,
        id: i64,
        shape: &[i64],
        weights: Memory<T>,
        grad: Memory<G>,
        part: Range<i64>,
        sharded: bool,
    ) {
        let (weights, grad) = (Box::new(weights), Box::new(grad));
        self.params.insert(id, Registered { shape: shape.to_vec(), weights, grad, part, sharded });
    }

    /// Gives a parameter a name, which errors and dumps show after its number; "" removes the name.
    pub fn set_param_name(&mut self, id: i64, name: &str) -> Result<()> {
        let name = crate::error::c_name("name", name)?;
        check(unsafe { sys::dc_context_set_param_name(self.as_ptr(), id, name.as_ptr()) })
    }

    /// Moves a parameter's gradient to other memory, which is set to zero.
    pub fn update_param_grad_buffer<G: Element>(
        &mut self,
        id: i64,
        grad: impl Into<Memory<G>>,
        offset: i64,
    ) -> Result<()> {
        let grad = grad.into();
        let part = [grad.len() as i64];
        let mut buffer = view_of(&grad, &part);
        check(unsafe { sys::dc_context_update_param_grad_buffer(self.as_ptr(), id, &mut buffer, offset) })?;
        if let Some(param) = self.params.get_mut(&id) {
            if !param.sharded && !grad.is_empty() {
                param.part = offset..offset + grad.len() as i64;
            }
            param.grad = Box::new(grad);
        }
        Ok(())
    }

    /// Unregisters a parameter, and frees its memory.
    pub fn unregister_param(&mut self, id: i64) -> Result<()> {
        check(unsafe { sys::dc_unregister_param(self.as_ptr(), id) })?;
        self.gathering.get_mut().remove(&id);
        self.params.remove(&id);
        Ok(())
    }

    /// Lends this rank's part of a parameter and of its gradient, as for an optimizer's step. Call
    /// [`Context::params_updated`] afterwards. Fails with [`Status::BUSY`] while the library may use them: between a
    /// reduction and [`Context::end_backward`], and between a prefetch, [`Context::set_persistent`] or
    /// [`Context::reload_parameter`] and the parameter's next [`Context::gather`].
    pub fn update<T: Element, G: Element, R>(
        &mut self,
        id: i64,
        work: impl FnOnce(&mut [T], &mut [G]) -> R,
    ) -> Result<R> {
        self.ensure_idle(id)?;
        let param = self.params.get_mut(&id).ok_or_else(|| unknown(id))?;
        let (weights, grad) = (param.weights.dtype(), param.grad.dtype());
        let (requested, buffer) = (param.weights.as_any().downcast_mut(), param.grad.as_any().downcast_mut());
        match (requested, buffer) {
            (Some(weights), Some(grad)) => {
                let (weights, grad): (&mut Memory<T>, &mut Memory<G>) = (weights, grad);
                Ok(work(weights, grad))
            }
            _ => {
                let (is, requested) = ((weights.name(), grad.name()), (T::DTYPE.name(), G::DTYPE.name()));
                Err(Error::new(Status::DTYPE, format!("id = {id}: weights and gradient are {is:?}, not {requested:?}")))
            }
        }
    }

    /// Fails while the library may use the parameters' memory.
    pub(crate) fn ensure_idle(&self, id: i64) -> Result<()> {
        if self.reducing.get() {
            let text = format!("id = {id}: gradients are being reduced; call end_backward first");
            return Err(Error::new(Status::BUSY, text));
        }
        if let Some(other) = self.gathering.borrow().iter().next() {
            let text = format!("id = {id}: parameter {other} is being gathered; call gather first");
            return Err(Error::new(Status::BUSY, text));
        }
        Ok(())
    }

    /// Registers a graph: a set of parameters under an id, used at one stage. Every rank must do so in the same order.
    pub fn register_graph(&mut self, graph: i64, stage: Stage, ids: &[i64]) -> Result<()> {
        let register = match stage {
            Stage::Z0 => sys::dc_register_graph_z0,
            Stage::Z1 => sys::dc_register_graph_z1,
            Stage::Z2 => sys::dc_register_graph_z2,
            Stage::Z3 => sys::dc_register_graph_z3,
        };
        check(unsafe { register(self.as_ptr(), graph, ids.as_ptr(), ids.len() as i64) })
    }

    /// Unregisters a graph.
    pub fn unregister_graph(&mut self, graph: i64) -> Result<()> {
        check(unsafe { sys::dc_unregister_graph(self.as_ptr(), graph) })
    }

    /// Begins a forward pass.
    pub fn start_forward(&self) -> Result<()> {
        check(unsafe { sys::dc_start_forward(self.as_ptr()) })
    }

    /// Ends a forward pass.
    pub fn end_forward(&self) -> Result<()> {
        check(unsafe { sys::dc_end_forward(self.as_ptr()) })
    }

    /// Begins a backward pass; `update`: the optimizer steps after it.
    pub fn start_backward(&self, update: bool) -> Result<()> {
        check(unsafe { sys::dc_start_backward(self.as_ptr(), i32::from(update)) })
    }

    /// After the last backward of a step: returns the lowest id of a parameter whose gradient is not finite on some
    /// rank; None: all are finite. Needs [`Config::check_finite`](crate::Config::check_finite). Every rank must call
    /// it.
    #[doc(alias = "dc_context_grads_finite")]
    pub fn first_not_finite(&self) -> Result<Option<i64>> {
        let (mut finite, mut id) = (0, 0);
        check(unsafe { sys::dc_context_grads_finite(self.as_ptr(), &mut finite, &mut id) })?;
        Ok((finite == 0).then_some(id))
    }

    /// Announces that the weights of these parameters changed. Fails if `ids` is empty. Every rank must call it at the
    /// same point.
    pub fn params_updated(&mut self, ids: &[i64]) -> Result<()> {
        if ids.is_empty() {
            let text = "ids is empty, must name a parameter; all_params_updated is for all of them";
            return Err(Error::new(Status::INVALID, text));
        }
        check(unsafe { sys::dc_context_params_updated(self.as_ptr(), ids.as_ptr(), ids.len() as i64) })
    }

    /// Announces that the weights of all parameters changed. Every rank must call it at the same point.
    pub fn all_params_updated(&mut self) -> Result<()> {
        check(unsafe { sys::dc_context_params_updated(self.as_ptr(), ptr::null(), 0) })
    }

    /// Keeps the gradients of these parameters: the next reduction adds to them.
    pub fn accumulate_grads(&mut self, ids: &[i64]) -> Result<()> {
        check(unsafe { sys::dc_context_accumulate_grads(self.as_ptr(), ids.as_ptr(), ids.len() as i64) })
    }

    /// Keeps a sharded parameter gathered from now on. Every rank must call it.
    pub fn set_persistent(&mut self, id: i64) -> Result<()> {
        check(unsafe { sys::dc_set_persistent(self.as_ptr(), id) })?;
        self.gathering.get_mut().insert(id);
        Ok(())
    }

    /// Undoes [`Context::set_persistent`].
    pub fn clear_persistent(&mut self, id: i64) -> Result<()> {
        check(unsafe { sys::dc_clear_persistent(self.as_ptr(), id) })
    }

    /// Drops a parameter's gathered weights, so that the next gather communicates.
    pub fn invalidate_gathered(&mut self, id: i64) -> Result<()> {
        check(unsafe { sys::dc_invalidate_gathered_param(self.as_ptr(), id) })
    }

    /// Drops all gathered weights that are not persistent.
    pub fn clear_all_gathered(&mut self) -> Result<()> {
        check(unsafe { sys::dc_clear_all_gathered_params(self.as_ptr()) })
    }

    /// Unregisters all graphs.
    pub fn reset(&mut self) -> Result<()> {
        check(unsafe { sys::dc_reset(self.as_ptr()) })
    }

    /// Aborts a step: drops gradients that are not reduced yet, and gathered weights. Every rank must call it.
    pub fn step_abort(&mut self) -> Result<()> {
        check(unsafe { sys::dc_context_step_abort(self.as_ptr()) })?;
        self.idle();
        Ok(())
    }

    /// Ends the context. Afterwards only [`Context::update`] works, which still lends the parameters' memory.
    pub fn cleanup(&mut self) -> Result<()> {
        check(unsafe { sys::dc_cleanup(self.as_ptr()) })?;
        self.idle();
        Ok(())
    }

    fn idle(&mut self) {
        self.reducing.set(false);
        self.gathering.get_mut().clear();
    }

    /// The first failure of asynchronous work, if there was one.
    pub fn async_error(&self) -> Result<()> {
        check(unsafe { sys::dc_context_check(self.as_ptr()) })
    }

    /// Orders the operators against a stream's work instead of the calling thread's.
    ///
    /// # Safety
    /// Slices that operators get, and results that they give, are then used by the stream after the call returned. The
    /// caller keeps them alive and unwritten, and waits for the stream before reading. The caller also waits for the
    /// stream between a gather and the next [`Context::update`] or [`Context::parts`], which take the gather for done.
    /// The stream itself must live until another is set, or the context is cleaned up or dropped.
    pub unsafe fn set_stream(&self, stream: Option<&Stream>) -> Result<()> {
        check(sys::dc_context_set_stream(self.as_ptr(), stream.map_or(ptr::null_mut(), Stream::as_ptr)))
    }

    /// While on, reductions do nothing, and gathers are real.
    pub fn enable_profiling(&self, on: bool) -> Result<()> {
        check(unsafe { sys::dc_enable_profiling(self.as_ptr(), i32::from(on)) })
    }

    /// Whether profiling is on.
    pub fn is_profiling(&self) -> bool {
        unsafe { sys::dc_is_profiling(self.as_ptr()) == 1 }
    }
}

pub(crate) fn unknown(id: i64) -> Error {
    Error::new(Status::NOT_FOUND, format!("id = {id}, must be a parameter that this context registered"))
}
