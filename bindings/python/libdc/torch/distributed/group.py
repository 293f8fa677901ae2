"""A PyTorch process group whose ranks communicate by libdc."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import operator
import sys
import threading
import types
from typing import Any, Callable, List, Optional, Sequence

import torch
import torch.distributed as dist

from ..sharding.untraced import untraced
from .card import create_nccl_group, nccl_options, route_calls
from .collectives import Collectives
from .pairs import Pairs
from .rendezvous import Rendezvous, poll
from .tensors import check, flat_count, refuse_tracing, settled
from .work import Lane, Work

_Tensors = List[torch.Tensor]
# Code objects of send and recv. None, which no frame has, if a program replaced one by an object that is no function.
_SEND, _RECV = (getattr(inspect.unwrap(call), "__code__", None) for call in (dist.send, dist.recv))


class LibdcProcessGroup(dist.ProcessGroup):
    """Made by init_process_group("libdc") and new_group(). Calls behave as on PyTorch's other backends, and calls of
    any two groups may overlap. Collectives of tensors on a card go to NCCL."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = supports_reconfigure = supports_window = supports_abort_hooks = False
    options = None

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta, nccl: Optional[Any] = None,
                 global_ranks: Sequence[int] = ()) -> None:
        """nccl: a ProcessGroupNCCL.Options, for tensors on a card."""
        super().__init__(rank, size)
        self._timeout = timeout
        self._nccl, self._global_ranks = nccl, global_ranks
        self._card: Optional[dist.ProcessGroup] = None
        self._card_lock = threading.Lock()
        self._name = self._desc = "undefined"
        rendezvous = Rendezvous(store, rank, size, timeout)
        self._store = rendezvous.store
        self.comm = rendezvous.comm()
        self._pairs = Pairs(rendezvous, self.comm.check)
        self._calls = Collectives(self.comm)
        self._lane = Lane()
        self._sequence = self._monitored = self._splits = 0
        self._coalesced: Optional[List[Work]] = None

    @classmethod
    def create(cls, options: Any, nccl: Optional[Any] = None) -> "LibdcProcessGroup":
        """The constructor for torch.distributed.Backend.register_backend."""
        return cls(options.store, options.group_rank, options.group_size, options.timeout, nccl,
                   options.global_ranks_in_group)

    # ---- what the group is ----

    def getBackendName(self) -> str:
        return "libdc"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> List[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type == "cpu":
            return self
        if self._card is None:
            raise RuntimeError(f"the process group's backend libdc has no device {device}, only cpu, and a card of "
                               "CUDA from the first collective of a tensor there")
        return self._card._get_backend(torch.device(device))

    get_backend = _get_backend

    def card_group(self) -> dist.ProcessGroup:
        """The group over NCCL. It is made at the first collective of tensors on a card, which all ranks call."""
        with self._card_lock:
            if self._card is None:
                options = nccl_options(self._nccl, self._timeout, self._global_ranks, self._name)
                self._card = create_nccl_group(dist.PrefixStore("cuda", self._store), self.rank(), self.size(), options)
                self._card._set_group_name(self._name)
            return self._card

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        raise NotImplementedError("libdc: a group keeps the timeout of init_process_group(timeout=...) or "
                                  "new_group(timeout=...)")

    def split_group(self, ranks: Sequence[int], timeout: Optional[datetime.timedelta] = None, opts: Any = None,
                    group_name: Optional[str] = None, group_desc: Optional[str] = None, device_types: Any = None
                    ) -> Optional["LibdcProcessGroup"]:
        """A group of some ranks of this one; None on ranks outside of it. Every rank calls it, with the ranks of its
        own part."""
        self._splits += 1
        if self.rank() not in ranks:
            return None
        ordered = sorted(ranks)
        store = dist.PrefixStore(f"split/{self._splits}/{ordered[0]}", self._store)
        group = type(self)(store, ordered.index(self.rank()), len(ordered), timeout or self._timeout, opts,
                           [self._global_ranks[rank] for rank in ordered] if self._global_ranks else ordered)
        group.setGroupName(group_name or f"{self._name}:split:{self._splits}:{ordered[0]}")
        group.setGroupDesc(group_desc or f"{self._desc}:split")
        return group

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        pass

    # ---- work. The caller may change its lists, but not its tensors, before a call has run ----

    def _call(self, run: Callable[[], Any], result: Any, opts: Optional[Any]) -> Work:
        refuse_tracing()
        self._sequence += 1
        blocking = not getattr(opts, "asyncOp", True)
        return self._submitted(self._lane.submit(Work(run, result), blocking), blocking)

    def _submitted(self, work: Work, blocking: bool) -> Work:
        if blocking:
            return work
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work.register()

    # For dist._coalescing_manager(device=...). The calls run one by one, since joining them gains nothing.

    def _start_coalescing(self, device: torch.device) -> None:
        self._get_backend(device)  # refuses other devices
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """A work for all calls since the start, on its own lane, so that later calls do not wait for its messages."""
        works, self._coalesced = self._coalesced or [], None
        result = [work._result for work in works]
        return Lane().submit(Work(lambda: [work.wait() for work in works], result), False)

    def _root(self, call: str, opts: Optional[Any]) -> int:
        root = 0 if opts is None else int(opts.rootRank)
        if not 0 <= root < self.size():
            raise ValueError(f"{call}: root rank = {root}, must be 0..{self.size() - 1}")
        return root

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        return self.allreduce_coalesced(_one("allreduce", tensors), opts)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Work:
        op, tensors = _op_of(opts), settled(tensors)
        return self._call(lambda: self._calls.all_reduce(tensors, op), tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Work:
        op, root, tensors = opts.reduceOp, self._root("reduce", opts), settled(_one("reduce", tensors))
        return self._call(lambda: self._calls.reduce(tensors[0], op, root), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        root, tensors = self._root("broadcast", opts), settled(_one("broadcast", tensors))
        return self._call(lambda: self._calls.broadcast(tensors[0], root), tensors, opts)

    def all_gather_single(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Work:
        out, mine = settled([out, mine])
        return self._call(lambda: self._calls.all_gather_flat(out, mine), [out], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outs: _Tensors, ins: _Tensors, opts: Any = None) -> Work:
        outs, ins = settled(outs), settled(ins)
        _same_length("all_gather_single_coalesced", outs, ins)

        def run() -> None:
            for out, mine in zip(outs, ins):
                self._calls.all_gather_flat(out, mine)

        return self._call(run, outs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outs: Sequence[_Tensors], ins: _Tensors, opts: Any = None) -> Work:
        outs, ins = [settled(parts) for parts in outs], settled(ins)
        _same_length("allgather", outs, ins)

        def run() -> None:
            for parts, mine in zip(outs, ins):
                self._calls.all_gather(parts, mine)

        return self._call(run, outs[0] if len(outs) == 1 else outs, opts)

    def allgather_coalesced(self, outs: Sequence[_Tensors], ins: _Tensors, opts: Any = None) -> Work:
        """outs[r][i]: tensor i of rank r."""
        for parts in outs:
            _same_length("allgather_coalesced", parts, ins)
        return self.allgather([list(parts) for parts in zip(*outs)], ins, opts)

    def reduce_scatter_single(self, out: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([out], [whole], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outs: _Tensors, ins: _Tensors, opts: Any = None) -> Work:
        op, outs, ins = _op_of(opts), settled(outs), settled(ins)
        _same_length("reduce_scatter_single_coalesced", outs, ins)

        def run() -> None:
            for out, whole in zip(outs, ins):
                self._calls.reduce_scatter_flat(out, whole, op)

        return self._call(run, outs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outs: _Tensors, ins: Sequence[_Tensors], opts: Any = None) -> Work:
        op, outs, ins = _op_of(opts), settled(outs), [settled(parts) for parts in ins]
        _same_length("reduce_scatter", outs, ins)

        def run() -> None:
            for out, parts in zip(outs, ins):
                self._calls.reduce_scatter(out, parts, op)

        return self._call(run, outs, opts)

    def all_to_all_single(self, out: torch.Tensor, mine: torch.Tensor, out_sizes: Sequence[int],
                          in_sizes: Sequence[int], opts: Any = None) -> Work:
        out, mine = settled([out, mine])
        check("all_to_all_single", out, mine)
        counts = [_part_counts("all_to_all_single", *each, self.size())
                  for each in (("output", out, out_sizes), ("input", mine, in_sizes))]
        return self._call(lambda: self._calls.all_to_all_flat(out, mine, *counts), [out], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outs: _Tensors, ins: _Tensors, opts: Any = None) -> Work:
        outs, ins = settled(outs), settled(ins)
        return self._call(lambda: self._calls.all_to_all(outs, ins), outs, opts)

    def gather(self, outs: Sequence[_Tensors], ins: _Tensors, opts: Any) -> Work:
        root, parts = self._root("gather", opts), settled(outs[0]) if outs else []
        mine = settled(ins)[0]
        return self._call(lambda: self._calls.gather(parts, mine, root), parts, opts)

    def gather_single(self, out: torch.Tensor, mine: torch.Tensor, opts: Any) -> Work:
        root = self._root("gather_single", opts)
        out, mine = settled([out, mine])
        return self._call(lambda: self._calls.gather_flat(out, mine, root), [out], opts)

    gather_into_tensor = gather_single

    def scatter(self, outs: _Tensors, ins: Sequence[_Tensors], opts: Any) -> Work:
        root, parts = self._root("scatter", opts), settled(ins[0]) if ins else []
        outs = settled(outs)
        return self._call(lambda: self._calls.scatter(outs[0], parts, root), outs, opts)

    def barrier(self, opts: Any = None) -> Work:
        return self._call(self.comm.barrier, [], opts)

    def monitored_barrier(self, timeout: Optional[datetime.timedelta] = None, wait_all_ranks: bool = False) -> None:
        """A barrier through the store. Its error names the ranks that are missing; the group stays usable."""
        store = dist.PrefixStore(f"monitored/{self._monitored}", self._store)
        timeout = timeout or self._timeout
        ranks = [str(rank) for rank in range(self.size())]
        own = ranks[self.rank()]
        store.set(own, b"")
        met = poll(lambda: store.check(ranks), timeout)  # after it the store may be gone
        missing = [] if met else [rank for rank in ranks if not store.check([rank])]
        if missing:
            if not wait_all_ranks:
                missing = missing[:1]
            store.delete_key(own)  # so that this call does not count for the next one
            raise dist.DistError(f"monitored_barrier: rank {own}: rank{'s' * (len(missing) > 1)} "
                                 f"{', '.join(missing)} not there within {timeout.total_seconds():g} s")
        if self._monitored:  # all ranks have come, so none reads the previous call's keys any more
            with contextlib.suppress(RuntimeError):  # the store has no deletion
                self._store.delete_key(f"monitored/{self._monitored - 1}/{own}")
        self._monitored += 1

    def _message(self, call: str, tensors: _Tensors) -> torch.Tensor:
        refuse_tracing()
        tensors = settled(tensors)
        check(call, *tensors)
        return tensors[0]

    def send(self, tensors: _Tensors, to: int, tag: int = 0) -> Work:
        tensor, blocking = self._message("send", tensors), _is_waited_for()
        work = self._pairs.send(tensor, to, tag, blocking)
        return self._submitted(work, blocking)

    def recv(self, tensors: _Tensors, source: int, tag: int = 0) -> Work:
        tensor, blocking = self._message("recv", tensors), _is_waited_for()
        work = self._pairs.recv(tensor, source, tag, blocking)
        return self._submitted(work, blocking)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> Work:
        tensor, blocking = self._message("recv", tensors), _is_waited_for()
        work = self._pairs.recv_anysource(tensor, tag, blocking)
        return self._submitted(work, blocking)

    # ---- the end ----

    def abort(self) -> None:
        """Makes all calls of the group fail, on every rank."""
        reason = "abort() of the process group"
        if self._card is not None:
            self._card.abort()
        self.comm.abort(reason)
        self._pairs.abort(reason)

    def shutdown(self) -> None:
        """Ends the group, after the calls made before."""
        if self._card is not None:
            self._card.shutdown()
        self._lane.close()
        self._pairs.close()
        self.comm.close()


def _one(call: str, tensors: Any) -> _Tensors:
    """The list's only tensor. PyTorch's interface has lists from the time of several cards in a process."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(tensors) != 1:
        raise ValueError(f"{call}: {len(tensors)} tensors, must be one; {call}_coalesced or several calls have more")
    return tensors


def _same_length(call: str, outs: Sequence[Any], ins: Sequence[Any]) -> None:
    if len(outs) != len(ins):
        raise ValueError(f"{call}: {len(outs)} outputs for {len(ins)} inputs, must be as many")


def _is_waited_for() -> bool:
    """Whether dist.send or dist.recv is two frames up. They wait at once, but call isend and irecv, whose arguments do
    not show it. Waking a thread for that takes longer than a small message."""
    frame = sys._getframe(1).f_back  # isend's
    frame = frame and frame.f_back
    return frame is not None and (frame.f_code is _SEND or frame.f_code is _RECV)


def _op_of(opts: Optional[Any]) -> Any:
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _part_counts(call: str, what: str, tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> List[int]:
    """The counts, in elements of flat_view(), of a tensor's parts along dimension 0. Without sizes the parts are
    equal."""
    length = tensor.shape[0] if tensor.dim() else 1
    count = flat_count(tensor.dtype, tensor.numel())
    if not sizes:
        if length % ranks:
            raise ValueError(f"{call}: {what} has {length} rows, must have a multiple of {ranks}, the number of ranks")
        return [count // ranks] * ranks
    rows = [operator.index(size) for size in sizes]
    if len(rows) != ranks or sum(rows) != length or min(rows) < 0:
        raise ValueError(f"{call}: the split sizes of {what} are {rows}, must be {ranks}, not negative, that add up to "
                         f"{length}, its rows")
    return [each * (count // max(length, 1)) for each in rows]


if torch.backends.cuda.is_built() and dist.is_nccl_available():
    route_calls(LibdcProcessGroup)

# If Dynamo leaves a call of torch.distributed to the interpreter, it would try to compile these methods, which it
# can't.
for _method in (*vars(LibdcProcessGroup).values(), *vars(Work).values()):
    if isinstance(_method, types.FunctionType):
        untraced(_method)
