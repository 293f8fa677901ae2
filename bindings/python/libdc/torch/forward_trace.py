"""The weights that a forward reads and the bytes that it keeps, for the planner. Reads are those for which
libdc.torch.shard gathers: in a module's own forward the first of each weight, and elsewhere, as in a parent's, each."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Set, Tuple

import torch
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


class Segment:
    """A part of the forward, with weights that are gathered together, each once."""

    def __init__(self, name: str, input_bytes: int, flops_before: int) -> None:
        self.name, self.input_bytes, self.flops_before = name, input_bytes, flops_before
        self.flops = self.kept_bytes = 0
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
        self._alive: List[Any] = []  # a freed storage's number could come again

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A storage counts once, weights not at all: they are gathered again."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._reads:
            segment, param = self._reads[storage._cdata]
            segment.saved.add(id(param))
        elif storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(storage)
            self._now().kept_bytes += storage.nbytes()
        return tensor

    def _begin(self, name: str, input_bytes: int = 0) -> Segment:
        flops = self._total_flops() if self.segments else 0
        if self.segments:
            self.segments[-1].flops = flops - self.segments[-1].flops_before
        count = sum(name in (each.name, each.name.rpartition(" again")[0]) for each in self.segments)
        self.segments.append(Segment(name if count == 0 else f"{name} again {count}", input_bytes, flops))
        return self.segments[-1]

    def _now(self) -> Segment:
        return self.segments[-1] if self.segments else self._begin(self._name)

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Tuple[Any, ...]) -> None:
            size = sum(x.numel() * x.element_size() for x in inputs if isinstance(x, torch.Tensor))
            self._first.setdefault(name, self._begin(name or self._name, size))

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
            segment = self._begin(segment.name.rpartition(" again")[0] or segment.name)
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
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
                yield
        finally:
            for module, kind in classes:
                module.__class__ = kind
            for handle in handles:
                handle.remove()

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
