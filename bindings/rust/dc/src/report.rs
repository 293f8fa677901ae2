//! What operators would do, and what they are called.

use crate::sys;
use crate::tensor::DType;

/// The operators, for [`crate::Context::dry_run`] and traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    /// The name of a number in a trace; "unknown" if it is none.
    pub fn name_of(op: i32) -> &'static str {
        name(op)
    }
}

/// What a call would return and need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpInfo {
    /// The result's shape; `None`: no tensor, or one of its argument's shape.
    pub shape: Option<Vec<i64>>,
    /// The result's type.
    pub dtype: Option<DType>,
    /// Whether the result lies in host memory.
    pub host: bool,
    /// Device memory that the call would take now.
    pub device_bytes: i64,
    /// Bytes that it would receive.
    pub wire_bytes: i64,
}

impl OpInfo {
    pub(crate) unsafe fn read(info: &sys::dc_op_info) -> OpInfo {
        let shape = (info.ndim >= 0).then(|| lengths(info.shape, info.ndim));
        let (device_bytes, wire_bytes) = (info.device_bytes, info.wire_bytes);
        OpInfo { shape, dtype: DType::of(info.dtype), host: info.host == 1, device_bytes, wire_bytes }
    }
}

/// A shape of the library's, copied.
pub(crate) unsafe fn lengths(shape: *const i64, ndim: i32) -> Vec<i64> {
    if shape.is_null() || ndim <= 0 {
        return Vec::new();
    }
    std::slice::from_raw_parts(shape, ndim as usize).to_vec()
}
