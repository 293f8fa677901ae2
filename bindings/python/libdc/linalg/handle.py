"""The handle that every call uses, and arrays of the caller's kind."""

from __future__ import annotations

import math
import struct
import sys
import threading
from typing import Any, Optional, Sequence, Tuple

from .._handle import OwnedHandle
from .._lib import ffi, gc_handle, lib, new_struct, text
from ..arguments import assign, flag, handle_arg, int64_array
from ..device import Device
from ..errors import check
from ..tensors import HOST, Buffer, Tensor, View, _count, output
from ..types import DType


class Handle(OwnedHandle):
    """Threads, scratch memory and a LAPACK. threads: 0 = one for each core that the process may use; plain: use libdc's
    own eigensolver even where a LAPACK is found; device: calls take arrays of this device."""

    def __init__(self, threads: int = 0, plain: bool = False, device: Optional[Device] = None) -> None:
        options = new_struct("dc_linalg_options")
        assign(options, "threads", threads, "threads")
        options.plain = flag("plain", plain)
        self.device = device or Device("cpu")
        out = ffi.new("dc_linalg **")
        check(lib.dc_linalg_create(handle_arg("device", self.device, Device), options, out))
        self._owned: Any = gc_handle(out[0], lib.dc_linalg_destroy)

    @property
    def solver(self) -> str:
        """Where eigendecompositions come from: the file name of a LAPACK, or "libdc"."""
        return text(lib.dc_linalg_solver(self._handle))

    def begin_query(self) -> None:
        """Begins a query: until end_query(), calls with this handle check their arguments but compute nothing."""
        check(lib.dc_linalg_begin_query(self._handle))

    def end_query(self) -> int:
        """Ends the query. Returns the most scratch bytes that one of its calls would have used."""
        needed = ffi.new("int64_t *")
        check(lib.dc_linalg_end_query(self._handle, needed))
        return int(needed[0])

    def set_workspace(self, memory: Any = None) -> None:
        """Sets the scratch memory for all later calls, a 64-byte aligned array; None: the handle's own."""
        view = View(memory, True, "set_workspace: memory", (self.device.place,))
        nbytes = 0 if memory is None else _count([view.c.shape[i] for i in range(view.c.ndim)])
        nbytes *= 0 if memory is None else lib.dc_dtype_size(view.c.dtype)
        check(lib.dc_linalg_set_workspace(self._handle, ffi.NULL if memory is None else view.c.data, nbytes))
        self._workspace = view


_default: Optional[Handle] = None
_lock = threading.Lock()


def default() -> Handle:
    """The handle for calls without one."""
    global _default
    with _lock:
        if _default is None:
            _default = Handle()
        return _default


def handle_ptr(handle: Optional[Handle]) -> Any:
    return handle_arg("handle", default() if handle is None else handle, Handle)


class Array:
    """A caller's array as a dc_tensor, with the array itself, so that others of its kind can be made."""

    __slots__ = ("array", "view", "shape", "dtype")

    def __init__(self, array: Any, name: str, handle: Optional[Handle] = None, writable: bool = False) -> None:
        handle_arg("handle", handle, Handle)
        if array is None:
            raise TypeError(f"{name} is None, must be an array")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(array, torch.Tensor):
            if torch.is_grad_enabled() and array.requires_grad:
                raise RuntimeError(f"{name} requires grad, and this call has no derivative: give it {name}.detach(), "
                                   "or make the call under torch.no_grad()")
            if writable and not array.is_inference():
                torch.autograd.graph.increment_version(array)  # tells autograd that saved values are overwritten
            array = array.detach()  # DLPack refuses tensors that require gradients
            array = array if writable else array.resolve_neg()
            if array.is_cuda:  # calls run on the libdc device's own stream
                torch.cuda.current_stream(array.device).synchronize()
        self.array = array
        self.view = View(array, writable, name, (HOST if handle is None else handle.device.place,))
        tensor = self.view.c
        self.shape: Tuple[int, ...] = tuple(tensor.shape[i] for i in range(tensor.ndim))
        self.dtype = DType(tensor.dtype)

    @property
    def c(self) -> Any:
        return self.view.c


def empty(like: Any, shape: Sequence[int], dtype: DType, device: Optional[Device] = None) -> Any:
    """A contiguous, uninitialised array of `like`'s kind (a libdc.Tensor is zeros)."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype.name.lower()), device=like.device)
    if numpy is not None and isinstance(like, (numpy.ndarray, numpy.generic)) and dtype is not DType.BFLOAT16:
        return numpy.empty(tuple(shape), dtype.name.lower())
    return make(device or default().device, shape, dtype)


def make(device: Device, shape: Sequence[int], dtype: DType) -> Tensor:
    """A tensor of zeros in libdc's memory."""
    out = output()
    check(lib.dc_tensor_create(device._handle, *int64_array("shape", shape), dtype, out))
    buffer = Buffer(out.buffer, device.place)
    return Tensor(int(ffi.cast("uintptr_t", out.data)), tuple(shape), dtype, buffer, device.place)


def output_array(out: Any, like: Any, shape: Sequence[int], dtype: DType, handle: Optional[Handle] = None,
           name: str = "out", with_nan: bool = False) -> Array:
    """The array for a result: `out`, or a new one, filled with NaN if the call may leave parts of it unwritten."""
    device = None if handle is None else handle.device
    if out is None:
        out = empty(like, shape, dtype, device)
        if with_nan and dtype in (DType.FLOAT32, DType.FLOAT64):  # the library refuses others
            _fill_with_nan(out)
    return Array(out, name, handle, True)


def _fill_with_nan(array: Any) -> None:
    """Fills an array with NaN. libdc's tensors on a CUDA device stay zeros."""
    if not isinstance(array, Tensor):
        array[...] = math.nan
    elif array.place == HOST:
        array._bytes()[:] = struct.pack("f" if array.dtype is DType.FLOAT32 else "d", math.nan) * _count(array.shape)
