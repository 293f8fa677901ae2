"""Gradients of compiled graphs, which are reduced whenever the graph's backward runs, even if the program does not need
them. Eager graphs have an autograd leaf for each gradient, so they compute only those that are needed."""

from __future__ import annotations

from typing import Dict, Optional, Set

from torch import Tensor

from .param_group import ParamGroup
from .part import plain_tensor
from .sharded_param import ShardedParam


class CompiledGrads:
    """A model's compiled gradients during a backward."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        self.inputs: Optional[Set[ShardedParam]] = None  # the parameters in backward(inputs=...)
        self.kept: Dict[int, Optional[Tensor]] = {}  # by id: `.grad` before a graph reduces an unneeded gradient
        self.dropped = False

    def wants(self, entry: ShardedParam) -> bool:
        return entry.requires_grad and (self.inputs is None or entry in self.inputs)

    def keep(self, entry: ShardedParam) -> None:
        """Saves `.grad` before a graph reduces a gradient that is not needed. restore() puts it back."""
        if entry.id not in self.kept:
            grad = None if entry.param.grad is None else entry.grad
            self.kept[entry.id] = None if grad is None else plain_tensor(grad).clone()

    def take_kept(self) -> Dict[int, Optional[Tensor]]:
        kept, self.kept = self.kept, {}
        return kept

    def restore(self, kept: Dict[int, Optional[Tensor]]) -> None:
        for id, grad in kept.items():
            if grad is not None:
                plain_tensor(self._group.entries[id].grad).copy_(grad)  # type: ignore[arg-type]

    def drop(self) -> None:
        """Drops all gradients, since in autograd.grad() none may reach `.grad`."""
        self.dropped = True
        self._group.context.enable_profiling(True)  # then reductions do nothing, but gathers still work

    def stop_dropping(self) -> None:
        if self.dropped:
            self.dropped = False
            self._group.context.enable_profiling(False)
