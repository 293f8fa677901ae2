"""`with gathered(model):` whole weights outside of forward, to read and to write.

Changes are kept: at the end of the block, and before a forward inside it, each rank copies its part into its shard. All
ranks that have written a weight must have written the same values, which checksums verify. Ranks that have not written
it get the values of one that has.

The parameters themselves may be written too. At stage 0 they are the whole weights. At stages 1 to 3 they are parts:
all ranks must write them, and none may also write the same weight as a whole."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .parameter import copy_shard, gather_full
from .part import plain_tensor
from .root import Root
from .sharded_param import ShardedParam
from .untraced import untraced

_CHECKSUM_BLOCK = 1 << 16  # elements in one step of a checksum
_PRIME = 1000003


class _FullWeights:
    """One parameter's whole weights, and views of their memory that attributes return, with or without autograd."""

    def __init__(self, entry: ShardedParam, write: bool) -> None:
        self.entry = entry
        self.version = _version_of(entry)
        whole = plain_tensor(entry.data) if entry.group.stage == 0 else gather_full(entry, entry.data)
        assert whole is not None
        self.weights: Tensor = whole
        self.last_checksum = checksum(whole) if write else 0
        self.views: Dict[bool, Tensor] = {}
        self.last_versions = 0

    def versions(self) -> int:
        """The sum of the views' versions, which rises with each write that autograd sees."""
        return sum(tensor._version for tensor in self.views.values() if not tensor.is_inference())

    def sync_and_checksum(self) -> int:
        """The checksum, after values of `weight.data = ...` have been copied in."""
        for tensor in self.views.values():
            if tensor.data_ptr() != self.weights.data_ptr():
                self.weights.copy_(tensor.detach())
                tensor.data = self.weights
        return checksum(self.weights)

    def new_checksum(self) -> Optional[int]:
        """The checksum, if the weights were written since the last agreement (even with the same values); else None."""
        now = self.sync_and_checksum()
        return now if now != self.last_checksum or self.versions() != self.last_versions else None


class _Writes(NamedTuple):
    """A rank's writes into weights since the last agreement, by parameter number."""

    wholes: Dict[Any, int]  # checksums of wholes that it has written; JSON makes the keys strings
    parts: List[int]  # at stages 1 to 3: parameters that it has written directly
    both: List[int]  # written both as a whole and as a part


class GatheredWeights:
    """The whole weights of one gathered() block."""

    def __init__(self, root: Root, write: bool) -> None:
        self.root, self.write = root, write
        self.wholes: Dict[int, _FullWeights] = {}
        self.versions = self._versions()

    @untraced
    def read(self, entry: ShardedParam, tracked: bool, track: Callable[..., Tensor]) -> Tensor:
        """The whole weights of a parameter. track() makes them a leaf, whose gradient is reduced."""
        whole = self.wholes.get(entry.id)
        if whole is not None and self._is_outdated(whole):
            self.write_back()
            whole = self.wholes.get(entry.id)
        if whole is None:
            whole = self.wholes[entry.id] = _FullWeights(entry, self.write)
        weights = whole.views.get(tracked)
        if weights is None:
            weights = whole.weights.new_empty(0).set_(whole.weights)  # for autograd this is no view
            weights = whole.views[tracked] = track(weights, entry, self.root) if tracked else weights
            whole.last_versions += 0 if weights.is_inference() else weights._version
        return weights

    def _versions(self) -> List[Tuple[int, int]]:
        return [_version_of(entry) for entry in self.root.group.entries]

    def _is_outdated(self, whole: _FullWeights) -> bool:
        """Whether the part was written since the whole was gathered."""
        return self.root.group.stage > 0 and whole.version != _version_of(whole.entry)

    def write_back(self) -> None:
        """Writes each rank's part of the changed weights. Collective."""
        if self.write:
            self.root.group.loaded = False  # a load is a write, and writes are compared below
            self._write_back()
        else:
            self._refuse_writes()
        for id in [id for id, whole in self.wholes.items() if self._is_outdated(whole)]:
            del self.wholes[id]
        self.versions = self._versions()

    def refuse_unsaved(self, entry: ShardedParam) -> None:
        """Raises if a weight was written whole on this rank, while its parts still have old values."""
        whole = self.wholes.get(entry.id)
        if self.write and whole is not None and whole.new_checksum() is not None:
            raise RuntimeError(f"{entry.names[0]} was written in an open gathered(), at whose end its part gets such "
                               "values: save behind the block, or take save_checkpoint() or full_state_dict()")

    def _write_back(self) -> None:
        entries = []
        for id, (writer, sum_) in self._agree_on_writers().items():
            whole = self.wholes.get(id)
            if whole is None:  # at stage 0, where a rank may read alone
                whole = self.wholes[id] = _FullWeights(self.root.group.entries[id], self.write)
            if whole.last_checksum != sum_ or writer is not None:
                if writer is not None:
                    self.root.group.broadcast(whole.weights, writer)
                if self.root.group.stage > 0:
                    copy_shard(whole.entry, whole.weights, whole.entry.data)
                entries.append(whole.entry)
            whole.last_checksum, whole.last_versions = sum_, whole.versions()
            whole.version = _version_of(whole.entry)
        if entries:
            self.root.group.params_updated(entries)

    def _agree_on_writers(self) -> Dict[int, Tuple[Optional[int], int]]:
        """For each weight that a rank has written: a rank that has the values, or None if all do, and the checksum."""
        mine = json.dumps(self._own_writes()).encode()
        every = [_Writes(*json.loads(text)) for text in self.root.group.all_gather_bytes(mine, all_ranks=True)]
        self._refuse_mixed_writes(every)
        sums = [{int(id): sum_ for id, sum_ in writes.wholes.items()} for writes in every]
        result: Dict[int, Tuple[Optional[int], int]] = {}
        for id in sorted(set().union(*sums)):
            writers = [rank for rank, written in enumerate(sums) if id in written]
            for rank in writers[1:]:
                if sums[rank][id] != sums[writers[0]][id]:
                    raise RuntimeError(f"gathered: rank {rank} has written other values into {self._name(id)} than "
                                       f"rank {writers[0]}, so there is nothing that all could keep: write the same on "
                                       "every rank, or on one alone")
            result[id] = None if len(writers) == len(sums) else writers[0], sums[writers[0]][id]
        return result

    def _own_writes(self) -> _Writes:
        entries = self.root.group.entries
        parts = [entry.id for entry, version in zip(entries, self.versions) if _version_of(entry) != version]
        wholes: Dict[Any, int] = {}
        for id, whole in self.wholes.items():
            now = whole.new_checksum()
            if now is not None:
                wholes[id] = now
        if self.root.group.stage == 0:
            wholes.update({id: checksum(entries[id].data) for id in parts})
            parts = []
        return _Writes(wholes, parts, [id for id in wholes if id in self.wholes and self._is_outdated(self.wholes[id])])

    def _refuse_mixed_writes(self, every: List[_Writes]) -> None:
        both = [id for writes in every for id in writes.both]
        missing = [(id, rank) for id in sorted(set().union(*(writes.parts for writes in every)))
                   for rank, writes in enumerate(every) if id not in writes.parts]
        if both or missing:
            self.root.group.params_updated()  # on all ranks, so that all gather again
        if both:
            raise RuntimeError(f"gathered: {self._name(both[0])} was written both as a whole, by its module's "
                               "attribute, and as the parameter, which is each rank's part, so one of the two would be "
                               "lost: write it in one of these ways")
        if missing:
            id, rank = missing[0]
            raise RuntimeError(f"gathered: {self._name(id)} was written as the parameter, which is each rank's part, "
                               f"but not on rank {rank}, whose part would keep old values: write into the module's "
                               "attribute (module.weight), or call load_state_dict(), copy_() and the like on every "
                               "rank")

    def _name(self, id: int) -> str:
        return self.root.group.entries[id].names[0]

    def _refuse_writes(self) -> None:
        for whole in self.wholes.values():
            moved = any(tensor.data_ptr() != whole.weights.data_ptr() for tensor in whole.views.values())
            if moved or whole.versions() != whole.last_versions:
                raise RuntimeError(f"gathered: {whole.entry.names[0]} was written in a block with write = False, so "
                                   "the change would be lost: leave write at True")


def _version_of(entry: ShardedParam) -> Tuple[int, int]:
    """A value that changes when the parameter's memory is written. It counts steps, since fused optimizers do not raise
    the tensor's version."""
    return entry.data._version, entry.optimizer_steps


def checksum(tensor: Tensor) -> int:
    """A hash of a tensor's bits."""
    integers: Any = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integer = integers.get(tensor.element_size(), torch.int8)
    flat = tensor.detach().contiguous().view(-1).view(integer)
    odd = 2 * torch.arange(min(_CHECKSUM_BLOCK, flat.numel()), device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in flat.split(_CHECKSUM_BLOCK):
        mixed = block.long() * odd[: block.numel()]
        total = total * _PRIME + (mixed ^ (mixed >> 29)).mul_(odd[: block.numel()]).sum()
    return int(total)
