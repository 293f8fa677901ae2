"""Registers the operators torch.ops.dc.* and torch.ops.dc_rt.* with PyTorch, and keeps the context that they work on.

The kernels are in libdc_torch.so, beside libdc.so (LIBDC_TORCH_LIBRARY names another file). If it is not installed, or
with LIBDC_TORCH_OPS=python, the slower ones of python_kernels.py are used."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, Dict, Optional

import libdc
import torch
from libdc._lib import version_text_address

from .. import devices
from . import registrations

_lock = threading.Lock()
_adapter: Optional[ctypes.CDLL] = None
_context: Optional[libdc.Context] = None
_bound: Dict[int, libdc.Context] = {}
_tracked: Dict[int, int] = {}  # handles of CUDA contexts → how often each is bound or the default
backend = ""  # "compiled" or "python" once loaded


def context(graph_id: Optional[int] = None) -> Optional[libdc.Context]:
    """The context of operators that name this graph; None: of those that name no graph."""
    return _context if graph_id is None else _bound.get(graph_id, _context)


def bind(graph_id: int, value: libdc.Context) -> None:
    """Makes operators that name this graph use a context other than the default one, which is kept alive."""
    _track_stream(value)
    with _lock:
        if _adapter is not None and _adapter.dct_bind(graph_id, value.handle) != 0:
            raise MemoryError("libdc.torch.ops.bind")
        previous = _bound.get(graph_id)
        _bound[graph_id] = value
    _untrack_stream(previous)


def unbind(graph_id: int) -> None:
    """Undoes bind(), if there was one."""
    with _lock:
        if _adapter is not None:
            _adapter.dct_bind(graph_id, None)
        previous = _bound.pop(graph_id, None)
    _untrack_stream(previous)


def set_context(value: Optional[libdc.Context]) -> None:
    """Sets the default context, which operators use since their arguments have no handle. It is kept alive."""
    global _context
    _track_stream(value)
    with _lock:
        previous = _context
        _context = value
        if _adapter is not None:
            _adapter.dct_set_context(None if value is None else value.handle)
    _untrack_stream(previous)  # if this destroys the context, the adapter has already dropped it


def device(graph_id: Optional[int] = None) -> torch.device:
    """The device of the tensors of context(graph_id)."""
    return devices.device_of(context(graph_id))


# Contexts on CUDA devices follow PyTorch's current stream


def _track_stream(value: Optional[libdc.Context]) -> None:
    where = devices.device_of(value)
    if value is None or where.type == "cpu":
        return
    if _adapter is None:
        raise RuntimeError(f"libdc.torch: a context on {where} needs the compiled operators (libdc_torch.so); those in "
                           "Python are for the CPU")
    with _lock:
        times = _tracked.get(value.handle, 0)
        if times == 0:
            error = _adapter.dct_track_stream(value.handle, value.device.handle, where.index)
            if error is not None:
                raise RuntimeError(f"libdc.torch: a context on {where}: {error.decode()}")
        _tracked[value.handle] = times + 1


def _untrack_stream(value: Optional[libdc.Context]) -> None:
    if value is None or devices.device_of(value).type == "cpu" or _adapter is None:
        return
    with _lock:
        _tracked[value.handle] -= 1
        last = _tracked[value.handle] == 0
        if last:
            del _tracked[value.handle]
    if last:
        _adapter.dct_untrack_stream(value.handle)  # may wait for the device


def on_current_stream(value: libdc.Context) -> libdc.Context:
    """The context, after setting its stream to PyTorch's current one. Operators do so themselves; other calls need
    this."""
    if _tracked and _adapter is not None and value.handle in _tracked:
        error = _adapter.dct_update_stream(value.handle)
        if error is not None:
            raise RuntimeError(error.decode())
    return value


def load() -> str:
    """Registers the operators, once. Returns the kind of their kernels, "compiled" or "python"."""
    global backend
    with _lock:
        if not backend:
            kind, path = _choose_kernels()
            if kind == "compiled":
                _load_adapter(path)
            else:
                from . import python_kernels

                python_kernels.register(context)
            registrations.register(device)
            backend = kind
    return backend


def _choose_kernels() -> Any:
    wanted = os.environ.get("LIBDC_TORCH_OPS") or "auto"
    if wanted not in ("auto", "compiled", "python"):
        raise ImportError(f"libdc.torch: LIBDC_TORCH_OPS = {wanted!r}, must be 'auto', 'compiled' or 'python'")
    path = os.environ.get("LIBDC_TORCH_LIBRARY") or os.path.join(libdc.library_dir(), "libdc_torch.so")
    if wanted == "auto":
        # The file beside the package's libdc.so is linked with that library, so not with one that LIBDC_LIBRARY names.
        beside = os.path.exists(path) and not os.environ.get("LIBDC_LIBRARY")
        wanted = "compiled" if os.environ.get("LIBDC_TORCH_LIBRARY") or beside else "python"
    return wanted, path


def _load_adapter(path: str) -> None:
    global _adapter
    try:
        adapter = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"libdc.torch: {error}") from error
    # Two loaded copies of libdc.so differ in the address of a static string.
    adapter.dc_version_string.restype = ctypes.c_void_p
    if adapter.dc_version_string() != version_text_address():
        raise ImportError(f"libdc.torch: {path} is linked with another libdc.so than the one that libdc has loaded "
                          f"(LIBDC_LIBRARY = {os.environ.get('LIBDC_LIBRARY')}): handles would go from one to the "
                          "other")
    adapter.dct_error.restype = ctypes.c_char_p
    adapter.dct_set_context.argtypes, adapter.dct_set_context.restype = [ctypes.c_void_p], None
    adapter.dct_bind.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    adapter.dct_track_stream.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
    adapter.dct_update_stream.argtypes = [ctypes.c_void_p]
    adapter.dct_track_stream.restype = adapter.dct_update_stream.restype = ctypes.c_char_p
    adapter.dct_untrack_stream.argtypes, adapter.dct_untrack_stream.restype = [ctypes.c_void_p], None
    if adapter.dct_register() != 0:
        raise ImportError(f"libdc.torch: {adapter.dct_error().decode()}")
    _adapter = adapter
