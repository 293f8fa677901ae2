"""Communicators whose collectives are those of a torch.distributed process group."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from typing import Any, Dict, Iterator, Sequence, Tuple

import libdc
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from .dtypes import TORCH_DTYPES


def comm_from_process_group(group: "dist.ProcessGroup") -> libdc.Comm:
    """A communicator whose collectives are the group's. On one machine, libdc's own communicator (libdc.init_comm()) is
    several times faster."""
    own = getattr(group, "comm", None)
    if isinstance(own, libdc.Comm):  # of the backend libdc; PyTorch does not know those from split_group()
        return own.dup()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("dc.init: this process is not a member of process_group")
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        raise ValueError(f"dc.init: process_group has no backend for CPU tensors ({error}); use 'gloo', or "
                         "'cpu:gloo,cuda:nccl'") from None
    collectives = _Collectives(group)
    seconds = min(collectives._timeout().total_seconds(), _MAX_SECONDS)
    return libdc.Comm.external(collectives, rank, size, timeout=seconds + _GRACE_SECONDS)


# The group's own timeout ends a wait inside its functions. A wait in libdc's NCCL communicator on top of it has only
# libdc's deadline.
_GRACE_SECONDS = 60.0
_MAX_SECONDS = 1e9


@contextlib.contextmanager
def _outside_compilation() -> Iterator[None]:
    """Turns off the modes in which PyTorch compiles on the caller's thread, where real tensors would become fake ones.
    The Python dispatcher would hold the GIL around c10d's operators, while Gloo's threads wait for the GIL."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


_RELEASE_SECONDS = 1.0


@contextlib.contextmanager
def _until_released(*tensors: torch.Tensor) -> Iterator[Tuple[torch.Tensor, ...]]:
    """Exits once no other holder of the tensors is left. Gloo's thread wakes its caller before it drops a work's
    tensors. The thread that drops the last reference to Python's memory takes the GIL. If the interpreter is already
    ending, that ends the process by SIGABRT. The wait has a bound, since no backend promises to drop its references."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    before = [_use_counts(*pair) for pair in zip(tensors, storages)]
    try:
        yield tensors
    finally:
        deadline = time.monotonic() + _RELEASE_SECONDS
        while [_use_counts(*pair) for pair in zip(tensors, storages)] != before and time.monotonic() < deadline:
            time.sleep(0)


def _use_counts(tensor: torch.Tensor, storage: torch.UntypedStorage) -> Tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)


class _Collectives(libdc.Collectives):
    """A process group as libdc's transport. Its methods are called on the library's threads and, in init, on the
    caller's."""

    def __init__(self, group: "dist.ProcessGroup") -> None:
        self.group = group

    def _gather(self, recv: torch.Tensor, send: torch.Tensor) -> None:
        dist.all_gather_into_tensor(recv, send, group=self.group)

    def _exchange_parts(self, recv: torch.Tensor, send: torch.Tensor, parts: Sequence[Sequence[int]]) -> None:
        dist.all_to_all_single(recv, send, *parts, group=self.group)

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        dist.broadcast(data, group=self.group, group_src=root)

    def _barrier(self) -> None:
        dist.barrier(self.group)

    @_outside_compilation()
    def all_gather(self, send: memoryview, recv: memoryview, dtype: libdc.DType) -> None:
        with _until_released(_wrap(recv, dtype), _wrap(send, dtype)) as (got, mine):
            self._gather(got, mine)

    @_outside_compilation()
    def all_to_all(self, send: memoryview, send_counts: Sequence[int], recv: memoryview, recv_counts: Sequence[int],
                   dtype: libdc.DType) -> None:
        with _until_released(_wrap(recv, dtype), _wrap(send, dtype)) as (got, mine):
            self._exchange_parts(got, mine, (recv_counts, send_counts))

    @_outside_compilation()
    def broadcast(self, data: memoryview, root: int) -> None:
        with _until_released(_wrap(data, libdc.DType.UINT8)) as (whole,):
            self._broadcast(whole, root)

    @_outside_compilation()
    def barrier(self) -> None:
        self._barrier()

    def _store(self) -> Tuple["dist.Store", str]:
        """The store through which the group's ranks met, and the group's name."""
        return dist.distributed_c10d._get_process_group_store(self.group), self.group.group_name

    def _rank(self) -> int:
        return dist.get_rank(self.group)

    @_outside_compilation()
    def dup(self) -> "_GlooCollectives":
        return self.split(range(dist.get_world_size(self.group)))

    @_outside_compilation()
    def split(self, ranks: Sequence[int]) -> Any:
        store, name = self._store()
        made = next(_made.setdefault(name, itertools.count()))  # every rank of the group counts in the same order
        if not ranks:
            return self
        # Parts of the same split differ in their first rank.
        return _GlooCollectives(store, f"libdc/{name}/{made}/{ranks[0]}", ranks.index(self._rank()), len(ranks),
                                self._timeout())

    def _timeout(self) -> datetime.timedelta:
        """The group's timeout, which also holds for its copies; PyTorch's default if the backend does not tell."""
        try:
            options = getattr(self.group._get_backend(torch.device("cpu")), "options", None)
        except RuntimeError:  # the backend has no options
            options = None
        return getattr(options, "_timeout", dist.default_pg_timeout)


_made: Dict[str, "itertools.count[int]"] = {}  # by group name: how often it was copied or split


class _GlooCollectives(_Collectives):
    """A Gloo group among ranks of a process group. PyTorch's new_group() does not suit copies that come and go. Where
    only members take part, it names a group by its ranks and the number of groups. A new group may get the name of one
    that is gone, whose addresses are still in the store. The names here are used once."""

    def __init__(self, store: "dist.Store", name: str, rank: int, size: int, timeout: datetime.timedelta) -> None:
        self.name, self.rank, self.size, self.store, self.timeout = name, rank, size, store, timeout
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)

    def _timeout(self) -> datetime.timedelta:
        return self.timeout

    def _store(self) -> Tuple["dist.Store", str]:
        return self.store, self.name

    def _rank(self) -> int:
        return self.rank

    def dup(self) -> "_GlooCollectives":
        return self.split(range(self.size))

    def _gather(self, recv: torch.Tensor, send: torch.Tensor) -> None:
        self.gloo._allgather_base(recv, send).wait()

    def _exchange_parts(self, recv: torch.Tensor, send: torch.Tensor, parts: Sequence[Sequence[int]]) -> None:
        self.gloo.alltoall_base(recv, send, *parts).wait()

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        self.gloo.broadcast(data, root).wait()

    def _barrier(self) -> None:
        self.gloo.barrier().wait()

    def close(self) -> None:
        self.gloo = None


def _wrap(view: memoryview, dtype: libdc.DType) -> torch.Tensor:
    if not len(view):
        return torch.empty(0, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(view, dtype=TORCH_DTYPES[dtype])
