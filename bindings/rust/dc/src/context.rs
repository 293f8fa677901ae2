//! One rank's training state.

use crate::buffer::{AnyMemory, Buffer, Loaded, Memory, MemoryKind};
use crate::comm::{Abort, Comm};
use crate::device::{Device, Stream};
use crate::error::{check, Error, Result, Status};
use crate::report::{lengths, Op, OpInfo};
use crate::sys;
use crate::tensor::{fits, output, view, view_of, DType, Element};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::ffi::{CStr, CString};
use std::mem::{size_of, ManuallyDrop};
use std::os::raw::{c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::ptr::{self, NonNull};

/// Severity of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum LogLevel {
    Error,
    Warning,
    Info,
}

/// How much of the training state is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Nothing: gradients are averaged whole.
    Z0,
    /// Optimizer states: gradients are summed locally, averaged in a backward that updates.
    Z1,
    /// And gradients: every backward averages, each rank receives its part.
    Z2,
    /// And weights.
    Z3,
}

/// How a sharded parameter behaves.
#[derive(Clone, Copy, Debug, Default)]
pub struct Z3Options {
    /// Stays gathered until the weights change.
    pub persistent: bool,
    /// The type in which gradients are reduced; `None`: as they come.
    pub expected_grad_dtype: Option<DType>,
}

/// The `compile` keys of the original; [`Config::default`] is the library's.
#[derive(Clone, Copy, Debug)]
pub struct Config(sys::dc_config);

impl Default for Config {
    fn default() -> Config {
        Config(sys::dc_config { struct_size: size_of::<sys::dc_config>(), ..Default::default() })
    }
}

impl Config {
    /// Whether one gradient bucket fills while the other is reduced.
    pub fn double_buffer(mut self, on: bool) -> Config {
        self.0.double_buffer = if on { 1 } else { -1 };
        self
    }

    /// All streams are drained before and after each reduction and gather, for debugging.
    pub fn synchronous(mut self, on: bool) -> Config {
        let on = i32::from(on);
        self.0.sync_before_reduce = on;
        self.0.sync_after_reduce = on;
        self.0.sync_before_allgather = on;
        self.0.sync_after_allgather = on;
        self
    }

    /// Peers read shards in place.
    ///
    /// # Safety
    /// No rank may change a shard ([`Context::update`]) before every rank has gathered it: put a collective between.
    pub unsafe fn symmetric_memory(mut self) -> Config {
        self.0.symmetric_memory = 1;
        self
    }
}

type Log = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

/// The choices with which a context is made.
#[derive(Default)]
pub struct Builder {
    log: Option<Log>,
    config: Config,
    bucket: Option<i64>,
}

impl Builder {
    /// Who gets the library's log lines. Called on the thread that did the work; must not call the library.
    pub fn log(mut self, log: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Builder {
        self.log = Some(Box::new(log));
        self
    }

    /// The `compile` keys.
    pub fn config(mut self, config: Config) -> Builder {
        self.config = config;
        self
    }

    /// Elements that a gradient bucket holds; 2^24 if not given.
    pub fn bucket(mut self, elements: i64) -> Builder {
        self.bucket = Some(elements);
        self
    }

    /// Makes the context and joins the ranks of the communicator (`None`: a world of one), which all do it.
    pub fn build(self, device: &Device, comm: Option<&Comm>) -> Result<Context> {
        let log = self.log.map(Box::new);
        let options = sys::dc_context_options {
            struct_size: size_of::<sys::dc_context_options>(),
            log: if log.is_some() { Some(write_log) } else { None },
            log_user: log.as_deref().map_or(ptr::null_mut(), |log| log as *const Log as *mut c_void),
        };
        let mut raw = ptr::null_mut();
        check(unsafe { sys::dc_context_create(device.as_ptr(), &options, &mut raw) })?;
        let context = Context {
            raw: NonNull::new(raw).expect("a context"),
            params: ManuallyDrop::new(HashMap::new()),
            log: ManuallyDrop::new(log),
            abort: comm.map(Comm::abort_handle),
            reducing: Cell::new(false),
            gathering: RefCell::new(BTreeSet::new()),
        };
        let comm = comm.map_or(ptr::null_mut(), Comm::as_ptr);
        check(unsafe { sys::dc_init(raw, comm, &self.config.0, self.bucket.unwrap_or(1 << 24)) })?;
        Ok(context)
    }
}

unsafe extern "C" fn write_log(level: i32, message: *const c_char, user: *mut c_void) {
    let log = &*(user as *const Log);
    let level = match level {
        sys::DC_LOG_ERROR => LogLevel::Error,
        sys::DC_LOG_WARNING => LogLevel::Warning,
        _ => LogLevel::Info,
    };
    // A panic must not unwind into C; what it says has been printed by the panic hook.
    let _ = catch_unwind(AssertUnwindSafe(|| log(level, &CStr::from_ptr(message).to_string_lossy())));
}

struct Param {
    /// The shape, kept because results are described by the type that was asked for.
    shape: Vec<i64>,
    weights: Box<dyn AnyMemory>,
    grad: Box<dyn AnyMemory>,
}

/// One training run on one rank: its parameters, graphs, buffers and streams.
pub struct Context {
    raw: NonNull<sys::dc_context>,
    // Freed by drop after the library's context, which reads and writes them.
    params: ManuallyDrop<HashMap<i64, Param>>,
    log: ManuallyDrop<Option<Box<Log>>>,
    abort: Option<Abort>,
    reducing: Cell<bool>,
    gathering: RefCell<BTreeSet<i64>>,
}

// The class [handle]: one thread at a time, any thread. What it owns is Send.
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
    /// What makes a context.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The handle, for calls that only [`crate::sys`] has.
    pub fn as_ptr(&self) -> *mut sys::dc_context {
        self.raw.as_ptr()
    }

    /// Zeroed memory of the library for a shard; [`MemoryKind::Shared`] is what peers can read in place.
    pub fn memory<T: Element>(&self, length: usize, kind: MemoryKind) -> Result<Memory<T>> {
        let bytes = length.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::new(Status::NO_MEMORY, format!("length = {length} elements, more bytes than can be counted"))
        })?;
        let mut buffer = ptr::null_mut();
        check(unsafe { sys::dc_memory_alloc(self.as_ptr(), bytes, kind as i32, &mut buffer) })?;
        Ok(unsafe { Memory::of_library(Buffer::from_raw(buffer), length) })
    }

    /// Registers a parameter of a stage 0, 1 or 2 graph, whose weights are whole on every rank. `grad` is this rank's
    /// part of the flattened gradient, from element `offset` on; empty: the parameter is frozen.
    pub fn register_param<T: Element, G: Element>(
        &mut self,
        id: i64,
        shape: &[i64],
        weights: impl Into<Memory<T>>,
        grad: impl Into<Memory<G>>,
        offset: i64,
    ) -> Result<()> {
        let (weights, grad) = (weights.into(), grad.into());
        fits(shape, weights.len())?;
        let part = [grad.len() as i64];
        let (whole, buffer) = (view(weights.as_ptr().cast(), shape, T::DTYPE), view_of(&grad, &part));
        let (lengths, ndim) = (shape.as_ptr(), shape.len() as i32);
        check(unsafe { sys::dc_register_param(self.as_ptr(), id, lengths, ndim, &whole, &buffer, offset) })?;
        self.keep(id, shape, weights, grad);
        Ok(())
    }

    /// Registers a sharded parameter of a stage 3 graph: `shard` is this rank's ceil(N / ranks) elements, `grad` this
    /// rank's part of the gradient, as long, or empty for a frozen parameter.
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
        let (weights, buffer) = (view_of(&shard, &held), view_of(&grad, &part));
        let (lengths, ndim, persistent) = (shape.as_ptr(), shape.len() as i32, i32::from(options.persistent));
        check(unsafe {
            sys::dc_register_z3_param(self.as_ptr(), id, lengths, ndim, &weights, &buffer, persistent, dtype)
        })?;
        self.keep(id, shape, shard, grad);
        Ok(())
    }

    fn keep<T: Element, G: Element>(&mut self, id: i64, shape: &[i64], weights: Memory<T>, grad: Memory<G>) {
        let param = Param { shape: shape.to_vec(), weights: Box::new(weights), grad: Box::new(grad) };
        self.params.insert(id, param);
    }

    /// Points a parameter's gradient at other memory, which is set to zero.
    pub fn update_param_grad_buffer<G: Element>(
        &mut self,
        id: i64,
        grad: impl Into<Memory<G>>,
        offset: i64,
    ) -> Result<()> {
        let grad = grad.into();
        let part = [grad.len() as i64];
        check(unsafe { sys::dc_update_param_grad_buffer(self.as_ptr(), id, &view_of(&grad, &part), offset) })?;
        if let Some(param) = self.params.get_mut(&id) {
            param.grad = Box::new(grad);
        }
        Ok(())
    }

    /// Forgets a parameter and frees its memory.
    pub fn unregister_param(&mut self, id: i64) -> Result<()> {
        check(unsafe { sys::dc_unregister_param(self.as_ptr(), id) })?;
        self.gathering.get_mut().remove(&id);
        self.params.remove(&id);
        Ok(())
    }

    /// Lends this rank's part of a parameter and of its gradient, as for an optimizer's step. Fails with
    /// [`Status::BUSY`] while the library may use them: between a reduction and [`Context::end_backward`], and between
    /// a prefetch and its [`Context::gather`]. Afterwards say [`Context::params_updated`].
    pub fn update<T: Element, G: Element, R>(
        &mut self,
        id: i64,
        work: impl FnOnce(&mut [T], &mut [G]) -> R,
    ) -> Result<R> {
        if self.reducing.get() {
            let text = format!("id = {id}: gradients are being reduced; call end_backward first");
            return Err(Error::new(Status::BUSY, text));
        }
        if let Some(other) = self.gathering.get_mut().iter().next() {
            let text = format!("id = {id}: parameter {other} is being gathered; call gather first");
            return Err(Error::new(Status::BUSY, text));
        }
        let param = self.params.get_mut(&id).ok_or_else(|| unknown(id))?;
        let (weights, grad) = (param.weights.dtype(), param.grad.dtype());
        let (asked, buffer) = (param.weights.as_any().downcast_mut(), param.grad.as_any().downcast_mut());
        match (asked, buffer) {
            (Some(weights), Some(grad)) => {
                let (weights, grad): (&mut Memory<T>, &mut Memory<G>) = (weights, grad);
                Ok(work(weights, grad))
            }
            _ => {
                let (is, asked) = ((weights.name(), grad.name()), (T::DTYPE.name(), G::DTYPE.name()));
                Err(Error::new(Status::DTYPE, format!("id = {id}: weights and gradient are {is:?}, not {asked:?}")))
            }
        }
    }

    /// Registers a graph: a set of parameters under an id, used at one stage. Every rank does it in the same order.
    pub fn register_graph(&mut self, graph: i64, stage: Stage, ids: &[i64]) -> Result<()> {
        let register = match stage {
            Stage::Z0 => sys::dc_register_graph_z0,
            Stage::Z1 => sys::dc_register_graph_z1,
            Stage::Z2 => sys::dc_register_graph_z2,
            Stage::Z3 => sys::dc_register_graph_z3,
        };
        check(unsafe { register(self.as_ptr(), graph, ids.as_ptr(), ids.len() as i64) })
    }

    /// Forgets one graph.
    pub fn unregister_graph(&mut self, graph: i64) -> Result<()> {
        check(unsafe { sys::dc_unregister_graph(self.as_ptr(), graph) })
    }

    /// Starts to gather parameters that [`Context::gather`] will want.
    pub fn prefetch(&self, graph: i64, ids: &[i64]) -> Result<()> {
        let count = ids.len() as i64;
        check(unsafe { sys::dc_prefetch_params_fused(self.as_ptr(), graph, ids.as_ptr(), ptr::null(), count) })?;
        self.gathering.borrow_mut().extend(ids);
        Ok(())
    }

    /// Gathers a parameter's full weights, cast to T, and waits for them. The result is this caller's own: what it
    /// holds is freed when it is dropped. Weights can be changed only when none is alive.
    pub fn gather<T: Element>(&self, graph: i64, id: i64) -> Result<Loaded<'_, T>> {
        let (dtype, mut out) = (T::DTYPE as i32, output());
        check(unsafe { sys::dc_allgather_param(self.as_ptr(), ptr::null(), graph, id, dtype, &mut out) })?;
        self.gathering.borrow_mut().insert(id);
        let shape = self.params.get(&id).ok_or_else(|| unknown(id))?.shape.clone();
        let mut buffer = ptr::null_mut();
        check(unsafe { sys::dc_take_param(self.as_ptr(), graph, id, dtype, &mut buffer) })?;
        self.gathering.borrow_mut().remove(&id);
        Ok(unsafe { Loaded::new(Buffer::from_raw(buffer), shape) })
    }

    /// Takes a parameter's whole gradient for averaging over ranks; it may be reused when this returns. The average
    /// is in the registered memory after [`Context::end_backward`].
    pub fn reduce_grad<T: Element>(&self, graph: i64, id: i64, grad: &[T]) -> Result<()> {
        let length = [grad.len() as i64];
        check(unsafe { sys::dc_reduce_grad(self.as_ptr(), &view_of(grad, &length), graph, id) })?;
        self.reducing.set(true);
        Ok(())
    }

    /// Waits until all gradients have arrived. `release_buckets` gives the buckets' memory back too.
    pub fn end_backward(&self, graph: i64, release_buckets: bool) -> Result<()> {
        check(unsafe { sys::dc_end_backward(self.as_ptr(), graph, i32::from(release_buckets)) })?;
        self.reducing.set(false);
        Ok(())
    }

    /// Copies a tensor to host memory that the context keeps under an id of the caller's.
    pub fn offload<T: Element>(&self, graph: i64, id: i64, tensor: &[T], shape: &[i64]) -> Result<()> {
        fits(shape, tensor.len())?;
        let (a, mut out) = (view(tensor.as_ptr().cast(), shape, T::DTYPE), output());
        check(unsafe { sys::dc_offload_tensor(self.as_ptr(), &a, graph, id, &mut out) })?;
        check(unsafe { sys::dc_wait_offload(self.as_ptr(), &a, graph, id, &mut out) })
    }

    /// Brings an offloaded tensor back.
    pub fn reload<T: Element>(&self, graph: i64, id: i64) -> Result<Loaded<'_, T>> {
        let mut out = output();
        check(unsafe { sys::dc_reload_tensor(self.as_ptr(), ptr::null(), graph, id, &mut out) })?;
        check(unsafe { sys::dc_wait_reload(self.as_ptr(), ptr::null(), graph, id, &mut out) })?;
        if out.dtype != T::DTYPE as i32 {
            let is = DType::of(out.dtype).map_or("unknown", DType::name);
            return Err(Error::new(Status::DTYPE, format!("id = {id} is of {is}, not {}", T::DTYPE.name())));
        }
        let buffer = unsafe { Buffer::from_raw(sys::dc_buffer_retain(out.buffer)) };
        Ok(unsafe { Loaded::new(buffer, lengths(out.shape, out.ndim)) })
    }

    /// Drops the device copy of a shard that lives in host memory.
    pub fn offload_parameter(&self, graph: i64, id: i64) -> Result<()> {
        check(unsafe { sys::dc_offload_parameter(self.as_ptr(), ptr::null(), graph, id) })
    }

    /// Copies a shard that lives in host memory to the device, for gathers to use.
    pub fn reload_parameter(&self, graph: i64, id: i64) -> Result<()> {
        check(unsafe { sys::dc_reload_parameter(self.as_ptr(), ptr::null(), graph, id) })?;
        self.gathering.borrow_mut().insert(id); // the shard is read until the next gather has waited for the copy
        Ok(())
    }

    /// Begins a forward pass.
    pub fn start_forward(&self) -> Result<()> {
        check(unsafe { sys::dc_start_forward(self.as_ptr()) })
    }

    /// Ends a forward pass.
    pub fn end_forward(&self) -> Result<()> {
        check(unsafe { sys::dc_end_forward(self.as_ptr()) })
    }

    /// Begins a backward pass; `update` if the optimizer steps after it.
    pub fn start_backward(&self, update: bool) -> Result<()> {
        check(unsafe { sys::dc_start_backward(self.as_ptr(), i32::from(update)) })
    }

    /// Says that the weights of these parameters changed. Every rank says it at the same point.
    pub fn params_updated(&mut self, ids: &[i64]) -> Result<()> {
        if ids.is_empty() {
            return Ok(()); // to the library, no id would mean every id
        }
        check(unsafe { sys::dc_params_updated(self.as_ptr(), ids.as_ptr(), ids.len() as i64) })
    }

    /// Says that the gradients of these parameters are to be kept: the next reduction adds to them.
    pub fn accumulate_grads(&mut self, ids: &[i64]) -> Result<()> {
        check(unsafe { sys::dc_accumulate_grads(self.as_ptr(), ids.as_ptr(), ids.len() as i64) })
    }

    /// Keeps a sharded parameter gathered from now on; every rank does it.
    pub fn set_persistent(&mut self, id: i64) -> Result<()> {
        check(unsafe { sys::dc_set_persistent(self.as_ptr(), id) })?;
        self.gathering.get_mut().insert(id);
        Ok(())
    }

    /// Undoes [`Context::set_persistent`].
    pub fn clear_persistent(&mut self, id: i64) -> Result<()> {
        check(unsafe { sys::dc_clear_persistent(self.as_ptr(), id) })
    }

    /// Forgets a parameter's gathered weights, so that the next gather communicates.
    pub fn invalidate_gathered(&mut self, id: i64) -> Result<()> {
        check(unsafe { sys::dc_invalidate_gathered_param(self.as_ptr(), id) })
    }

    /// Forgets all gathered weights that are not persistent.
    pub fn clear_all_gathered(&mut self) -> Result<()> {
        check(unsafe { sys::dc_clear_all_gathered_params(self.as_ptr()) })
    }

    /// Drops all graphs.
    pub fn reset(&mut self) -> Result<()> {
        check(unsafe { sys::dc_reset(self.as_ptr()) })
    }

    /// Leaves a step in the middle: drops gradients not yet reduced, and gathered weights. Every rank must do it.
    pub fn step_abort(&mut self) -> Result<()> {
        check(unsafe { sys::dc_step_abort(self.as_ptr()) })?;
        self.idle();
        Ok(())
    }

    /// Ends the context; [`Context::update`] still lends the memory of its parameters, all else fails.
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
        check(unsafe { sys::dc_async_error(self.as_ptr()) })
    }

    /// Orders the operators against a stream's work instead of the calling thread's.
    ///
    /// # Safety
    /// Slices that operators get, and results that they give, are then used by the stream after the call returned: the
    /// caller keeps them alive and unwritten, and waits for the stream before reading.
    pub unsafe fn set_stream(&self, stream: Option<&Stream>) -> Result<()> {
        check(sys::dc_set_stream(self.as_ptr(), stream.map_or(ptr::null_mut(), Stream::as_ptr)))
    }

    /// While on, reductions do nothing, and gathers are real.
    pub fn enable_profiling(&self, on: bool) -> Result<()> {
        check(unsafe { sys::dc_enable_profiling(self.as_ptr(), i32::from(on)) })
    }

    /// Whether profiling is on.
    pub fn is_profiling(&self) -> bool {
        unsafe { sys::dc_is_profiling(self.as_ptr()) == 1 }
    }

    /// What the context holds and moved.
    pub fn memory_stats(&self) -> Result<sys::dc_memory_stats> {
        let mut stats = sys::dc_memory_stats { struct_size: size_of::<sys::dc_memory_stats>(), ..Default::default() };
        check(unsafe { sys::dc_get_memory_stats(self.as_ptr(), &mut stats) })?;
        Ok(stats)
    }

    /// Sets the counters to zero.
    pub fn reset_stats(&self) -> Result<()> {
        check(unsafe { sys::dc_reset_stats(self.as_ptr()) })
    }

    /// What an operator would do, without doing it.
    pub fn dry_run(&self, op: Op, graph: i64, id: i64, dtype: Option<DType>) -> Result<OpInfo> {
        let mut info = sys::dc_op_info { struct_size: size_of::<sys::dc_op_info>(), ..Default::default() };
        let dtype = dtype.map_or(sys::DC_DTYPE_NONE, |dtype| dtype as i32);
        check(unsafe { sys::dc_dry_run(self.as_ptr(), op as i32, graph, id, dtype, &mut info) })?;
        Ok(unsafe { OpInfo::read(&info) })
    }

    /// Keeps the last `capacity` events from now on; 0 stops.
    pub fn trace_start(&self, capacity: i64) -> Result<()> {
        check(unsafe { sys::dc_trace_start(self.as_ptr(), capacity) })
    }

    /// Takes the kept events, at most `most`, oldest first.
    pub fn trace_read(&self, most: usize) -> Result<Vec<sys::dc_trace_event>> {
        let mut events = vec![sys::dc_trace_event::default(); most];
        let (size, mut count) = (size_of::<sys::dc_trace_event>(), 0);
        check(unsafe { sys::dc_trace_read(self.as_ptr(), events.as_mut_ptr(), size, most as i64, &mut count) })?;
        events.truncate(count as usize);
        Ok(events)
    }

    /// Writes this rank's last operations to `folder/rank-R.json`.
    pub fn trace_dump(&self, folder: &Path) -> Result<()> {
        let folder = path(folder)?;
        check(unsafe { sys::dc_trace_dump(self.as_ptr(), folder.as_ptr()) })
    }

    /// Does so at the first communication error; `None`: not any more.
    pub fn trace_dump_on_error(&self, folder: Option<&Path>) -> Result<()> {
        let folder = folder.map(path).transpose()?;
        let pointer = folder.as_ref().map_or(ptr::null(), |folder| folder.as_ptr());
        check(unsafe { sys::dc_trace_dump_on_error(self.as_ptr(), pointer) })
    }
}

fn path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::new(Status::INVALID, format!("folder = {path:?}, must have no NUL")))
}

fn unknown(id: i64) -> Error {
    Error::new(Status::NOT_FOUND, format!("id = {id}, must be a parameter that this context registered"))
}
