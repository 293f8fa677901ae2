"""The calls that libdc.torch makes of the library on one rank, and the same calls on the counting device."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Dict, Iterator, List, Tuple

import libdc
import libdc.torch
from libdc._lib import ffi, lib, new_struct
from libdc.errors import check
from libdc.plan import load
from libdc.plan.counting import Rank
from libdc.torch.ops import eager_calls
from libdc.types import DType
from torch.multiprocessing.reductions import StorageWeakRef

GRAPH = 1
_METHODS = ("init", "memory_alloc", "register_param", "register_z3_param", "register_graph_z0", "register_graph_z3",
            "accumulate_grads", "start_backward", "end_backward", "params_updated", "invalidate_gathered_param",
            "prefetch_params_fused")


class Schedule:
    """Calls in order, each a name and its arguments; "free" is the end of what a take gave."""

    def __init__(self) -> None:
        self.calls: List[Tuple[str, Tuple[Any, ...]]] = []
        self._live: Dict[int, Any] = {}
        self._taken = 0

    def add(self, name: str, *arguments: Any) -> None:
        self.look()
        self.calls.append((name, arguments))

    def look(self) -> None:
        """Notes what died since the last call."""
        for number in [number for number, storage in self._live.items() if storage.expired()]:
            del self._live[number]
            self.calls.append(("free", (number,)))

    def taken(self, tensor: Any) -> None:
        self._live[self._taken] = StorageWeakRef(tensor.untyped_storage())
        self._taken += 1


def _kept(name: str, arguments: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """A call's arguments without tensors."""
    if name == "init":
        return (dict(arguments[1]), arguments[2])
    if name == "register_param":
        id, shape, tensor, grad = arguments[:4]
        return (id, tuple(shape), DType.of(tensor.dtype), grad is not None)
    if name == "register_z3_param":
        id, shape, shard, grad, persistent, dtype = arguments
        return (id, tuple(shape), DType.of(shard.dtype), shard.numel(), None if grad is None else DType.of(grad.dtype),
                bool(persistent), DType.of(dtype))
    if name.startswith("register_graph"):
        return (list(arguments[1]),)
    if name == "prefetch_params_fused":
        _, ids, dtypes = arguments
        return (list(ids), None if dtypes is None else [int(DType.of(dtype)) for dtype in dtypes])
    return () if name == "end_backward" else arguments


def _of_context(schedules: "threading.local", name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, *arguments: Any) -> Any:
        schedules.now.add(name, *_kept(name, arguments))
        return call(self, *arguments)

    return wrapped


@contextlib.contextmanager
def recorded() -> Iterator["threading.local"]:
    """While it is open, the calls of a thread go to its `.now`, a Schedule, which the thread sets first."""
    schedules = threading.local()
    originals = eager_calls.take, eager_calls.take_params, eager_calls.reduce_grads
    take, take_params, reduce_grads = originals
    methods = {name: getattr(libdc.Context, name) for name in _METHODS}

    def noted_take(shard: Any, graph: int, id: int, dtype: Any = None) -> Any:
        schedules.now.add("take", id, DType.of(dtype))
        tensor = take(shard, graph, id, dtype)
        schedules.now.taken(tensor)
        return tensor

    def noted_take_params(graph: int, ids: List[int], dtypes: Any = None) -> Any:
        for id, dtype in zip(ids, dtypes or [None] * len(ids)):
            schedules.now.add("take", max(id, ~id), DType.of(dtype))
        tensors = take_params(graph, ids, dtypes)
        for tensor in tensors:
            schedules.now.taken(tensor)
        return tensors

    def noted_reduce(grads: List[Any], graph: int, ids: List[int]) -> None:
        for grad, id in zip(grads, ids):
            schedules.now.add("reduce_grad", id, tuple(grad.shape), DType.of(grad.dtype))
        reduce_grads(grads, graph, ids)

    eager_calls.take, eager_calls.take_params, eager_calls.reduce_grads = noted_take, noted_take_params, noted_reduce
    for name, method in methods.items():
        setattr(libdc.Context, name, _of_context(schedules, name, method))
    try:
        yield schedules
    finally:
        eager_calls.take, eager_calls.take_params, eager_calls.reduce_grads = originals
        for name, method in methods.items():
            setattr(libdc.Context, name, method)


class _Replay:
    def __init__(self, ranks: int, rank: int, heap: bool) -> None:
        self.ranks, self.number, self.heap = ranks, rank, heap
        self.taken: List[Any] = []
        self.blocks: List[Any] = []

    def init(self, config: Dict[str, int], bucket: int) -> None:
        self.rank = Rank(load("h100"), "bfloat16", self.ranks, self.heap, bucket, config["replicas"], self.number,
                         config["symmetric_memory"])
        self.context = self.rank.context

    def memory_alloc(self, nbytes: int, kind: int) -> None:
        out = ffi.new("dc_buffer **")
        check(lib.dc_context_alloc(self.context, nbytes, kind, out))
        self.blocks.append(ffi.gc(out[0], lib.dc_buffer_release))

    def register_param(self, id: int, shape: Tuple[int, ...], dtype: DType, grad: bool) -> None:
        dims, count = ffi.new("int64_t[]", list(shape) or [1]), 1
        for length in shape:
            count *= length
        check(lib.dc_register_param(self.context, id, dims, len(shape), self.rank.tensor(shape, dtype),
                                    self.rank.tensor([count], dtype) if grad else ffi.NULL, 0))

    def register_z3_param(self, id: int, shape: Tuple[int, ...], dtype: DType, own: int, grad: Any, persistent: bool,
                          reduce: DType) -> None:
        dims = ffi.new("int64_t[]", list(shape) or [1])
        shard = self.rank.tensor([own], dtype)
        if self.blocks:
            shard.data = lib.dc_buffer_data(self.blocks[-1])
        check(lib.dc_register_z3_param(self.context, id, dims, len(shape), shard,
                                       ffi.NULL if grad is None else self.rank.tensor([own], grad), int(persistent),
                                       int(reduce)))

    def register_graph_z0(self, ids: List[int]) -> None:
        check(lib.dc_register_graph_z0(self.context, GRAPH, ffi.new("int64_t[]", ids), len(ids)))

    def register_graph_z3(self, ids: List[int]) -> None:
        check(lib.dc_register_graph_z3(self.context, GRAPH, ffi.new("int64_t[]", ids), len(ids)))

    def take(self, id: int, dtype: DType) -> None:
        out = ffi.new("dc_buffer **")
        check(lib.dc_allgather_param(self.context, ffi.NULL, GRAPH, id, int(dtype), self.rank.tensor([], dtype)))
        check(lib.dc_take_param(self.context, GRAPH, id, int(dtype), out))
        self.taken.append(out[0])

    def free(self, number: int) -> None:
        lib.dc_buffer_release(self.taken[number])

    def prefetch_params_fused(self, ids: List[int], dtypes: Any) -> None:
        check(lib.dc_prefetch_params_fused(self.context, GRAPH, ffi.new("int64_t[]", ids),
                                           ffi.NULL if dtypes is None else ffi.new("int32_t[]", dtypes), len(ids)))

    def reduce_grad(self, id: int, shape: Tuple[int, ...], dtype: DType) -> None:
        check(lib.dc_reduce_grad(self.context, self.rank.tensor(shape, dtype), GRAPH, id))

    def start_backward(self, update: bool) -> None:
        check(lib.dc_start_backward(self.context, int(update)))

    def end_backward(self) -> None:
        check(lib.dc_end_backward(self.context, GRAPH, 0))

    def accumulate_grads(self, ids: List[int]) -> None:
        check(lib.dc_context_accumulate_grads(self.context, ffi.new("int64_t[]", ids), len(ids)))

    def params_updated(self, ids: Any = None) -> None:
        check(lib.dc_context_params_updated(self.context, ffi.NULL if ids is None else ffi.new("int64_t[]", ids),
                                            0 if ids is None else len(ids)))

    def invalidate_gathered_param(self, id: int) -> None:
        check(lib.dc_invalidate_gathered_param(self.context, id))


def replay(schedule: Schedule, ranks: int, rank: int, heap: bool) -> Dict[str, int]:
    """The statistics of the counting device behind the same calls."""
    schedule.look()
    device = _Replay(ranks, rank, heap)
    for name, arguments in schedule.calls:
        getattr(device, name)(*arguments)
    stats = device.rank.stats()
    values = {name: int(getattr(stats, name)) for name in libdc.MemoryStats._fields}
    device.rank.close()
    return values
