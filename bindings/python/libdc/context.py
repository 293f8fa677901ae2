"""One training run on one rank. The methods are the library's operators and other functions, under their names without
dc_."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ._handle import OwnedHandle
from ._lib import InCallback, Registry, callback, ffi, gc_handle, lib, new_struct, text
from .arguments import assign, c_path, c_string, check_size, counted, handle_arg, int64_array
from .comm import Comm, cause_of
from .device import Device, Stream, handle_of
from .errors import check
from .tensors import HOST, PINNED, Buffer, Tensor, View, fill, output, result
from .types import Config, DType, MemoryKind, MemoryStats, Op, OpInfo, Status, TraceEvent

_logs = Registry()
_MAX_TRACE_EVENTS = 1 << 24  # the most that dc_context_trace_start() keeps


@callback("dc_log_fn")
def _log(level: int, message: Any, user: Any) -> None:
    with InCallback():
        _logs.get(user)(level, text(message))


def _destroy(pointer: Any, log_user: Any) -> None:
    lib.dc_context_destroy(pointer)
    if log_user is not None:
        _logs.pop(log_user)


def _report_async_error(reference: "weakref.ref[Context]") -> None:
    """Checks a context at exit, so that it sees, and dumps, a failure that the program met elsewhere."""
    context = reference()
    if context is not None and context._owned is not None:
        lib.dc_context_check(context._owned)


class Context(OwnedHandle):
    """Methods take the arguments of the C functions, whose comments in dc_api.h are the reference, and return their
    outputs. Tensors may be anything with __dlpack__, __array_interface__ or the buffer protocol, in host memory. With a
    CUDA device they must be on that device; weights may also be in pinned host memory. Registered tensors are kept
    alive until they are unregistered. Calls may come from any thread."""

    _kind = "context"

    def __init__(self, device: Optional[Device] = None, log: Optional[Callable[[int, str], None]] = None) -> None:
        """log(level, message) gets the library's log lines; it must not call the library. The environment's
        LIBDC_DUMP_DIR names a folder for trace_dump_on_error()."""
        device = device or Device("cpu")
        options = new_struct("dc_context_options")
        log_user = None
        if log is not None:
            log_user = _logs.put(log)
            options.log, options.log_user = _log, log_user
        out = ffi.new("dc_context **")
        status = lib.dc_context_create(handle_arg("device", device, Device), options, out)
        if status != Status.OK and log_user is not None:
            _logs.pop(log_user)
        check(status)
        # The caller's memory that the library reads. It is freed after the context, whatever the order of collection.
        self._registered: Dict[int, List[Any]] = {}
        self._pending: Dict[Any, Any] = {}
        self._owned = gc_handle(out[0], lambda pointer: _destroy(pointer, log_user), (self._registered, self._pending))
        self.device = device
        self._place = device.place
        self._device_or_host = (HOST,) if self._place == HOST else (self._place, HOST)
        self._comm: Optional[Comm] = None
        self._stream: Optional[Stream] = None
        if os.environ.get("LIBDC_DUMP_DIR"):
            self.trace_dump_on_error(os.environ["LIBDC_DUMP_DIR"])
            atexit.register(_report_async_error, weakref.ref(self))

    @property
    def handle(self) -> int:
        """Address of the dc_context, for other bindings."""
        return int(ffi.cast("uintptr_t", self._handle))

    def _check(self, status: int) -> None:
        check(status, cause_of(self._comm))

    def _view(self, name: str, array: Any, writable: bool = False, pinned: bool = False) -> View:
        """pinned: the array may also be in host memory that the device can read."""
        return View(array, writable, name, (self._place, PINNED) if pinned and self._place != HOST else (self._place,))

    def _pin_until_read(self, view: Any) -> None:
        # With a stream, the library reads after the call has returned.
        if self._stream is not None:
            self._stream.pin(view)

    # Life

    def init(self, comm: Optional[Comm] = None, config: Union[Config, Mapping[str, Any], Any] = None,
             initial_reduce_bucket_size: int = 1 << 24) -> None:
        """Joins the ranks of comm (None: a world of one). config: a Config, a mapping with some of its keys, or any
        object with some of its attributes. initial_reduce_bucket_size in elements."""
        table = new_struct("dc_config")
        for key, value in _config_items(config):
            number = int(value) if isinstance(value, float) and value.is_integer() else value
            assign(table, key, number, f"init: config.{key}")
        check(lib.dc_init(self._handle, handle_arg("init: comm", comm, Comm), table,
                          check_size("init: initial_reduce_bucket_size", initial_reduce_bucket_size)), cause_of(comm))
        self._comm = comm

    def cleanup(self) -> None:
        self._check(lib.dc_cleanup(self._handle))
        self._registered.clear()
        self._pending.clear()

    def close(self) -> None:
        """Cleans up and releases the handle. Tensors from take_param() stay readable."""
        super().close()

    def reset(self) -> None:
        self._check(lib.dc_reset(self._handle))

    def step_abort(self) -> None:
        self._check(lib.dc_context_step_abort(self._handle))

    def set_stream(self, stream: Optional[Stream]) -> None:
        self._check(lib.dc_context_set_stream(self._handle, handle_of(stream)))
        self._stream = stream
        self._pending["stream"] = stream

    def async_error(self) -> None:
        """Raises the first failure of asynchronous work, if there was one."""
        self._check(lib.dc_context_check(self._handle))

    def memory_alloc(self, nbytes: int, kind: int = MemoryKind.DEVICE) -> Buffer:
        out = ffi.new("dc_buffer **")
        self._check(lib.dc_context_alloc(self._handle, check_size("memory_alloc: nbytes", nbytes), kind, out))
        pinned = kind == MemoryKind.HOST and self._place != HOST
        return Buffer(out[0], PINNED if pinned else self._place)

    # Parameters

    def register_param(self, id: int, shape: Sequence[int], tensor: Any, grad_buffer: Any, offset: int = 0,
                       name: Optional[str] = None) -> None:
        """name: for error texts and dumps."""
        weights = self._view("register_param: tensor", tensor, pinned=True)
        grad = self._view("register_param: grad_buffer", grad_buffer, writable=True)
        lengths = int64_array("register_param: shape", shape)
        self._check(lib.dc_register_param(self._handle, id, *lengths, weights.c, grad.c, offset))
        self._registered[id] = [weights.keep, grad.keep]
        if name is not None:
            self.set_param_name(id, name)

    def register_z3_param(self, id: int, shape: Sequence[int], shard: Any, grad_buffer: Any, persistent: bool = False,
                          expected_grad_dtype: Any = None, name: Optional[str] = None) -> None:
        """name: for error texts and dumps."""
        weights = self._view("register_z3_param: shard", shard, pinned=True)
        grad = self._view("register_z3_param: grad_buffer", grad_buffer, writable=True)
        lengths = int64_array("register_z3_param: shape", shape)
        self._check(lib.dc_register_z3_param(self._handle, id, *lengths, weights.c, grad.c, bool(persistent),
                                             DType.of(expected_grad_dtype)))
        self._registered[id] = [weights.keep, grad.keep]
        if name is not None:
            self.set_param_name(id, name)

    def set_param_name(self, id: int, name: Optional[str]) -> None:
        """Sets the name that error texts, log lines and dumps show after the parameter's number. None removes it."""
        c_name = ffi.NULL if name is None else c_string("set_param_name: name", name)
        self._check(lib.dc_context_set_param_name(self._handle, id, c_name))

    def update_param_grad_buffer(self, id: int, grad_buffer: Any, offset: int = 0) -> None:
        grad = self._view("update_param_grad_buffer: grad_buffer", grad_buffer, writable=True)
        self._check(lib.dc_context_update_param_grad_buffer(self._handle, id, grad.c, offset))
        self._registered.setdefault(id, [None, None])[1] = grad.keep

    def unregister_param(self, id: int) -> None:
        self._check(lib.dc_unregister_param(self._handle, id))
        self._registered.pop(id, None)

    def set_persistent(self, id: int) -> None:
        self._check(lib.dc_set_persistent(self._handle, id))

    def clear_persistent(self, id: int) -> None:
        self._check(lib.dc_clear_persistent(self._handle, id))

    def invalidate_gathered_param(self, id: int) -> None:
        self._check(lib.dc_invalidate_gathered_param(self._handle, id))

    def clear_all_gathered_params(self) -> None:
        self._check(lib.dc_clear_all_gathered_params(self._handle))

    def params_updated(self, ids: Optional[Sequence[int]] = None) -> None:
        """Says that the weights of these parameters changed; None: of all."""
        if ids is None:
            self._check(lib.dc_context_params_updated(self._handle, ffi.NULL, 0))
        elif len(ids):
            self._check(lib.dc_context_params_updated(self._handle, *int64_array("ids", ids)))

    def accumulate_grads(self, ids: Sequence[int]) -> None:
        self._check(lib.dc_context_accumulate_grads(self._handle, *int64_array("ids", ids)))

    # Graphs

    def register_graph_z0(self, graph_id: int, ids: Sequence[int]) -> None:
        self._check(lib.dc_register_graph_z0(self._handle, graph_id, *int64_array("ids", ids)))

    def register_graph_z1(self, graph_id: int, ids: Sequence[int]) -> None:
        self._check(lib.dc_register_graph_z1(self._handle, graph_id, *int64_array("ids", ids)))

    def register_graph_z2(self, graph_id: int, ids: Sequence[int]) -> None:
        self._check(lib.dc_register_graph_z2(self._handle, graph_id, *int64_array("ids", ids)))

    def register_graph_z3(self, graph_id: int, ids: Sequence[int]) -> None:
        self._check(lib.dc_register_graph_z3(self._handle, graph_id, *int64_array("ids", ids)))

    def unregister_graph(self, graph_id: int) -> None:
        self._check(lib.dc_unregister_graph(self._handle, graph_id))

    # The operators

    def allgather_param(self, token: Any, graph_id: int, id: int, dtype: Any = None) -> Tensor:
        """The full parameter, readable after wait_allgather and until release_param."""
        out = output()
        self._check(lib.dc_allgather_param(self._handle, ffi.NULL, graph_id, id, DType.of(dtype), out))
        return result(out, self, self._place)

    def prefetch_params_fused(self, graph_id: int, ids: Sequence[int], dtypes: Optional[Sequence[Any]] = None) -> None:
        if dtypes is not None and len(dtypes) != len(ids):
            raise ValueError(f"dtypes has {counted(len(dtypes), 'entry', 'entries')}, must have one for each of "
                             f"{counted(len(ids), 'id')}")
        types = ffi.NULL if dtypes is None else ffi.new("int32_t[]", [DType.of(dtype) for dtype in dtypes])
        c_ids, count = int64_array("ids", ids)
        self._check(lib.dc_prefetch_params_fused(self._handle, graph_id, c_ids, types, count))

    def wait_allgather(self, token: Any, graph_id: int, id: int) -> Any:
        """Returns the token."""
        self._check(lib.dc_wait_allgather(self._handle, ffi.NULL, graph_id, id))
        return token

    def release_param(self, token: Any, graph_id: int, id: int, n_users: int = 1) -> Any:
        """Returns the token. The last of n_users releases invalidates every view of the gathered parameter."""
        self._check(lib.dc_release_param(self._handle, ffi.NULL, graph_id, id, n_users))
        return token

    def take_param(self, graph_id: int, id: int, dtype: Any = None) -> Tensor:
        """The gathered parameter in memory that the caller owns. Releases the parameter as its only user."""
        info = self.dry_run(Op.TAKE_PARAM, graph_id, id, dtype)
        out = ffi.new("dc_buffer **")
        self._check(lib.dc_take_param(self._handle, graph_id, id, DType.of(dtype), out))
        return Buffer(out[0], self._place).tensor(info.shape or (), info.dtype)

    def reduce_grad(self, grad: Any, graph_id: int, id: int) -> None:
        view = self._view("reduce_grad: grad", grad)
        status = lib.dc_reduce_grad(self._handle, view.c, graph_id, id)
        try:
            self._check(status)
        finally:
            self._pin_until_read(view)  # a part of a large gradient may be queued when the call fails

    def free_tensors(self, tensors: Sequence[Any]) -> List[bool]:
        """For each tensor, whether the caller may free it."""
        count = len(tensors)
        views, freed = new_struct("dc_tensor", count), ffi.new("int32_t[]", max(count, 1))
        keep = [fill(views[i], tensor, False, f"free_tensors: tensors[{i}]", self._device_or_host)
                for i, tensor in enumerate(tensors)]
        self._check(lib.dc_free_tensors(self._handle, views, ffi.sizeof("dc_tensor"), count, freed))
        self._pin_until_read(keep)
        return [bool(freed[i]) for i in range(count)]

    def offload_tensor(self, tensor: Any, graph_id: int, id: int) -> Tensor:
        """The host copy that the context keeps, readable after wait_offload."""
        view, out = self._view("offload_tensor: tensor", tensor), output()
        self._check(lib.dc_offload_tensor(self._handle, view.c, graph_id, id, out))
        if self._stream is not None:
            self._pending.setdefault((graph_id, id), []).append(view)  # the id may be offloaded again
        return result(out, self)

    def wait_offload(self, token: Any, graph_id: int, id: int) -> Tensor:
        out = output()
        self._check(lib.dc_wait_offload(self._handle, ffi.NULL, graph_id, id, out))
        self._pin_until_read(self._pending.pop((graph_id, id), None))
        return result(out, self)

    def reload_tensor(self, token: Any, graph_id: int, id: int) -> Tensor:
        """The new device copy, readable after wait_reload."""
        out = output()
        self._check(lib.dc_reload_tensor(self._handle, ffi.NULL, graph_id, id, out))
        return result(out, self, self._place)

    def wait_reload(self, tensor: Any, graph_id: int, id: int) -> Any:
        """The device copy; while profiling, and where no reload was made, the tensor itself."""
        view, out = View(tensor, False, "wait_reload: tensor", self._device_or_host), output()
        self._check(lib.dc_wait_reload(self._handle, view.c, graph_id, id, out))
        return tensor if view.c and out.data == view.c.data else result(out, self, self._place)

    def offload_parameter(self, token: Any, graph_id: int, id: int) -> None:
        self._check(lib.dc_offload_parameter(self._handle, ffi.NULL, graph_id, id))

    def reload_parameter(self, token: Any, graph_id: int, id: int) -> None:
        self._check(lib.dc_reload_parameter(self._handle, ffi.NULL, graph_id, id))

    def end_backward(self, graph_id: int, release_buckets: bool = False) -> None:
        self._check(lib.dc_end_backward(self._handle, graph_id, int(release_buckets)))

    # The step

    def start_forward(self) -> None:
        self._check(lib.dc_start_forward(self._handle))

    def end_forward(self) -> None:
        self._check(lib.dc_end_forward(self._handle))

    def start_backward(self, update: bool) -> None:
        self._check(lib.dc_start_backward(self._handle, int(update)))

    def grads_finite(self) -> Tuple[bool, Optional[int]]:
        """Whether the last step's gradients are finite on every rank, and the lowest id of a parameter whose gradient
        is not, or None."""
        finite, id = ffi.new("int32_t *"), ffi.new("int64_t *")
        self._check(lib.dc_context_grads_finite(self._handle, finite, id))
        return bool(finite[0]), None if finite[0] else id[0]

    def enable_profiling(self, enable: bool) -> None:
        self._check(lib.dc_enable_profiling(self._handle, int(enable)))

    def is_profiling(self) -> bool:
        return bool(lib.dc_is_profiling(self._handle))

    # Memory, wire bytes, dry runs, traces

    def get_memory_stats(self) -> MemoryStats:
        stats = new_struct("dc_memory_stats")
        self._check(lib.dc_context_get_memory_stats(self._handle, stats))
        return MemoryStats(*(getattr(stats, field) for field in MemoryStats._fields))

    def reset_stats(self) -> None:
        self._check(lib.dc_context_reset_stats(self._handle))

    def dry_run(self, op: int, graph_id: int, id: int, dtype: Any = None) -> OpInfo:
        """Describes the result of an operator and the memory that it would take, without running it."""
        info = new_struct("dc_op_info")
        self._check(lib.dc_context_dry_run(self._handle, op, graph_id, id, DType.of(dtype), info))
        shape: Optional[Tuple[int, ...]] = None
        if info.ndim >= 0:
            shape = tuple(info.shape[i] for i in range(info.ndim))
        return OpInfo(shape, DType(info.dtype), bool(info.host), info.device_bytes, info.wire_bytes)

    def trace_start(self, capacity: int = 65536) -> None:
        """Keeps the last `capacity` events from now on; 0 stops tracing and drops them."""
        self._check(lib.dc_context_trace_start(self._handle, capacity))

    def trace_read(self, limit: int = 65536) -> List[TraceEvent]:
        """Up to `limit` kept events, oldest first; the rest stays for the next call."""
        limit = min(check_size("trace_read: limit", limit), _MAX_TRACE_EVENTS)
        events, count = ffi.new("dc_trace_event[]", max(limit, 1)), ffi.new("int64_t *")
        self._check(lib.dc_context_trace_read(self._handle, events, ffi.sizeof("dc_trace_event"), limit, count))
        return [TraceEvent(event.begin_ns, event.end_ns, event.graph_id, event.id, event.bytes, Op(event.op),
                           event.lane) for event in events[0 : count[0]]]

    def trace_dump(self, folder: Union[str, "os.PathLike[str]"]) -> None:
        """Writes this rank's last operations to folder/rank-R.json. May be called from any thread, even while a call is
        blocked."""
        check(lib.dc_context_trace_dump(self._handle, c_path("folder", folder)))

    def trace_dump_on_error(self, folder: Union[str, "os.PathLike[str]", None]) -> None:
        """Makes the first communication error write what trace_dump() writes; None turns that off."""
        c_folder = ffi.NULL if folder is None else c_path("folder", folder)
        check(lib.dc_context_trace_dump_on_error(self._handle, c_folder))


def _config_items(config: Any) -> List[Tuple[str, Any]]:
    if config is None:
        return []
    if isinstance(config, Mapping):
        unknown = sorted(set(config) - set(Config._fields))
        if unknown:
            raise TypeError(f"config has no key {unknown[0]!r}, its keys are {', '.join(Config._fields)}")
        return list(config.items())
    items = [(key, getattr(config, key)) for key in Config._fields if hasattr(config, key)]
    if not items:
        raise TypeError(f"config = {config!r}, must have some of the attributes {', '.join(Config._fields)}")
    return items
