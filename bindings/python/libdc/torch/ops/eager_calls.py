"""The operators as eager mode calls them, and what they need to know of a context."""

from __future__ import annotations

import libdc
import torch
from torch import Tensor

from .. import devices, ops

ops.load()

# Small parameters feel the cost of these, so they are called without the OpOverload's frame of Python.
take = torch.ops.dc_rt.take.default._op
take_params = torch.ops.dc_rt.take_params.default._op
reduce_grads = torch.ops.dc_rt.reduce_grads.default._op

bind, unbind, on_current_stream = ops.bind, ops.unbind, ops.on_current_stream


def alloc(context: libdc.Context, numel: int, dtype: torch.dtype, shared: bool) -> Tensor:
    """Zeroed memory; shared: that peers can read in place."""
    if not shared or numel == 0:
        return torch.zeros(numel, dtype=dtype, device=devices.device_of(context))
    buffer = context.memory_alloc(numel * dtype.itemsize, libdc.MemoryKind.SHARED)
    return torch.from_dlpack(buffer.tensor((numel,), libdc.DType.of(dtype)))
