"""Whole gradients that no_sync() has summed on this rank, until a backward averages them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

from .part import plain_tensor

if TYPE_CHECKING:
    from .sharded_param import ShardedParam


class LocalSums:
    """A model's local sums. A parameter's sum is its entry's `unreduced`."""

    def __init__(self) -> None:
        self.entries: Dict[ShardedParam, None] = {}  # those with a sum, even if the running backward has taken it
        self._taken: Dict[ShardedParam, Tuple[Tensor, Optional[Tensor]]] = {}  # taken sums, and `.grad` before that

    def add(self, entry: ShardedParam, grad: Tensor) -> None:
        if entry.unreduced is None:
            wide = grad.dtype if entry.reduce_dtype is None else torch.promote_types(grad.dtype, entry.reduce_dtype)
            entry.unreduced = grad.to(wide, copy=True, memory_format=torch.contiguous_format)
            self.entries[entry] = None
        else:
            entry.unreduced.add_(grad)

    def take(self, entry: ShardedParam) -> Tensor:
        """Takes a sum, to be averaged. It must not be written, since put_back() needs it if the backward raises."""
        assert entry.unreduced is not None
        sum, entry.unreduced = entry.unreduced, None
        grad = _plain_grad(entry)
        self._taken[entry] = sum, None if grad is None else grad.clone()
        return sum

    def waiting(self) -> List[ShardedParam]:
        """Parameters whose sums are not taken yet."""
        return [entry for entry in self.entries if entry.unreduced is not None]

    def end(self) -> None:
        """Forgets the taken sums, which are averaged and in `.grad` now."""
        for entry in self._taken:
            del self.entries[entry]
        self._taken.clear()

    def put_back(self) -> None:
        """Restores sums after the backward has raised. Some may have reached `.grad`, which is restored too."""
        for entry, (sum, before) in self._taken.items():
            entry.unreduced = sum
            grad = _plain_grad(entry)
            if before is not None and grad is not None:
                grad.copy_(before)
        self._taken.clear()

    def drop(self, dropped: Iterable[ShardedParam]) -> None:
        """Drops these parameters' sums."""
        for entry in dropped:
            entry.unreduced = None
            self._taken.pop(entry, None)
            self.entries.pop(entry, None)


def _plain_grad(entry: ShardedParam) -> Optional[Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        grad = entry.param.grad
    return None if grad is None else plain_tensor(grad)
