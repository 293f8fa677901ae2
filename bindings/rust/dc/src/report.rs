//! Dry runs of operators, their names, and a context's statistics.

use crate::context::Context;
use crate::error::{check, Error, Result, Status};
use crate::stats::{MemoryStats, TraceEvent};
use crate::sys;
use crate::tensor::DType;
use std::ffi::{CStr, CString};
use std::mem::size_of;
use std::os::raw::c_char;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

/// The operators, as [`crate::Context::dry_run`] and traces name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)]
#[repr(i32)]
pub enum Op {
    AllgatherParam = sys::DC_OP_ALLGATHER_PARAM,
    PrefetchParamsFused = sys::DC_OP_PREFETCH_PARAMS_FUSED,
    WaitAllgather = sys::DC_OP_WAIT_ALLGATHER,
    ReleaseParam = sys::DC_OP_RELEASE_PARAM,
    ReduceGrad = sys::DC_OP_REDUCE_GRAD,
    FreeTensors = sys::DC_OP_FREE_TENSORS,
    OffloadTensor = sys::DC_OP_OFFLOAD_TENSOR,
    ReloadTensor = sys::DC_OP_RELOAD_TENSOR,
    WaitOffload = sys::DC_OP_WAIT_OFFLOAD,
    WaitReload = sys::DC_OP_WAIT_RELOAD,
    OffloadParameter = sys::DC_OP_OFFLOAD_PARAMETER,
    ReloadParameter = sys::DC_OP_RELOAD_PARAMETER,
    EndBackward = sys::DC_OP_END_BACKWARD,
    TakeParam = sys::DC_OP_TAKE_PARAM,
}

/// The name of a trace event's operator, as in "allgather_param".
pub(crate) fn name(op: i32) -> &'static str {
    unsafe { crate::error::text(sys::dc_op_name(op)) }
}

impl Op {
    /// The name, as in "allgather_param".
    pub fn name(self) -> &'static str {
        name(self as i32)
    }

    /// The name of an operator's number in a trace; "unknown" if there is no such operator.
    pub fn name_of(op: i32) -> &'static str {
        name(op)
    }
}

/// The result and the memory of a call, without making it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpInfo {
    /// The result's shape; `None`: there is no result, or it has its argument's shape.
    pub shape: Option<Vec<i64>>,
    /// The result's type.
    pub dtype: Option<DType>,
    /// Whether the result is in host memory.
    pub host: bool,
    /// Device memory that the call would allocate now, in bytes.
    pub device_bytes: i64,
    /// Bytes that this rank would receive.
    pub wire_bytes: i64,
}

impl OpInfo {
    pub(crate) unsafe fn read(info: &sys::dc_op_info) -> OpInfo {
        let shape = (info.ndim >= 0).then(|| lengths(info.shape, info.ndim));
        let (device_bytes, wire_bytes) = (info.device_bytes, info.wire_bytes);
        OpInfo { shape, dtype: DType::from_raw(info.dtype), host: info.host == 1, device_bytes, wire_bytes }
    }
}

/// Copies a shape of the library.
pub(crate) unsafe fn lengths(shape: *const i64, ndim: i32) -> Vec<i64> {
    if shape.is_null() || ndim <= 0 {
        return Vec::new();
    }
    std::slice::from_raw_parts(shape, ndim as usize).to_vec()
}

/// A process's place among the ranks, as its launcher tells it; see `dc_launch_get`. `None`: the launcher does not
/// tell.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// "environment", "openmpi", "pmi", "slurm", "flux" or "none".
    pub launcher: String,
    /// The address for [`crate::Comm::tcp`].
    pub address: Option<String>,
    /// A group name that no other job has.
    pub group: Option<String>,
    /// This rank's number.
    pub rank: i32,
    /// The number of ranks.
    pub world_size: i32,
    /// This rank's number among those of its machine.
    pub local_rank: Option<i32>,
    /// The number of ranks on this machine.
    pub local_size: Option<i32>,
    /// The number of this machine, from 0.
    pub node: Option<i32>,
    /// The launcher can start MPI, so [`crate::Comm::mpi`] should be used.
    pub uses_mpi: bool,
}

impl Launch {
    /// Reads the launcher's environment variables.
    pub fn get() -> Result<Launch> {
        let mut raw = sys::dc_launch { struct_size: size_of::<sys::dc_launch>(), ..Default::default() };
        check(unsafe { sys::dc_launch_get(&mut raw) })?;
        let text = |pointer: *const c_char| {
            (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
        };
        Ok(Launch {
            launcher: text(raw.launcher).unwrap_or_default(),
            address: text(raw.address),
            group: text(raw.group),
            rank: raw.rank,
            world_size: raw.world_size,
            local_rank: (raw.local_rank >= 0).then_some(raw.local_rank),
            local_size: (raw.local_size > 0).then_some(raw.local_size),
            node: (raw.node >= 0).then_some(raw.node),
            uses_mpi: raw.uses_mpi != 0,
        })
    }
}

impl Context {
    /// Statistics of the context's memory and traffic.
    pub fn memory_stats(&self) -> Result<MemoryStats> {
        let mut stats = sys::dc_memory_stats { struct_size: size_of::<sys::dc_memory_stats>(), ..Default::default() };
        check(unsafe { sys::dc_context_get_memory_stats(self.as_ptr(), &mut stats) })?;
        Ok(stats.into())
    }

    /// Sets the counters to zero.
    pub fn reset_stats(&self) -> Result<()> {
        check(unsafe { sys::dc_context_reset_stats(self.as_ptr()) })
    }

    /// Makes a dry run of an operator.
    pub fn dry_run(&self, op: Op, graph: i64, id: i64, dtype: Option<DType>) -> Result<OpInfo> {
        let mut info = sys::dc_op_info { struct_size: size_of::<sys::dc_op_info>(), ..Default::default() };
        let dtype = dtype.map_or(sys::DC_DTYPE_NONE, |dtype| dtype as i32);
        check(unsafe { sys::dc_context_dry_run(self.as_ptr(), op as i32, graph, id, dtype, &mut info) })?;
        Ok(unsafe { OpInfo::read(&info) })
    }

    /// From now on keeps the last `capacity` trace events; 0 stops.
    pub fn trace_start(&self, capacity: i64) -> Result<()> {
        check(unsafe { sys::dc_context_trace_start(self.as_ptr(), capacity) })
    }

    /// Takes the kept events, oldest first, at most `limit` of them.
    pub fn trace_read(&self, limit: usize) -> Result<Vec<TraceEvent>> {
        let (size, mut events) = (size_of::<sys::dc_trace_event>(), Vec::new());
        while events.len() < limit {
            let mut piece = [sys::dc_trace_event::default(); 64]; // the limit may be more than there is memory for
            let (cap, mut count) = (piece.len().min(limit - events.len()), 0);
            check(unsafe {
                sys::dc_context_trace_read(self.as_ptr(), piece.as_mut_ptr(), size, cap as i64, &mut count)
            })?;
            events.extend(piece[..count as usize].iter().map(|event| TraceEvent::from(*event)));
            if (count as usize) < cap {
                break;
            }
        }
        Ok(events)
    }

    /// Writes this rank's latest operations to `folder/rank-R.json`.
    pub fn trace_dump(&self, folder: &Path) -> Result<()> {
        let folder = path(folder)?;
        check(unsafe { sys::dc_context_trace_dump(self.as_ptr(), folder.as_ptr()) })
    }

    /// Writes them at the first communication error; `None`: stops that.
    pub fn trace_dump_on_error(&self, folder: Option<&Path>) -> Result<()> {
        let folder = folder.map(path).transpose()?;
        let pointer = folder.as_ref().map_or(ptr::null(), |folder| folder.as_ptr());
        check(unsafe { sys::dc_context_trace_dump_on_error(self.as_ptr(), pointer) })
    }
}

fn path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::new(Status::INVALID, format!("folder = {path:?}, must have no NUL")))
}
