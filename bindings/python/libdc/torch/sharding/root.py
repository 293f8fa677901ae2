"""The training state of a sharded model on this rank: the phase of its step. Its parameters are in param_group.py.

A step is a sequence of phases, each with its own order of gathers (see order/):

    forward    from the first forward that is entered to its end
    backward   from the first saved weight or gradient that autograd asks for to the end of that backward

A backward ends in a callback, which autograd's engine runs when the whole graph is done. It flushes the reductions and
makes each gradient visible as `.grad`.

Modules, autograd graphs and compiled graphs' anchors keep a root alive; parameters do not, and the root refers to none
of them. So the root and its ranks' resources are freed with the last of them, without the garbage collector. Objects
that the root holds must refer back to it only by weak references."""

from __future__ import annotations

import enum
import functools
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import libdc
import torch
from torch import Tensor, nn

from ..ops import eager_calls
from . import input_backwards
from .compiled_grads import CompiledGrads
from .local_sums import LocalSums
from .order.agreed_order import AgreedOrder, Fills, WholeModelOrder
from .order.exec_order import ExecOrder, split_into_groups
from .param_group import Options, ParamGroup
from .policy import Policies
from .sharded_param import ShardedParam

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
# An operator call costs more than copying a small gradient into its bucket. So on a CPU gradients are queued up to this
# many elements, and reduced together. On a card each is reduced at once, while the stream that made it is current.
_REDUCED_TOGETHER = 1 << 14
_roots: "weakref.WeakValueDictionary[int, Root]" = weakref.WeakValueDictionary()


def is_sharded_graph(graph_id: int) -> bool:
    """Whether the graph number belongs to a sharded model."""
    return graph_id in _roots


def root_by_graph(graph_id: int) -> "Root":
    """The root that a compiled graph's operators name by number."""
    root = _roots.get(graph_id)
    if root is None:
        raise RuntimeError(f"graph {graph_id} belongs to no sharded model of this process, or the model is gone")
    return root


def root_that_ignores(param: Tensor) -> Optional["Root"]:
    """The newest root whose shard() left out the parameter by policy; None if there is none."""
    for root in (reference() for reference in reversed(_roots.valuerefs())):
        ignored = None if root is None else root.ignored.get(id(param))
        if ignored is not None and ignored() is param:
            return root
    return None


class TrainingState(enum.Enum):
    """The phase of a step."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()  # weights are gathered, but no gradient has come yet
    REDUCING = enum.auto()  # the backward has begun to reduce


_REDUCING = TrainingState.REDUCING  # faster than the class's attribute, and read for each gradient


class Root:
    """The state of one call of shard(). Only one thread at a time may use it, as the model itself."""

    def __init__(self, comm: libdc.Comm, options: Options, device: torch.device, model: nn.Module,
                 policies: Policies) -> None:
        self.model = weakref.ref(model)
        self.group = ParamGroup(comm, options, device)
        self.policies = policies
        _roots[self.group.graph_id] = self
        self.state = TrainingState.IDLE
        # Parameters and modules that were added after shard(), and parameters that it left out by policy.
        self.new_params: Dict[str, weakref.ref[nn.Parameter]] = {}
        self.new_modules: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
        self.ignored: Dict[int, weakref.ref[nn.Parameter]] = {}  # by id(), which another object may later have
        self.graph_task = -1  # autograd's number of the running backward
        self.end_of_backward: Optional["weakref.ref[Callable[[], None]]"] = None  # its callback; dead after an error
        self.depth = 0  # number of nested running forwards of the model's modules
        self.reduce_grads = True  # False inside no_sync()
        self.block: Any = None  # the open gathered() block; see gathered_weights.py
        self.order: Any = None  # order of the running phase's gathers, see order/; None if they need none
        self.prefetched: Set[int] = set()  # ids given to prefetch()
        self.reductions: Optional[AgreedOrder] = None  # order of this backward's reductions, for unused="zero"
        self._orders: Dict[Any, Any] = {}
        self.with_grad: Dict[int, ShardedParam] = {}  # got a gradient in this backward
        self.direct: Dict[int, Tensor] = {}  # autograd's own parts of gradients that libdc is summing
        self.hooked: Dict[int, ShardedParam] = {}  # parameters with such a part, whose hooks run at the end
        self.local_sums = LocalSums()
        self.compiled_grads = CompiledGrads(self.group)
        self.queued: Tuple[List[Tensor], List[int]] = [], []  # gradients to be reduced, and their ids
        self.queued_elements = 0
        self.queue_limit = _REDUCED_TOGETHER if device.type == "cpu" else 0
        # See eager.py. Storages and weights that the innermost forward has read:
        self.lent: List[Tuple[int, Tensor, ShardedParam]] = []
        self.read_elsewhere: List[Tuple[ShardedParam, Tensor]] = []  # by other modules' forwards, and not in `lent`
        self.read_by_storage: Dict[int, Any] = {}  # _ReadWeights of all running forwards
        self.saved_tensor_hooks: Optional[Tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = None  # at stage 3

    @property
    def in_backward(self) -> bool:
        return self.state in (TrainingState.BACKWARD, TrainingState.REDUCING)

    @property
    def is_reducing(self) -> bool:
        """Whether a running backward, possibly an inner one, reduces gradients. One that raised does not count."""
        end = self.end_of_backward
        return self.state is _REDUCING and end is not None and end() is not None

    # Forward

    def pre_forward(self, key: Any) -> None:
        """Called at the beginning of an outermost forward. key: its module."""
        if _graph_task() != -1:  # activation checkpointing recomputes it inside the backward
            self.pre_backward()
            return
        if _functorch() and torch.is_grad_enabled():
            raise RuntimeError("torch.func's transforms cannot go through a sharded model's weights: transform "
                               "an unsharded copy (full_state_dict()); under torch.no_grad(), jvp and vmap over inputs "
                               "work")
        self.prepare_weights()
        self.state = TrainingState.FORWARD
        group = self.group
        if (group.options.prefetch or group.fills_unused) and (group.stage == 3 or (group.stage and group.stale)):
            self.order = self._begin_order(key)

    def pre_forward_compiled(self) -> None:
        """pre_forward() from inside a compiled graph, which has its own prefetches."""
        self.refuse_compiled()
        if self.depth == 0 and _graph_task() == -1:
            self.prepare_weights()
            self.group.stale = False

    def prepare_to_join(self) -> None:
        """Called before new parameters join. Drops the recorded orders of gathers."""
        if self.in_backward:
            self.reset_after_error()
        self.group.detect_param_changes()
        self.new_params.clear()
        self._orders.clear()

    def _refuse_new_params(self) -> None:
        """Raises if the model has a parameter that was added after shard(). It searches the model, since to_empty()
        replaces parameters without calling a hook."""
        modules = () if (model := self.model()) is None else model.named_modules()
        unknown = {id(param): f"{prefix}.{name}".lstrip(".") for prefix, module in modules
                   for name, param in module._parameters.items() if name not in module.__dict__.get("_dc_ids", ())
                   and isinstance(param, nn.Parameter) and self.ignored.get(id(param), lambda: None)() is not param}
        noted = {id(reference()): name for name, reference in self.new_params.items()}
        for number in filter(unknown.__contains__, (*noted, *unknown)):
            raise RuntimeError(f"{noted.get(number, unknown[number])} has come after shard(), so no rank averages its "
                               "gradient yet: call shard() of the model again on every rank, with the same arguments")
        self.new_params.clear()

    def refuse_compiled(self) -> None:
        """Raises if the options do not allow compiled graphs, which have their own order of gathers."""
        if self.group.fills_unused:
            raise RuntimeError("shard: unused = 'zero' is for models without torch.compile")

    def post_forward(self) -> None:
        """Called when the forward of pre_forward() ends or has raised."""
        self.lent.clear()
        self.read_elsewhere.clear()
        self.read_by_storage.clear()
        if self.in_backward:
            return
        self.state = TrainingState.IDLE
        self.group.stale = False
        self._end_order()

    def prepare_weights(self) -> None:
        """Called before weights are read. Resets a backward that did not complete, and applies writes to weights."""
        if self.in_backward:
            self.reset_after_error()
        if self.new_params:
            self._refuse_new_params()
        self.write_back()
        self.group.detect_param_changes()

    def write_back(self) -> None:
        """Applies writes made in an open gathered(). Collective."""
        if self.block is not None:
            self.block.write_back()

    def abort_forward(self) -> None:
        """Called when the forward of pre_forward() raises: this rank takes no further part in the forward's
        collectives."""
        if self.order is not None and not self.in_backward:
            self.order.abort()
            self.order = None

    def _begin_order(self, key: Any) -> Any:
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = self._make_order()
        order.begin()
        return order

    def _make_order(self) -> Any:
        group, reference = weakref.ref(self.group), weakref.ref(self)
        options, fills, sizes = self.group.options, self.group.fills_unused, [each.size for each in self.group.entries]

        def gather(ids: Sequence[int]) -> None:
            group().prefetch(ids)  # type: ignore[union-attr]

        def drop(id: int) -> None:
            group().drop_prefetched(id)  # type: ignore[union-attr]

        def reduce(id: int, grad: Optional[Tensor]) -> bool:
            root: Root = reference()  # type: ignore[assignment]
            entry = root.group.entries[id]
            return entry.reduce_nothing(root) if grad is None else entry.reduce_now(grad, root) is None

        def take(ids: Sequence[int]) -> None:
            if not fills:  # with unused="zero" the order may drop gathered weights
                group().take(ids, reference().in_backward)  # type: ignore[union-attr]

        if fills and 0 < self.group.stage < 3 and not self.in_backward:
            return WholeModelOrder([list(range(*ids)) for ids in split_into_groups(sizes, options.group_size)], gather)
        gathers = ExecOrder(options.prefetch, options.group_size if options.prefetch else 1, sizes, gather, drop, take)
        if not fills:
            return gathers
        return AgreedOrder(gathers, self.group.all_ranks, len(sizes),
                           Fills(gather, drop, reduce, lambda text: group().all_gather_bytes(text, all_ranks=True)))

    def _end_order(self) -> None:
        order, reductions = self.order, self.reductions
        for id in sorted(self.prefetched):
            self.group.drop_prefetched(id)
        self.prefetched.clear()
        if order is not None:
            order.end()
            self.order = None
        if reductions is not None:
            if reductions is not order:
                reductions.end()
            self.reductions = None
            self.with_grad = {id: self.group.entries[id] for id in sorted(reductions.reduced)}

    def _abort_order(self) -> None:
        for order in {id(order): order for order in (self.order, self.reductions) if order is not None}.values():
            order.abort()
        self.order = self.reductions = None

    # Backward

    def pre_backward(self) -> None:
        """Called when the running backward first uses the model, before it gathers or reduces anything."""
        task = _graph_task()
        if task in (-1, self.graph_task):
            return
        if self.in_backward:
            assert self.end_of_backward is not None
            if self.end_of_backward() is not None:
                return  # the inner backward of a checkpointed function
            self.reset_after_error()
        self.graph_task = task
        self._end_order()
        self.state = TrainingState.BACKWARD
        if self.group.fills_unused:
            reduces = self.reduce_grads and task not in input_backwards.tasks
            if reduces or self.group.stage == 3:
                order = self._begin_order(("backward", reduces))
                self.order = order if self.group.stage == 3 else None
                self.reductions = order if reduces else None
        elif self.group.options.prefetch and self.group.stage == 3:
            self.order = self._begin_order("backward")
        end = functools.partial(self._post_backward)
        self.end_of_backward = weakref.ref(end)
        _queue_callback(end)

    def begin_reductions(self) -> None:
        """Called for the running backward's first gradient. Gradients are added to those that exist already."""
        if self.state is TrainingState.REDUCING:
            return
        self.state = TrainingState.REDUCING
        self.group.context.start_backward(True)
        with torch._C.DisableTorchFunctionSubclass():
            accumulated = [entry.id for entry, param in zip(self.group.entries, self.group.params)
                           if entry.take_up_grad(param)]
        if accumulated:
            self.group.context.accumulate_grads(accumulated)

    def begin_reduction(self, entry: ShardedParam) -> None:
        """Called before a compiled graph reduces the parameter's gradient."""
        if self.compiled_grads.wants(entry):
            self.with_grad[entry.id] = entry
        else:
            self.compiled_grads.keep(entry)

    def queue_reduction(self, entry: ShardedParam, grad: Tensor) -> None:
        """Queues a whole gradient of the running backward for reduction."""
        if self.state is not _REDUCING:
            self.begin_reductions()
        if entry.reduce_dtype is not None and self.group.stage == 0:
            grad = grad.to(entry.reduce_dtype)  # at other stages the buckets have that type
        grads, ids = self.queued
        grads.append(grad)
        ids.append(entry.id)
        self.queued_elements += entry.numel
        if self.queued_elements >= self.queue_limit:
            self.flush_reductions()

    def flush_reductions(self) -> None:
        (grads, ids), self.queued, self.queued_elements = self.queued, ([], []), 0
        if ids:
            dropped = self.compiled_grads.dropped
            self.compiled_grads.stop_dropping()
            eager_calls.reduce_grads(grads, self.group.graph_id, ids)
            if dropped:
                self.compiled_grads.drop()

    def _post_backward(self) -> None:
        adds = self.state is _REDUCING or self.hooked or self.reductions  # else it may be an autograd.grad() by inputs
        sums, kept = self.local_sums.waiting() if adds and self.reduce_grads else [], self.compiled_grads.kept
        self._finish_backward([entry for entry in sums if entry.id not in kept])
        self._finish_backward([entry for entry in sums if entry.id in kept])  # their buffers had unneeded gradients

    def _finish_backward(self, sums: Iterable[ShardedParam]) -> None:
        for entry in sums:
            if entry.unreduced is not None:  # with unused="zero" another reduction may have taken it
                entry.reduce(self.local_sums.take(entry), self)
        self.flush_reductions()
        self._end_order()
        reducing = self.state is TrainingState.REDUCING
        self.state, self.graph_task, hooked, self.hooked = TrainingState.IDLE, -1, self.hooked, {}
        self.compiled_grads.stop_dropping()
        if not reducing:
            return self._call_hooks(hooked.values())
        entries, self.with_grad = self.with_grad, {}
        own, self.direct = self.direct, {}
        kept = self.compiled_grads.take_kept()
        self.group.end_backward()
        self.local_sums.end()
        self.compiled_grads.restore(kept)
        with torch._C.DisableTorchFunctionSubclass():
            for entry in entries.values():
                param = entry.param_ref()
                direct = param.grad
                if direct is not entry.grad:
                    param.grad = entry.grad
                    if direct is not None:  # autograd's gradient of a use outside of the model
                        entry.grad.add_(direct)
            for id, grad in own.items():
                self.group.entries[id].grad.add_(grad)  # type: ignore[union-attr]
        self._call_hooks({**{id: entry for id, entry in entries.items() if entry.hooks}, **hooked}.values())

    def _call_hooks(self, entries: Iterable[ShardedParam]) -> None:
        with torch.no_grad():
            for entry in entries:
                for hook in list((entry.hooks or {}).values()):
                    hook(entry.param)

    def reset_after_error(self) -> None:
        """Undoes what a backward began that raised, or that never reached the parameters (autograd.grad)."""
        self._abort_order()
        self.state, self.graph_task = TrainingState.IDLE, -1
        self.with_grad, self.direct, self.hooked, self.queued, self.queued_elements = {}, {}, {}, ([], []), 0
        kept = self.compiled_grads.take_kept()
        self.compiled_grads.stop_dropping()
        self.group.context.step_abort()
        self.local_sums.put_back()
        self.compiled_grads.restore(kept)
        self.group.stale = True
