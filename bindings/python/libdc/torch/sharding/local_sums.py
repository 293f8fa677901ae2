"""Gradients that no_sync() has summed on this rank, whole, until a backward averages them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterable, List, Tuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .sharded_param import ShardedParam


class LocalSums:
    """Those of a model. Each parameter's is its entry's `unreduced`."""

    def __init__(self) -> None:
        self.entries: List[ShardedParam] = []  # with a sum, which a backward under way may have taken
        self._taken: List[Tuple[ShardedParam, Tensor]] = []

    def add(self, entry: ShardedParam, grad: Tensor) -> None:
        if entry.unreduced is None:
            wide = grad.dtype if entry.reduce_dtype is None else torch.promote_types(grad.dtype, entry.reduce_dtype)
            entry.unreduced = grad.to(wide, copy=True, memory_format=torch.contiguous_format)
            self.entries.append(entry)
        else:
            entry.unreduced.add_(grad)

    def take(self, entry: ShardedParam) -> Tensor:
        """To be averaged, and not to be written: the backward may still raise."""
        assert entry.unreduced is not None
        grad, entry.unreduced = entry.unreduced, None
        self._taken.append((entry, grad))
        return grad

    def waiting(self) -> List[ShardedParam]:
        """Parameters whose sums no gradient has taken."""
        return [entry for entry in self.entries if entry.unreduced is not None]

    def end(self) -> None:
        """The backward is done, so what it took is averaged."""
        self._taken.clear()
        self.entries = self.waiting()

    def put_back(self) -> None:
        """The backward has raised."""
        for entry, grad in self._taken:
            entry.unreduced = grad
        self._taken.clear()

    def drop(self, dropped: Iterable[ShardedParam]) -> None:
        """Zeroes these gradients' sums."""
        entries = set(dropped)
        for entry in entries:
            entry.unreduced = None
        self._taken = [pair for pair in self._taken if pair[0] not in entries]
        self.entries = [entry for entry in self.entries if entry not in entries]
