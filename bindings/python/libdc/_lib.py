"""Loads the library and keeps what every handle needs.

LIBDC_FFI=api, the default, uses the compiled module and falls back to dlopen. LIBDC_FFI=abi, or LIBDC_LIBRARY=path of
another libdc.so, uses dlopen with the same declarations."""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import os
import sys
import threading
import time
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, TypeVar, cast

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.path.join(HERE, "libdc.so.0.1")


def _load() -> Tuple[Any, Any, str]:
    path = os.environ.get("LIBDC_LIBRARY")
    mode = os.environ.get("LIBDC_FFI") or ("abi" if path else "api")
    if mode not in ("api", "abi"):
        raise ImportError(f"libdc: LIBDC_FFI = {mode!r}, must be 'api' or 'abi'")
    if mode == "api":
        try:
            compiled = importlib.import_module("libdc._dc_api")
            return compiled.ffi, compiled.lib, "api"
        except ImportError as error:
            reason = error
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(importlib.import_module("libdc._cdef").CDEF)
    # The library stays loaded until the process ends: threads of handles that were not closed still run its code.
    keep = ffi.RTLD_NOW | os.RTLD_NODELETE
    try:
        return ffi, ffi.dlopen(path or LIBRARY, keep), "abi"
    except OSError as error:
        raise ImportError(f"libdc: {error}") from (reason if mode == "api" else None)


ffi, lib, mode = _load()


def _check_version() -> None:
    loaded, wanted = lib.dc_api_version(), lib.DC_API_VERSION
    # Before 1.0 a minor version may break compatibility; from 1.0 on only a major one.
    unit = 1000 if wanted < 1000000 else 1000000
    if loaded // unit != wanted // unit or loaded < wanted:
        raise ImportError(f"libdc: the library is version {loaded}, this package needs {wanted} or newer of its series")


_check_version()

Function = TypeVar("Function", bound=Callable[..., Any])


_callbacks: List[Any] = []
_registries: "List[Registry]" = []


def callback(kind: Any, **options: Any) -> Callable[[Function], Function]:
    """Decorates a function that the library may call. kind: the C type of the function, or the type's name."""
    make_callback = ffi.callback(kind, **options)

    def decorate(function: Function) -> Function:
        _callbacks.append(make_callback(function))
        return cast(Function, _callbacks[-1])

    return decorate


_forks = 0  # forks between the process that loaded this module and this one
_callback_state = threading.local()
_EXIT_GRACE_SECONDS = 2.0
_callback_threads: Set[int] = set()  # threads that are in a callback
_destroy_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # threads that destroy a handle


def _reset_after_fork() -> None:
    # A child of fork() must not free the handles that it has inherited. It destroys those that it makes itself.
    global _forks
    _forks += 1
    _callback_threads.clear()
    _destroy_threads.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


class InCallback:
    """Marks the thread as one that runs a callback: handles whose last reference goes here are destroyed on another
    thread. A stream's own thread cannot destroy it, and a log function must not call the library."""

    def __enter__(self) -> None:
        _callback_state.depth = getattr(_callback_state, "depth", 0) + 1
        _callback_threads.add(threading.get_ident())

    def __exit__(self, *_: Any) -> None:
        _callback_state.depth -= 1
        if not _callback_state.depth:
            _callback_threads.discard(threading.get_ident())


def _join_at_exit() -> None:
    """Waits for threads that run Python before the interpreter ends. Otherwise one that returns from another library's
    C++ code and asks for the GIL ends the process by SIGABRT. The wait is short, since peers may never answer."""
    deadline = time.monotonic() + _EXIT_GRACE_SECONDS
    for thread in list(_destroy_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    while _callback_threads - {threading.get_ident()} and time.monotonic() < deadline:
        time.sleep(0.001)
    # The interpreter blocks or ends a thread that calls back later, but the callback's code must still exist.
    if any(registry.used for registry in _registries):
        import ctypes

        for function in _callbacks:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))


atexit.register(_join_at_exit)


def _destroy(function: Callable[[Any], None], keep: Any, forks: int, pointer: Any,
             _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    # The end of the process frees everything: there is nothing to wait for, and this module's globals may be gone.
    if _is_finalizing() or forks != _forks:
        return
    if getattr(_callback_state, "depth", 0):
        thread = threading.Thread(target=lambda *_: function(pointer), args=(keep,), daemon=True)
        thread.start()
        _destroy_threads.add(thread)
    else:
        function(pointer)


def gc_handle(pointer: Any, destroy: Callable[[Any], None], keep: Any = None) -> Any:
    """A handle that is destroyed with its last reference; running calls hold one. `keep` outlives the handle."""
    return ffi.gc(pointer, functools.partial(_destroy, destroy, keep, _forks))


def new_struct(name: str, count: Optional[int] = None) -> Any:
    """A zeroed struct with its struct_size set; with count, an array of that many, but of at least one."""
    if count is None:
        return ffi.new(f"{name} *", {"struct_size": ffi.sizeof(name)})
    return ffi.new(f"{name}[]", [{"struct_size": ffi.sizeof(name)}] * max(count, 1))


class Registry:
    """Maps the `user` pointers that the library hands back to Python objects."""

    def __init__(self) -> None:
        self._keys = itertools.count(1)
        self._values: Dict[int, Any] = {}
        _registries.append(self)

    @property
    def used(self) -> bool:
        return bool(self._values)

    def put(self, value: Any) -> Any:
        key = next(self._keys)
        self._values[key] = value
        return ffi.cast("void *", key)

    def get(self, user: Any) -> Any:
        return self._values[int(ffi.cast("uintptr_t", user))]

    def pop(self, user: Any) -> Any:
        return self._values.pop(int(ffi.cast("uintptr_t", user)), None)


def version_text_address() -> int:
    """The address of a static string of the library, which differs between two loaded copies."""
    return int(ffi.cast("uintptr_t", lib.dc_version_string()))


def text(pointer: Any) -> str:
    return str(ffi.string(pointer).decode("utf-8", "replace"))
