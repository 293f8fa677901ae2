"""`with gathered(model):` whole weights outside of forward, to read and to write.

Changes are kept: at the end of the block, and before a forward inside it, each rank copies its part into its shard. All
ranks must have written the same values, or the parts would not fit together; checksums are compared."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict

import torch
from torch import Tensor

from .parameter import copy_shard, gather_full
from .part import plain_tensor
from .root import Root
from .sharded_param import ShardedParam

_CHECKSUM_BLOCK = 1 << 16  # elements in a step of a checksum
_PRIME = 1000003


class _FullWeights:
    """One parameter's whole weights, and the tensors over their memory that attributes are: tracked by autograd or not.
    """

    def __init__(self, entry: ShardedParam) -> None:
        self.entry = entry
        self.version = entry.data._version, entry.optimizer_steps
        whole = plain_tensor(entry.data) if entry.group.stage == 0 else gather_full(entry, entry.data)
        assert whole is not None
        self.weights: Tensor = whole
        self.last_checksum = checksum(whole)
        self.views: Dict[bool, Tensor] = {}

    def sync_and_checksum(self) -> int:
        """The checksum, after `weight.data = ...` has been taken in."""
        for tensor in self.views.values():
            if tensor.data_ptr() != self.weights.data_ptr():
                self.weights.copy_(tensor.detach())
                tensor.data = self.weights
        return checksum(self.weights)


class GatheredWeights:
    """The whole weights that one gathered() block has handed out."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.wholes: Dict[int, _FullWeights] = {}

    def read(self, entry: ShardedParam, tracked: bool, track: Callable[..., Tensor]) -> Tensor:
        """The whole weights. track() makes them a leaf, whose gradient is reduced."""
        whole = self.wholes.get(entry.id)
        version = entry.data._version, entry.optimizer_steps
        if whole is None or (self.root.group.stage > 0 and whole.version != version):
            whole = self.wholes[entry.id] = _FullWeights(entry)
        weights = whole.views.get(tracked)
        if weights is None:
            weights = whole.weights.new_empty(0).set_(whole.weights)  # no view of anything, for autograd
            weights = whole.views[tracked] = track(weights, entry, self.root) if tracked else weights
        return weights

    def write_back(self) -> None:
        """Writes each rank's part of the changed weights. Collective."""
        now = {id: whole.sync_and_checksum() for id, whole in self.wholes.items()}
        changed = {id: sum for id, sum in now.items() if sum != self.wholes[id].last_checksum}
        self._check_ranks_agree(changed)
        entries = []
        for id in changed:
            whole = self.wholes[id]
            if self.root.group.stage > 0:
                copy_shard(whole.entry, whole.weights, whole.entry.data)
            whole.last_checksum, whole.version = now[id], (whole.entry.data._version, whole.entry.optimizer_steps)
            entries.append(whole.entry)
        if entries:
            self.root.group.params_updated(entries)

    def _check_ranks_agree(self, changed: Dict[int, int]) -> None:
        changes = [json.loads(text) for text in self.root.group.all_gather_bytes(json.dumps(changed).encode())]
        for rank, other in enumerate(changes):
            if other != changes[0]:
                id = min(int(id) for id in {**changes[0], **other} if changes[0].get(id) != other.get(id))
                name = self.root.group.entries[id].names[0]
                raise RuntimeError(f"gathered: rank {rank} has written other values into {name} than rank 0, so there "
                                   "is nothing that all could keep: write the same on every rank")


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
