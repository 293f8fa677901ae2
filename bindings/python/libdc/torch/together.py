"""Work that all ranks do, and that ends alike on all of them."""

from __future__ import annotations

from typing import Callable, Optional, TypeVar

from . import state
from .root import Root

T = TypeVar("T")


def run_on_all_ranks(root: Root, work: Callable[[], T]) -> T:
    """Work's result, if it ended well on every rank; else all raise, the others with the first one's text."""
    failure: Optional[BaseException] = None
    try:
        result = work()
    except Exception as error:
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    for rank, said in enumerate(state.all_gather_bytes(root, text.encode("ascii", "backslashreplace"))):
        if said and (failure is None):
            raise RuntimeError(f"rank {rank}: {said.decode()}")
    if failure is not None:
        raise failure
    return result
