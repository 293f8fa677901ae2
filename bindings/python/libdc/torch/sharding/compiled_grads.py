"""Gradients of compiled graphs, which reduce whenever their backward runs, whether a program wants them or not. Eager
mode's graphs have a leaf of autograd for each gradient, and so make those that are wanted alone."""

from __future__ import annotations

from typing import Dict, Optional, Set

from torch import Tensor

from .param_group import ParamGroup
from .part import plain_tensor
from .sharded_param import ShardedParam


class CompiledGrads:
    """Of one model, in a backward."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        self.inputs: Optional[Set[ShardedParam]] = None  # the parameters in backward(inputs=...)
        self.kept: Dict[int, Optional[Tensor]] = {}  # `.grad` before a graph reduces what is not wanted
        self.dropped = False

    def wants(self, entry: ShardedParam) -> bool:
        return entry.requires_grad and (self.inputs is None or entry in self.inputs)

    def keep(self, entry: ShardedParam) -> None:
        """A graph will reduce a gradient that is not wanted: restore() gives `.grad` its value back."""
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
        """In autograd.grad() none of them may reach `.grad`."""
        self.dropped = True
        self._group.context.enable_profiling(True)  # in which reductions do nothing, and gathers are real

    def stop_dropping(self) -> None:
        if self.dropped:
            self.dropped = False
            self._group.context.enable_profiling(False)
