"""Backwards for inputs only: torch.autograd.grad(), and backward(inputs=...) without a parameter. They add to no
parameter's `.grad`, so shard(..., unused="zero") must not fill in zeros or average anything."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Iterable, Iterator, List, Set

import torch

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
tasks: Set[int] = set()  # those that run, by autograd's numbers
groups: "weakref.WeakSet[Any]" = weakref.WeakSet()  # that need this; without any, nothing is recorded


@contextlib.contextmanager
def note(nodes: Iterable[Any]) -> Iterator[None]:
    """Records such a backward while the block runs it. The first of its outputs' nodes gives its number, before any
    node of a model runs."""
    begun: List[int] = []

    def begin(_: Any) -> None:
        begun.append(_graph_task())
        tasks.add(begun[-1])

    handles = [node.register_prehook(begin) for node in nodes if node is not None] if groups else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        tasks.difference_update(begun)
