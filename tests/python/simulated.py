"""For scripts on the simulated driver: arrays into the device's memory and out, which the host cannot touch
otherwise."""

from __future__ import annotations

import ctypes
from typing import Any

import libdc
import numpy as np
from libdc.linalg import zeros

_host_ptr = ctypes.CDLL("libcuda.so.1").cudasim_host_ptr
_host_ptr.restype, _host_ptr.argtypes = ctypes.c_void_p, [ctypes.c_void_p]


def memory(tensor: libdc.Tensor) -> np.ndarray:
    """The bytes of a tensor on the device."""
    assert tensor.__dlpack_device__() == (2, 0), tensor
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_char * tensor.nbytes).from_address(_host_ptr(tensor.data)), np.uint8)


def there(array: Any, device: libdc.Device) -> libdc.Tensor:
    """A copy on the device."""
    tensor = zeros(array.shape, getattr(array, "dtype").name.lower(), device)
    memory(tensor)[:] = (array if isinstance(array, np.ndarray) else array.bits().numpy()).view(np.uint8).reshape(-1)
    return tensor


def refused(text: str, kind: Any, call: Any, *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except kind as error:
        assert str(error) == text, error
    else:
        raise AssertionError(text)
