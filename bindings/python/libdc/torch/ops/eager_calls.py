"""The operators as eager mode calls them, and the calls that it makes on contexts."""

from __future__ import annotations

import libdc
import torch
from torch import Tensor

from .. import devices, ops

ops.load()

# Their overhead matters for small parameters, so they are called without OpOverload's Python frame.
take = torch.ops.dc_rt.take.default._op
take_params = torch.ops.dc_rt.take_params.default._op
reduce_grads = torch.ops.dc_rt.reduce_grads.default._op

bind, unbind, on_current_stream = ops.bind, ops.unbind, ops.on_current_stream


def alloc(context: libdc.Context, numel: int, dtype: torch.dtype, shared: bool) -> Tensor:
    """Zeroed memory. shared: peers can read it in place."""
    if not shared or numel == 0:
        return torch.zeros(numel, dtype=dtype, device=devices.device_of(context))
    buffer = context.memory_alloc(numel * dtype.itemsize, libdc.MemoryKind.SHARED)
    return torch.from_dlpack(buffer.tensor((numel,), libdc.DType.of(dtype)))
