"""Devices, streams and events."""

from __future__ import annotations

import itertools
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

from ._handle import OwnedHandle
from ._lib import InCallback, Registry, callback, ffi, gc_handle, lib, new_struct, text
from .arguments import c_string, check_size, handle_arg, timeout_ns
from .errors import check
from .tensors import HOST, Place
from .types import Status


class Allocator:
    """Gives a device the caller's memory: subclass it. Its methods are called from any thread; an exception counts as a
    failure to allocate. It lives as long as the device, which streams, contexts and buffers keep alive."""

    def alloc(self, size: int, align: int) -> int:
        """The address of `size` bytes, a multiple of align; 0 if there is no memory."""
        raise NotImplementedError

    def free(self, address: int, size: int, align: int) -> None:
        """Takes back what alloc(size, align) returned."""
        raise NotImplementedError

    def close(self) -> None:
        """Called once, when the device is gone."""


_allocators = Registry()
_ALLOCATOR = dict(ffi.typeof("dc_allocator").fields)


@callback(_ALLOCATOR["alloc"].type)
def _alloc(size: int, align: int, user: Any) -> Any:
    with InCallback():
        try:
            return ffi.cast("void *", _allocators.get(user).alloc(size, align))
        except Exception:
            sys.excepthook(*sys.exc_info())
            return ffi.NULL


@callback(_ALLOCATOR["free"].type)
def _free(address: Any, size: int, align: int, user: Any) -> None:
    with InCallback():
        _allocators.get(user).free(int(ffi.cast("uintptr_t", address)), size, align)


@callback(_ALLOCATOR["destroy_user"].type)
def _close_allocator(user: Any) -> None:
    with InCallback():
        _allocators.pop(user).close()


class Device(OwnedHandle):
    """A compute device, opened by name. Its memory comes from `allocator` if one is given. max_pinned_bytes: the most
    host memory that a CUDA device pins at once; 0: half of the machine's memory."""

    _kind = "device"

    def __init__(self, name: str = "cpu", allocator: Optional[Allocator] = None,
                 max_pinned_bytes: int = 0) -> None:
        out = ffi.new("dc_device **")
        options = new_struct("dc_device_options")
        options.max_pinned_bytes = check_size("max_pinned_bytes", max_pinned_bytes)
        table = new_struct("dc_allocator")
        if allocator is not None:
            table.alloc, table.free, table.destroy_user = _alloc, _free, _close_allocator
            table.user = _allocators.put(allocator)
            options.allocator = table
        status = lib.dc_device_open(c_string("name", name), options, out)
        if status != Status.OK and allocator is not None:
            _allocators.pop(table.user)
        check(status)
        self._owned = gc_handle(out[0], lib.dc_device_destroy)
        kind, _, number = name.partition(":")
        self.place: Place = (2, int(number or 0)) if kind == "cuda" else HOST  # where the device's memory is

    @property
    def handle(self) -> int:
        """Address of the dc_device, for other bindings."""
        return int(ffi.cast("uintptr_t", self._handle))

    @property
    def name(self) -> str:
        return text(lib.dc_device_name(self._handle))


class Event(OwnedHandle):
    """A point in a stream, for which other streams and threads can wait."""

    _kind = "event"

    def __init__(self, device: Device) -> None:
        out = ffi.new("dc_event **")
        check(lib.dc_event_create(handle_arg("device", device, Device, optional=False), out))
        self._owned = gc_handle(out[0], lib.dc_event_destroy)

    def record(self, stream: Optional["Stream"] = None) -> None:
        check(lib.dc_event_record(self._handle, handle_of(stream)))

    def wait(self, stream: Optional["Stream"] = None, timeout: Optional[float] = None) -> None:
        """Makes a stream, or the caller if there is none, wait for the latest record(). timeout in seconds."""
        check(lib.dc_event_wait(self._handle, handle_of(stream), timeout_ns(timeout)))

    def query(self) -> bool:
        passed = ffi.new("int32_t *")
        check(lib.dc_event_query(self._handle, passed))
        return bool(passed[0])


# The function of each queued call, and the list in which its stream collects exceptions.
_calls = Registry()


@callback("dc_stream_fn")
def _run_call(user: Any) -> None:
    with InCallback():
        function, failures = _calls.pop(user)
        try:
            function()
        except BaseException as error:  # synchronize() raises it
            failures.append(error)
            del error
        # The function may hold the last reference to its own stream, which must then be destroyed inside InCallback.
        del function, failures


class Stream(OwnedHandle):
    """An in-order queue of asynchronous work. Where a call takes a stream, None means the calling thread."""

    _kind = "stream"

    def __init__(self, device: Device, native: Optional[int] = None) -> None:
        """native: the number of a cudaStream_t that the caller made and keeps alive. The stream then wraps it."""
        out = ffi.new("dc_stream **")
        handle = handle_arg("device", device, Device, optional=False)
        if native is None:
            check(lib.dc_stream_create(handle, out))
        else:
            check(lib.dc_stream_wrap(handle, ffi.cast("void *", native), out))
        self._device = device
        self._failures: List[BaseException] = []
        self._pins: Dict[int, Tuple[Event, Any]] = {}
        self._pin_numbers = itertools.count()
        self._owned = gc_handle(out[0], lib.dc_stream_destroy, self._pins)

    @property
    def handle(self) -> int:
        """Address of the dc_stream, for other bindings."""
        return int(ffi.cast("uintptr_t", self._handle))

    def call(self, function: Callable[[], Any]) -> None:
        """Runs function() on the stream's thread. synchronize() raises the exceptions of such functions."""
        user = _calls.put((function, self._failures))
        status = lib.dc_stream_call(self._handle, _run_call, user)
        if status != Status.OK:
            _calls.pop(user)
        check(status)

    def synchronize(self, timeout: Optional[float] = None) -> None:
        """Blocks until all work queued so far is done, for at most timeout seconds."""
        check(lib.dc_stream_synchronize(self._handle, timeout_ns(timeout)))
        self._unpin()
        if self._failures:
            raise self._failures.pop(0)

    def pin(self, *objects: Any) -> None:
        """Keeps objects alive until the work queued so far is done."""
        self._unpin()
        event = Event(self._device)
        event.record(self)
        self._pins[next(self._pin_numbers)] = event, objects

    def _unpin(self) -> None:
        # A query releases the GIL, so other threads may pin and unpin meanwhile. Each removes only pins that it found
        # done.
        for number in list(self._pins):
            pin = self._pins.get(number)
            if pin is not None and pin[0].query():
                self._pins.pop(number, None)

    def close(self) -> None:
        """Waits for queued work and releases the stream."""
        super().close()


def handle_of(stream: Optional[Stream]) -> Any:
    return handle_arg("stream", stream, Stream)


def place_of(stream: Optional[Stream]) -> Place:
    """Where tensors of work on the stream must be."""
    return HOST if stream is None else stream._device.place
