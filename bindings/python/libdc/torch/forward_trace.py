"""Records, for the planner, the weights that a forward reads and the bytes that it keeps. It counts the reads for which
libdc.torch.shard gathers: in a module's own forward the first of each weight, elsewhere (as in a parent's) each one."""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from typing import Any, Callable, Dict, Iterator, List, Set, Tuple

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_leaves


def units_of(model: nn.Module) -> Dict[str, nn.Module]:
    """Modules whose parameters are gathered together: the members of lists, and other modules with their own
    parameters."""
    units: Dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{unit}.") for unit in units)
        parent = model.get_submodule(name.rpartition(".")[0]) if name else None
        member = isinstance(parent, (nn.ModuleList, nn.Sequential))
        if not inside and (member or any(True for _ in module.parameters(recurse=False))):
            units[name] = module
    return units


def own_parameters(name: str, unit: nn.Module) -> List[nn.Parameter]:
    """A unit's parameters. The whole model, if it is a unit, counts only its direct parameters, since others have their
    own units."""
    return list(unit.parameters(recurse=bool(name)))


@contextlib.contextmanager
def _checkpoints_told(trace: "Trace") -> Iterator[None]:
    """Makes torch.utils.checkpoint call functions directly and report the call to the trace, since its own hooks would
    hide saved tensors. Modules import checkpoint() by name, so the functions that it calls are replaced. Other threads
    are not affected."""
    module = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" * hasattr(module, f"{name}_impl")  # from PyTorch 2.15 on
    with_hooks, reentrant = getattr(module, name), module.CheckpointFunction

    def generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
        if not trace.is_here():
            return with_hooks(*args, **kwargs)
        named = inspect.signature(with_hooks).bind(*args, **kwargs)
        if named.arguments.get("context_fn", module.noop_context_fn) is not module.noop_context_fn:
            warnings.warn("plan: selective checkpointing (context_fn) is planned as if all were computed again: "
                          "what it keeps is not counted as memory", stacklevel=2)
        return told((named.arguments.get("args", ()), named.arguments.get("kwargs", {})))

    def told(arguments: Any) -> Iterator[None]:
        with trace.checkpoint(arguments, False):
            yield

    class Direct:
        @staticmethod
        def apply(function: Any, preserve: Any, *args: Any) -> Any:
            if not trace.is_here():
                return reentrant.apply(function, preserve, *args)
            with trace.checkpoint(args, True):
                return function(*args)

    module.CheckpointFunction = Direct
    setattr(module, name, generator)
    try:
        yield
    finally:
        module.CheckpointFunction = reentrant
        setattr(module, name, with_hooks)


class Segment:
    """A part of the forward, with the weights that are gathered together for it, each once."""

    def __init__(self, name: str, input_bytes: int, flops_before: int) -> None:
        self.name, self.input_bytes, self.flops_before = name, input_bytes, flops_before
        self.flops = self.kept_bytes = 0
        self.reentrant = False  # with use_reentrant=True
        self.recomputed = False  # by torch.utils.checkpoint: only input_bytes are kept
        self.params: List[nn.Parameter] = []
        self.saved: Set[int] = set()  # ids of the params whose weights the backward reads
        self.used: Set[int] = set()  # ids of those that get a gradient; others were read for a shape or type


class Trace:
    """Splits a forward into segments. A new one begins with each unit, and where a weight is read that the current
    segment has read already. Work outside of units counts toward the current segment."""

    def __init__(self, model: nn.Module, units: Dict[str, nn.Module], total_flops: Callable[[], int]) -> None:
        self.segments: List[Segment] = []
        self._name, self._units, self._total_flops = type(model).__name__, units, total_flops
        self._modules = [module for module in model.modules() if module._parameters]
        self._first: Dict[str, Segment] = {}  # the first segment of each unit
        self._reads: Dict[int, Tuple[Segment, nn.Parameter]] = {}  # by the storage of the weight that was read
        self._inside: Dict[nn.Module, List[Dict[str, torch.Tensor]]] = {}  # reads in running forwards
        self._seen: Set[int] = set()
        self._checkpoints = 0  # depth of nested checkpoints
        self._reentrant = False  # whether the outermost one is reentrant
        self._fresh: Any = None  # a checkpoint's segment, for the first unit in it
        self._thread = threading.get_ident()
        self._alive: List[Any] = []  # a new storage could get a freed one's address

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts the bytes of a saved tensor. Each storage counts once. Weights do not count, since they are gathered
        again."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._reads:
            segment, param = self._reads[storage._cdata]
            segment.saved.add(id(param))
        elif storage._cdata not in self._seen:
            self._keep(storage, stays=self._checkpoints == 0)
        return tensor

    def _keep(self, storage: Any, stays: bool) -> None:
        segment = self._now()
        self._seen.add(storage._cdata)
        self._alive.append(storage)
        segment.kept_bytes += storage.nbytes()
        if segment.recomputed and stays:
            segment.input_bytes += storage.nbytes()

    @contextlib.contextmanager
    def checkpoint(self, arguments: Any, reentrant: bool) -> Iterator[None]:
        """A call of a checkpointed function: its inputs are kept, and the tensors that it saves are recomputed."""
        if self._checkpoints == 0:
            self._fresh = self._begin(self._base_name())
            self._fresh.recomputed = True
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
            for storage in (tensor.untyped_storage() for tensor in tensors):
                if storage._cdata not in self._seen and storage._cdata not in self._reads:
                    self._keep(storage, stays=True)
            self._reentrant = reentrant
            self._fresh.reentrant = reentrant
        self._checkpoints += 1
        try:
            yield
        finally:
            self._checkpoints -= 1

    def _base_name(self) -> str:
        return self.segments[-1].name.rpartition(" again")[0] or self.segments[-1].name if self.segments else self._name

    def _begin(self, name: str, input_bytes: int = 0) -> Segment:
        flops = self._total_flops() if self.segments else 0
        if self.segments:
            self.segments[-1].flops = flops - self.segments[-1].flops_before
        self.segments.append(Segment(self._title(name), input_bytes, flops))
        if self._checkpoints > 0:
            self.segments[-1].input_bytes, self.segments[-1].recomputed = 0, True
            self.segments[-1].reentrant = self._reentrant
        return self.segments[-1]

    def _title(self, name: str) -> str:
        count = sum(name in (each.name, each.name.rpartition(" again")[0]) for each in self.segments)
        return name if count == 0 else f"{name} again {count}"

    def _now(self) -> Segment:
        return self.segments[-1] if self.segments else self._begin(self._name)

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Tuple[Any, ...]) -> None:
            size = sum(x.numel() * x.element_size() for x in inputs if isinstance(x, torch.Tensor))
            segment, self._fresh = self._fresh, None
            # Uses the checkpoint's segment, if nothing has run in it yet.
            if (segment is not None and segment is self.segments[-1] and self._checkpoints > 0 and not segment.params
                    and self._total_flops() == segment.flops_before):
                segment.name = self._title(name or self._name)
            else:
                segment = self._begin(name or self._name, size)
            self._first.setdefault(name, segment)

        return hook

    def _read(self, module: nn.Module, name: str, param: nn.Parameter) -> Any:
        value = module._parameters[name]
        if value is None or value.device.type != "meta":
            return value
        inside = self._inside.get(module)
        if inside and name in inside[-1]:
            return inside[-1][name]
        segment = self._now()
        if any(param is each for each in segment.params):
            segment = self._begin(self._base_name())
        segment.params.append(param)
        copy = torch.empty_like(value).requires_grad_(value.requires_grad)  # has its own storage
        self._reads[copy.untyped_storage()._cdata] = segment, param
        self._alive.append(copy)
        if inside:
            inside[-1][name] = copy
        return copy

    def _reading(self, module: nn.Module) -> type:
        """A subclass of the module's class, with properties that record each read of a weight."""
        def read(name: str, param: nn.Parameter) -> property:
            return property(lambda self: self_trace._read(self, name, param))

        self_trace = self
        body: Dict[str, Any] = {name: read(name, p) for name, p in module._parameters.items() if p is not None}
        if isinstance(module, nn.RNNBase):
            names = module._flat_weights_names
            body["_flat_weights"] = property(lambda self: [getattr(self, name) for name in names],
                                             lambda self, value: None)
        kind = type(module)
        body["__module__"], body["__qualname__"], body["__doc__"] = kind.__module__, kind.__qualname__, kind.__doc__
        return type(kind.__name__, (kind,), body)

    def _handles(self) -> Iterator[Any]:
        for name, module in self._units.items():
            yield module.register_forward_pre_hook(self._enter(name))
        for module in self._modules:
            stack = self._inside.setdefault(module, [])
            yield module.register_forward_pre_hook(lambda *_, stack=stack: stack.append({}))
            yield module.register_forward_hook(lambda *_, stack=stack: (stack.pop(), None)[1], always_call=True)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        handles, classes = list(self._handles()), [(module, type(module)) for module in self._modules]
        try:
            for module, _ in classes:
                module.__class__ = self._reading(module)
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor), _checkpoints_told(self):
                yield
        finally:
            for module, kind in classes:
                module.__class__ = kind
            for handle in handles:
                handle.remove()

    def is_here(self) -> bool:
        """Whether the calling thread runs the planned forward."""
        return threading.get_ident() == self._thread

    def end(self, result: Any) -> None:
        """Ends the trace with the forward's result. Parameters that were never read are gathered with their unit."""
        self._follow(result)
        self._now().flops = self._total_flops() - self._now().flops_before
        found = {id(param) for segment in self.segments for param in segment.params}
        for name, unit in self._units.items():
            left = [param for param in own_parameters(name, unit) if id(param) not in found]
            found.update(map(id, left))
            if left:
                segment = self._first.get(name) or self._begin(name or self._name)
                segment.params += left
        self.segments = [each for each in self.segments if each.params or each.kept_bytes or each.flops]

    def _follow(self, result: Any) -> None:
        """Finds the reads that get a gradient: they are leaves of the result's graph."""
        nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        seen: Set[Any] = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            variable = getattr(node, "variable", None)
            found = None if variable is None else self._reads.get(variable.untyped_storage()._cdata)
            if found is not None:
                found[0].used.add(id(found[1]))
