"""One rank's calls on the counting device, which give exact memory and bytes (chapter 15 of dc_api.h)."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

from .._lib import ffi, gc_handle, lib, new_struct
from ..comm import Comm
from ..device import Device, Stream
from ..errors import check
from ..linalg.handle import Handle
from ..types import DType, Op
from .machine import Machine

_EVENTS = 1 << 16  # the most in a trace
_LANES = ("compute", "gather", "reduce", "offload", "reload")
_ADDRESS = 1 << 60  # of every tensor: the counting device never reads memory


class Rank:
    """A rank's device, communicator, context and stream."""

    def __init__(self, machine: Machine, dtype: str, ranks: int, heap: bool, bucket: int,
                 replicas: int = 1, number: int = 0, symmetric_memory: int = 0) -> None:
        self.device = Device("count")
        for name, value in (("flops_per_second", machine.rate(dtype)), ("launch_ns", machine.launch_ns),
                            ("memory_bytes_per_second", machine.memory_bytes_per_second),
                            ("host_bytes_per_second", machine.host_bytes_per_second),
                            ("ranks_per_node", machine.ranks_per_node),
                            ("node_bytes_per_second", machine.node_bytes_per_second),
                            ("node_latency_ns", machine.node_latency_ns),
                            ("network_bytes_per_second", machine.network_bytes_per_second),
                            ("network_latency_ns", machine.network_latency_ns)):
            check(lib.dc_count_set(self.device._handle, name.encode(), value))
        out = ffi.new("dc_comm **")
        check(lib.dc_comm_create_count(self.device._handle, number, ranks, int(heap), out))
        self.comm = Comm(out[0])
        self.stream = Stream(self.device)
        context = ffi.new("dc_context **")
        check(lib.dc_context_create(self.device._handle, new_struct("dc_context_options"), context))
        self.context: Any = gc_handle(context[0], lib.dc_context_destroy)
        config = new_struct("dc_config")
        config.replicas, config.free_activation_threshold = replicas, -1
        config.symmetric_memory = symmetric_memory
        check(lib.dc_init(self.context, self.comm._handle, config, bucket))
        check(lib.dc_context_set_stream(self.context, self.stream._handle))
        self.linalg = Handle(device=self.device)
        self._shapes: List[Any] = []

    def tensor(self, shape: Sequence[int], dtype: DType) -> Any:
        """A tensor without memory. Its shape lives as long as the rank."""
        tensor = new_struct("dc_tensor")
        self._shapes.append(ffi.new("int64_t[]", list(shape) or [0]))
        tensor.data, tensor.shape, tensor.ndim = ffi.cast("void *", _ADDRESS), self._shapes[-1], len(shape)
        tensor.dtype = int(dtype)
        return tensor

    def count(self, name: str) -> int:
        value = ffi.new("int64_t *")
        check(lib.dc_count_get(self.device._handle, name.encode(), value))
        return int(value[0])

    def reserved_bytes(self) -> int:
        """The device's memory that the library has taken."""
        memory = new_struct("dc_device_memory")
        check(lib.dc_device_get_memory(self.device._handle, memory))
        return int(memory.reserved_bytes)

    def stats(self) -> Any:
        stats = new_struct("dc_memory_stats")
        check(lib.dc_context_get_memory_stats(self.context, stats))
        return stats

    def work(self, duration_ns: int) -> None:
        check(lib.dc_count_work(self.stream._handle, duration_ns))

    def wait(self) -> int:
        """Waits until the stream's work is done. Returns the device's time in nanoseconds."""
        self.stream.synchronize()
        return self.count("time_ns")

    def trace_start(self) -> None:
        check(lib.dc_context_trace_start(self.context, _EVENTS))

    def trace(self) -> List[Tuple[str, int, int, str, int]]:
        """Stream, begin, end, operator and parameter of the library's work since the last call. The caller's lane is
        left out, since its calls take no time."""
        events, count = ffi.new("dc_trace_event[]", _EVENTS), ffi.new("int64_t *")
        check(lib.dc_context_trace_read(self.context, events, ffi.sizeof("dc_trace_event"), _EVENTS, count))
        return [(_LANES[event.lane], int(event.begin_ns), int(event.end_ns),
                 Op(event.op).name.lower().replace("_", " "), int(event.id))
                for event in events[0 : count[0]] if event.lane > 0]

    def close(self) -> None:
        check(lib.dc_cleanup(self.context))


class AdamW:
    """An optimizer of this rank's parts, whose allocations the device counts."""

    def __init__(self, rank: Rank, parts: Sequence[Tuple[int, int, int]], weights: DType, grads: DType) -> None:
        """parts: for each parameter its total elements, and this rank's offset and count."""
        out = ffi.new("dc_optimizer **")
        check(lib.dc_adamw_create(rank.linalg._handle, new_struct("dc_adamw_options"), out))
        self._handle: Any = gc_handle(out[0], lib.dc_optimizer_destroy)
        self._count = len(parts)
        self._weights, self._grads = new_struct("dc_tensor", self._count), new_struct("dc_tensor", self._count)
        index = ffi.new("int64_t *")
        for i, (total, offset, count) in enumerate(parts):
            shape = ffi.new("int64_t[]", [total])
            check(lib.dc_optimizer_add_param(self._handle, 0, shape, 1, offset, count, int(weights), index))
            self._weights[i] = rank.tensor([count], weights)[0]
            self._grads[i] = rank.tensor([count], grads)[0]

    def step(self) -> None:
        check(lib.dc_optimizer_step(self._handle, self._weights, self._grads, ffi.sizeof("dc_tensor"), self._count,
                                    1.0))

    def stats(self) -> Any:
        stats = new_struct("dc_optimizer_stats")
        check(lib.dc_optimizer_get_stats(self._handle, stats))
        return stats
