"""The weights that a forward reads and the bytes that it keeps, for the planner. Reads are those for which
libdc.torch.shard gathers: in a module's own forward the first of each weight, and elsewhere, as in a parent's, each."""

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
    """Modules whose parameters are gathered together: the members of lists, and what else has parameters of its own."""
    units: Dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{unit}.") for unit in units)
        parent = model.get_submodule(name.rpartition(".")[0]) if name else None
        member = isinstance(parent, (nn.ModuleList, nn.Sequential))
        if not inside and (member or any(True for _ in module.parameters(recurse=False))):
            units[name] = module
    return units


def own_parameters(name: str, unit: nn.Module) -> List[nn.Parameter]:
    """Of a unit. The whole model is one for its own parameters alone, since others have units of theirs."""
    return list(unit.parameters(recurse=bool(name)))


@contextlib.contextmanager
def _checkpoints_told(trace: "Trace") -> Iterator[None]:
    """Lets torch.utils.checkpoint call functions as they are, and tell of it. Its own hooks would hide what they save.
    Modules have its function by name, so what that calls is replaced. Other threads go on as before."""
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
    """A part of the forward, with weights that are gathered together, each once."""

    def __init__(self, name: str, input_bytes: int, flops_before: int) -> None:
        self.name, self.input_bytes, self.flops_before = name, input_bytes, flops_before
        self.flops = self.kept_bytes = 0
        self.reentrant = False  # with use_reentrant=True
        self.recomputed = False  # by torch.utils.checkpoint: input_bytes are all that is kept of it
        self.params: List[nn.Parameter] = []
        self.saved: Set[int] = set()  # of those, by id, whose weights the backward reads
        self.used: Set[int] = set()  # and those that get a gradient; a read may ask for a shape or a type alone


class Trace:
    """A new segment begins where a unit does, and where a weight is read that the last one has read already. Work
    outside of units counts to the last one."""

    def __init__(self, model: nn.Module, units: Dict[str, nn.Module], total_flops: Callable[[], int]) -> None:
        self.segments: List[Segment] = []
        self._name, self._units, self._total_flops = type(model).__name__, units, total_flops
        self._modules = [module for module in model.modules() if module._parameters]
        self._first: Dict[str, Segment] = {}  # of each unit
        self._reads: Dict[int, Tuple[Segment, nn.Parameter]] = {}  # by the storage of what was read
        self._inside: Dict[nn.Module, List[Dict[str, torch.Tensor]]] = {}  # reads of forwards that run
        self._seen: Set[int] = set()
        self._checkpoints = 0  # that the forward is in
        self._reentrant = False  # the outermost of them
        self._fresh: Any = None  # a checkpoint's segment, for the first unit in it
        self._thread = threading.get_ident()
        self._alive: List[Any] = []  # a freed storage's number could come again

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A storage counts once, weights not at all: they are gathered again."""
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
        """A call of a checkpointed function: its inputs are kept, and what it saves is computed again."""
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
            # The checkpoint's, if nothing has run in it yet.
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
        copy = torch.empty_like(value).requires_grad_(value.requires_grad)  # a storage of its own
        self._reads[copy.untyped_storage()._cdata] = segment, param
        self._alive.append(copy)
        if inside:
            inside[-1][name] = copy
        return copy

    def _reading(self, module: nn.Module) -> type:
        """The module's class, with properties that note each read of a weight."""
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
        """Whether the planned forward calls."""
        return threading.get_ident() == self._thread

    def end(self, result: Any) -> None:
        """Takes the forward's result. Parameters that nothing has read are gathered with their unit's."""
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
        """Finds the reads that get a gradient, which are leaves of the result's graph."""
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
