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
    """A communicator whose collectives are the group's. Ranks of one machine communicate several times faster by
    libdc's own: libdc.init_comm()."""
    own = getattr(group, "comm", None)
    if isinstance(own, libdc.Comm):  # of the backend libdc, maybe from split_group(), of which PyTorch does not know
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


# The group's own timeout ends a wait in its functions. A wait for NCCL, which stands on them, has libdc's deadline
# alone.
_GRACE_SECONDS = 60.0
_MAX_SECONDS = 1e9


@contextlib.contextmanager
def _outside_compilation() -> Iterator[None]:
    """While PyTorch compiles on the caller's thread, its modes give fake tensors for real ones. Its Python dispatcher
    holds the GIL around c10d's operators, for which Gloo's threads wait in turn."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


_RELEASE_SECONDS = 1.0


@contextlib.contextmanager
def _until_released(*tensors: torch.Tensor) -> Iterator[Tuple[torch.Tensor, ...]]:
    """Returns once no other holder of the tensors is left. Gloo's thread wakes its caller first and lets go of a work's
    tensors then. The last to let go of Python's memory takes the GIL. If the interpreter has begun to end by then, that
    ends the process by SIGABRT. Nothing promises that a backend lets go, so not without a bound."""
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
    """A process group as libdc's transport. Called on the library's threads and, in init, on the caller's."""

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
        """The store by which the group's ranks met, and the group's name."""
        return dist.distributed_c10d._get_process_group_store(self.group), self.group.group_name

    def _rank(self) -> int:
        return dist.get_rank(self.group)

    @_outside_compilation()
    def dup(self) -> "_GlooCollectives":
        return self.split(range(dist.get_world_size(self.group)))

    @_outside_compilation()
    def split(self, ranks: Sequence[int]) -> Any:
        store, name = self._store()
        made = next(_made.setdefault(name, itertools.count()))  # in the same order on every rank of the group
        if not ranks:
            return self
        # Parts that are made at once have different first ranks.
        return _GlooCollectives(store, f"libdc/{name}/{made}/{ranks[0]}", ranks.index(self._rank()), len(ranks),
                                self._timeout())

    def _timeout(self) -> datetime.timedelta:
        """The group's, which ends its copies' waits, too. PyTorch's default where the backend does not tell."""
        try:
            options = getattr(self.group._get_backend(torch.device("cpu")), "options", None)
        except RuntimeError:  # of a backend without options
            options = None
        return getattr(options, "_timeout", dist.default_pg_timeout)


_made: Dict[str, "itertools.count[int]"] = {}  # of the groups with these names: how often they were copied or split


class _GlooCollectives(_Collectives):
    """Gloo among ranks of a process group. PyTorch's new_group() is not for copies that come and go. Where only the
    members take part, it names a group by its ranks and by how many groups there are. So a second one may have the name
    of one that has gone, under which the store still has that one's addresses. These names are used once."""

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
