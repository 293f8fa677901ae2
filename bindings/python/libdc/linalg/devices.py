"""Which devices there are, their memory, and tensors in it."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

from .._lib import ffi, lib, new_struct, text
from ..device import Device
from ..errors import check
from ..tensors import Tensor
from ..types import DType
from .handle import default, make


def is_cuda_available() -> bool:
    """Whether a CUDA device can be opened."""
    return bool(lib.dc_is_cuda_available())


def device_count(kind: str = "cuda") -> int:
    """How many devices of a kind can be opened."""
    return int(lib.dc_device_count(kind.encode()))


def get_optimal_device() -> Tuple[str, str]:
    """(name, reason): the device with most free memory among those that compute fast."""
    reason = ffi.new("char const **")
    name = lib.dc_get_optimal_device(reason)
    return text(name), text(reason[0])


def device_memory(device: Optional[Device] = None) -> Dict[str, int]:
    """The device's memory in bytes: total, free, reserved by libdc through this handle, and the peak of that."""
    memory = new_struct("dc_device_memory")
    check(lib.dc_device_get_memory((device or default().device)._handle, memory))
    return {"total": memory.total_bytes, "free": memory.free_bytes, "reserved": memory.reserved_bytes,
            "peak": memory.peak_bytes}


def zeros(shape: Sequence[int], dtype: Any = "float32", device: Optional[Device] = None) -> Tensor:
    """A tensor of zeros, 256-byte aligned."""
    return make(device or default().device, tuple(int(length) for length in shape), DType.of(dtype))
