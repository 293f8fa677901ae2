"""Makes an error of one rank an error of all ranks, so that none waits for the failed rank in a collective."""

from __future__ import annotations

from typing import Callable, List, Optional, TypeVar

from torch import nn

from ..sharding.model import roots_of
from ..sharding.root import Root

T = TypeVar("T")


def run_on_all_ranks(root: Root, work: Callable[[], T], in_replica: bool = False) -> T:
    """The result of work(), if no rank raised; else every rank raises: its own error, or the first failed rank's text.

    in_replica  only the ranks of one replica call it"""
    failure: Optional[BaseException] = None
    try:
        result = work()
    except Exception as error:
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    messages = root.group.all_gather_bytes(text.encode("ascii", "backslashreplace"), all_ranks=not in_replica)
    for rank, message in enumerate(messages):
        if message and failure is None:
            raise RuntimeError(f"rank {rank}: {message.decode()}")
    if failure is not None:
        raise failure
    return result


def roots_on_same_ranks(call: str, model: nn.Module) -> List[Root]:
    """The roots of all sharded models in a module. Raises unless all have the same ranks, so that the first one's
    communicator serves all. Collective if there are several."""
    roots = roots_of(model)

    def check() -> None:
        groups = (root.group for root in roots)
        if len({(each.comm.rank, each.comm.size, each.replica, each.options.replicas) for each in groups}) > 1:
            raise ValueError(f"{call}: {type(model).__name__} has sharded models that are spread over other ranks than "
                             "one another: call it for each of them")

    if len(roots) > 1:
        run_on_all_ranks(roots[0], check)
    return roots


def on_first_replica(root: Root, save: Callable[[], None]) -> None:
    """Lets the first replica save, since all replicas have the same state. All ranks get an error."""
    failure: Optional[Exception] = None
    if root.group.replica == 0:
        try:
            save()
        except Exception as error:
            failure = error
    text = "" if failure is None else ascii(f"{type(failure).__name__}: {failure}")
    failures = [] if root.group.options.replicas == 1 else root.group.all_gather_bytes(text.encode(), all_ranks=True)
    if failure is not None:
        raise failure
    if any(failures):
        raise RuntimeError("save_checkpoint: the ranks that write failed: " + max(failures).decode())
