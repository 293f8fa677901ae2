"""A sharded model on this rank: its context, its parameters, and where in a training step it is.

A step is a sequence of phases, each with its own order of gathers (see order.py):

    forward    from the first forward that is entered to its end
    backward   from the first saved weight or gradient that autograd asks for to the end of that backward

The end of a backward is autograd's own: a callback that its engine runs when all of the graph is done. It flushes the
reductions and makes each gradient visible as `.grad`.

Modules, autograd graphs and compiled graphs' anchors keep a root alive; it refers to none of them, and parameters do
not keep it. So the root ends with the last of them, without the garbage collector, and its ranks' resources with it.
Objects that are added here must refer back to the root only by a weak reference."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import libdc
import torch
from torch import Tensor, nn

from . import calls, devices
from .entry import Entry
from .order import Order

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class Options(NamedTuple):
    """What shard() was asked for."""

    stage: int
    bucket_size: int
    prefetch: int
    group_size: int
    reduce_dtype: Optional[torch.dtype]
    param_dtype: Optional[torch.dtype]
    check_finite: bool


_graph_ids = itertools.count(1 << 48)  # far from the numbers that users give their own graphs
_roots: "weakref.WeakValueDictionary[int, Root]" = weakref.WeakValueDictionary()
_lock = threading.Lock()


def is_model(graph_id: int) -> bool:
    """Whether the graph is a sharded model's."""
    return graph_id in _roots


def by_graph(graph_id: int) -> "Root":
    """The root that a compiled graph's operators name."""
    root = _roots.get(graph_id)
    if root is None:
        raise RuntimeError(f"graph {graph_id} belongs to no sharded model of this process, or the model is gone")
    return root


class Root:
    """Everything of one call of shard(). Used by one thread at a time, as the model itself is."""

    def __init__(self, comm: libdc.Comm, options: Options, device: torch.device, model: nn.Module) -> None:
        self.comm = comm
        self.model = weakref.ref(model)
        self.device = device  # of all parameters
        self._on_cards: Dict[torch.device, libdc.Comm] = {}
        if comm.size > 1 and comm.takes_devices:
            devices.check_thread_ranks("shard", device)
        # Peers read each other's shards in place; on cards, those whose windows NCCL knows.
        self.shared = comm.size > 1 and (comm.shares_memory or (device.type == "cuda" and comm._external is None))
        self.options = options
        self.stage = options.stage
        self._context = libdc.Context(devices.open_device("shard", device))
        self.entries: List[Entry] = []
        self.params: List[nn.Parameter] = []  # theirs
        # Compiled graphs carry the number; in one process, ranks that are threads must differ in it.
        with _lock:
            self.graph_id = next(_graph_ids)
            _roots[self.graph_id] = self
        self.depth = 0  # forwards of the model's modules under way
        self.block: Any = None  # of the gathered() that is open; see whole.py
        self.synchronised = True  # False inside no_sync()
        self.order: Optional[Order] = None  # of the phase under way; None: nothing to prefetch
        self.orders: Dict[Any, Order] = {}
        self.backward = False  # the phase
        self.reducing = False  # this backward has begun to reduce
        self.stale = True  # weights changed since the last forward: stages 1 and 2 gather in this one
        self.replayed = False  # steps were captured into a CUDA graph, whose launches are not announced
        self.touched: Dict[int, Entry] = {}  # got a gradient in this backward
        self.unreduced: List[Entry] = []
        # See eager.py.
        self.live: Dict[int, Tuple[Any, Entry]] = {}  # storage's address → gathered weights of the latest forward
        self.saving: Tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

    @property
    def context(self) -> libdc.Context:
        """The library's, for calls on PyTorch's current stream."""
        return calls.follow(self._context)

    def comm_for(self, where: torch.device) -> libdc.Comm:
        """The ranks, for collectives on tensors there. NCCL is asked for by the first, on every rank."""
        if where.type == "cpu" or self.comm.takes_devices:
            return self.comm
        if where not in self._on_cards:
            self._on_cards[where] = self.comm.nccl(devices.open_device("shard", where))
        return self._on_cards[where]

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        """whole = the ranks' parts one after the other."""
        self.comm_for(self.device).all_gather(part, whole, stream=devices.current_stream(self.device))

    def broadcast(self, tensor: Tensor) -> None:
        """Every rank gets rank 0's values."""
        if self.comm.size == 1 or tensor.numel() == 0:
            return
        with torch.no_grad():
            flat = tensor.detach().contiguous().view(-1).view(torch.int8)  # any type: bytes travel
            self.comm_for(flat.device).broadcast(flat, 0, stream=devices.current_stream(flat.device))
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    # Registration

    def adopt(self, entries: Sequence[Entry]) -> None:
        """Shards the parameters' memory and makes them known to the library."""
        elements = sum(entry.numel for entry in entries if entry.param.requires_grad)
        self.context.init(self.comm,
                          {"symmetric_memory": int(self.shared), "check_finite": int(self.options.check_finite)},
                          min(self.options.bucket_size, max(elements, 1)))
        calls.bind(self.graph_id, self.context)
        weakref.finalize(self, calls.unbind, self.graph_id)
        self.entries = list(entries)
        self.params = [entry.param for entry in self.entries]
        with torch.no_grad():
            for entry in self.entries:
                self._place(entry)
        for entry in self.entries:
            self._register(entry)
        self._register_graph()

    def _place(self, entry: Entry) -> None:
        param = entry.param
        if self.stage == 0:
            if not param.is_contiguous():
                param.data = param.data.contiguous()
            return
        begin = min(self.comm.rank * entry.length, entry.numel)
        end = min(begin + entry.length, entry.numel)
        shard = calls.alloc(self.context, entry.length, param.dtype, self.shared)
        shard[: end - begin].copy_(param.data.reshape(-1)[begin:end])
        param.data = shard

    def _register(self, entry: Entry) -> None:
        param = entry.param
        entry.grad = torch.zeros_like(param) if param.requires_grad else None
        if entry.grad is not None:
            entry.grad.dc_grad_of = weakref.ref(entry)  # type: ignore[attr-defined]
        entry.data = torch.Tensor.detach(param)
        if self.stage == 0:
            flat = None if entry.grad is None else entry.grad.view(-1)
            self.context.register_param(entry.id, entry.shape, entry.data, flat, 0)
        else:
            self.context.register_z3_param(entry.id, entry.shape, entry.data, entry.grad, self.stage < 3,
                                           self.options.reduce_dtype)
        self.context.set_param_name(entry.id, entry.names[0])
        entry.pointer, entry.version = param.data_ptr(), param._version

    def _register_graph(self) -> None:
        register = self.context.register_graph_z0 if self.stage == 0 else self.context.register_graph_z3
        register(self.graph_id, [entry.id for entry in self.entries])

    def _reregister(self, entries: Sequence[Entry]) -> None:
        """Unfrozen parameters need a gradient buffer, and with it another split of the graph."""
        self.context.unregister_graph(self.graph_id)
        self.context.clear_all_gathered_params()
        for entry in entries:
            self.context.unregister_param(entry.id)
            self._register(entry)
        self._register_graph()
        self.stale = True

    # Phases

    def enter(self, key: Any) -> None:
        """A forward begins, from outside: key is what was called."""
        if _graph_task() != -1:  # activation checkpointing runs it again, inside the backward
            self.enter_backward()
            return
        if _functorch() and torch.is_grad_enabled():
            raise RuntimeError("torch.func's transforms cannot go through a sharded model's weights: transform "
                               "an unsharded copy (full_state_dict()); under torch.no_grad(), jvp and vmap over inputs "
                               "work")
        self.settle()
        self.live.clear()
        if self.options.prefetch and (self.stage == 3 or (self.stage and self.stale)):
            self._begin_order(key)

    def settle(self) -> None:
        """Weights are about to be read: what is left of an earlier step goes, and what was written counts."""
        if self.backward:
            self.abandon()
        if self.block is not None:
            self.block.keep()
        self._look_for_edits()

    def _begin_order(self, key: Any) -> None:
        order = self.orders.get(key)
        if order is None:
            prefetch, drop = weakref.WeakMethod(self._prefetch), weakref.WeakMethod(self._drop)
            order = self.orders[key] = Order(self.options.prefetch, self.options.group_size,
                                             [entry.numel for entry in self.entries],
                                             lambda ids: prefetch()(ids), lambda id: drop()(id))  # type: ignore[misc]
        self.order = order
        order.begin()

    def _prefetch(self, ids: List[int]) -> None:
        entries = [self.entries[id] for id in ids]
        dtypes = None if self.options.param_dtype is None else [entry.dtype or entry.data.dtype for entry in entries]
        calls.prefetch(self.graph_id, [entry.data for entry in entries], ids, dtypes)

    def _drop(self, id: int) -> None:
        self.context.invalidate_gathered_param(id)

    def enter_compiled(self) -> None:
        """The same from inside a compiled graph, which brings its own prefetches."""
        if self.depth == 0 and _graph_task() == -1:
            self.settle()
            self.stale = False

    def leave(self) -> None:
        """The forward that enter() announced ends, or raises."""
        if self.backward:
            return
        self.stale = False
        self._end_order()

    def enter_backward(self) -> None:
        """The running backward uses the model: to be called before anything it gathers or reduces."""
        if self.backward or _graph_task() == -1:
            return
        self._end_order()
        self.backward = True
        if self.options.prefetch and self.stage == 3:
            self._begin_order("backward")
        _queue_callback(self._end_backward)

    def begin_reductions(self) -> None:
        """The running backward's first gradient. Gradients that are there already are added to."""
        if self.reducing:
            return
        self.reducing = True
        self.context.start_backward(True)
        kept = []
        for entry, param in zip(self.entries, self.params):
            grad = param.grad
            if grad is None:
                continue
            if grad is not entry.grad:  # the user's own tensor
                if entry.grad is None:
                    continue
                entry.grad.copy_(grad)
                param.grad = entry.grad
            kept.append(entry.id)
        if kept:
            self.context.accumulate_grads(kept)

    def _end_backward(self) -> None:
        self._end_order()
        self.backward = False
        if self.synchronised and self.unreduced:
            waiting, self.unreduced = self.unreduced, []
            for entry in waiting:  # of no_sync(), and without a gradient in this backward
                if entry.unreduced is not None:
                    grad, entry.unreduced = entry.unreduced, None
                    entry.reduce(grad)
        if not self.reducing:
            return
        self.reducing = False
        touched, self.touched = self.touched, {}
        self.context.end_backward(self.graph_id)
        hooked = False
        for entry in touched.values():
            direct = entry.param.grad
            if direct is not entry.grad:
                entry.param.grad = entry.grad
                if direct is not None:  # autograd's own, of a use of the parameter outside of the model
                    entry.grad.add_(direct)
            hooked = hooked or bool(entry.hooks)
        if hooked:
            self._call_hooks(touched.values())

    def _call_hooks(self, entries: Iterable[Entry]) -> None:
        with torch.no_grad():
            for entry in entries:
                for hook in list((entry.hooks or {}).values()):
                    hook(entry.param)

    def abandon(self) -> None:
        """A backward raised, or was never meant to reach the parameters (autograd.grad): forget it."""
        self._end_order()
        self.backward = False
        self.reducing = False
        self.touched = {}
        self.context.step_abort()
        self.stale = True

    def _end_order(self) -> None:
        if self.order is not None:
            self.order.end()
            self.order = None

    # The weights change

    def updated(self, entries: Optional[Sequence[Entry]] = None) -> None:
        """Weights changed, on every rank: these, or all."""
        if self.stage == 0:
            return
        self.replayed = self.replayed or devices.captures(self.device)
        for entry in self.entries if entries is None else entries:
            entry.version = entry.param._version
        self.context.params_updated(None if entries is None else [entry.id for entry in entries])
        self.stale = True

    def _look_for_edits(self) -> None:
        """Looks for changes without an announcement: shards written by hand or by load_state_dict, moved, frozen,
        unfrozen; and launches of captured steps, which leave no trace on the host."""
        if self.replayed and not devices.captures(self.device):
            self.updated()
        edited, unfrozen = [], []
        for entry, param in zip(self.entries, self.params):
            if param._version != entry.version:
                edited.append(entry)
            if entry.grad is None and param.requires_grad:
                unfrozen.append(entry)
            if param.data_ptr() != entry.pointer:
                raise RuntimeError(f"{entry.names[0]}: its memory was replaced after shard(); write into it instead "
                                   "(copy_), or move and cast the model before shard()")
        if edited:
            self.updated(edited)
        if unfrozen:
            self._reregister(unfrozen)
