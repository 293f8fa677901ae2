"""An error of one rank becomes an error of all ranks, so that none waits for it in a collective."""

from __future__ import annotations

from typing import Callable, Optional, TypeVar

from ..sharding.root import Root

T = TypeVar("T")


def run_on_all_ranks(root: Root, work: Callable[[], T]) -> T:
    """The result of work(), if no rank raised; else every rank raises: its own error, or the first failed rank's text.
    """
    failure: Optional[BaseException] = None
    try:
        result = work()
    except Exception as error:
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    for rank, message in enumerate(root.group.all_gather_bytes(text.encode("ascii", "backslashreplace"))):
        if message and failure is None:
            raise RuntimeError(f"rank {rank}: {message.decode()}")
    if failure is not None:
        raise failure
    return result


def on_first_replica(root: Root, save: Callable[[], None]) -> None:
    """The replicas have the same state, so one of them writes it. All ranks learn of an error."""
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
