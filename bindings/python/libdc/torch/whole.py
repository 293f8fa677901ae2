"""`with gathered(model):` whole weights outside of forward, to read and to write.

What is written is kept: at the end of the block, and before a forward inside it, each rank takes its part of what it
finds. All ranks must have written the same, or the parts would not fit together; checksums tell."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict

import torch
from torch import Tensor

from .sharded_param import ShardedParam
from .parameter import gather, plain, split
from .root import Root

_BLOCK = 1 << 16  # elements in a step of a checksum
_PRIME = 1000003


class _Whole:
    """One parameter's whole weights, and the tensors over their memory that attributes are: tracked by autograd or not.
    """

    def __init__(self, entry: ShardedParam) -> None:
        self.entry = entry
        self.version = entry.data._version, entry.updates
        whole = plain(entry.data) if entry.group.stage == 0 else gather(entry, entry.data)
        assert whole is not None
        self.weights: Tensor = whole
        self.seen = checksum(whole)
        self.given: Dict[bool, Tensor] = {}

    def sync_and_checksum(self) -> int:
        """The checksum, after `weight.data = ...` has been taken in."""
        for tensor in self.given.values():
            if tensor.data_ptr() != self.weights.data_ptr():
                self.weights.copy_(tensor.detach())
                tensor.data = self.weights
        return checksum(self.weights)


class GatheredWeights:
    """The wholes that one gathered() has given out."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.wholes: Dict[int, _Whole] = {}

    def read(self, entry: ShardedParam, tracked: bool, track: Callable[[Tensor], Tensor]) -> Tensor:
        """The whole weights. track() connects them with the parameter for autograd."""
        whole = self.wholes.get(entry.id)
        if whole is None or (self.root.group.stage > 0 and whole.version != (entry.data._version, entry.updates)):
            whole = self.wholes[entry.id] = _Whole(entry)
        weights = whole.given.get(tracked)
        if weights is None:
            weights = whole.weights.new_empty(0).set_(whole.weights)  # no view of anything, for autograd
            weights = whole.given[tracked] = track(weights) if tracked else weights
        return weights

    def write_back(self) -> None:
        """Writes each rank's part of what changed. Collective."""
        now = {id: whole.sync_and_checksum() for id, whole in self.wholes.items()}
        changed = {id: sum for id, sum in now.items() if sum != self.wholes[id].seen}
        self._check_ranks_agree(changed)
        entries = []
        for id in changed:
            whole = self.wholes[id]
            if self.root.group.stage > 0:
                split(whole.entry, whole.weights, whole.entry.data)
            whole.seen, whole.version = now[id], (whole.entry.data._version, whole.entry.updates)
            entries.append(whole.entry)
        if entries:
            self.root.group.params_updated(entries)

    def _check_ranks_agree(self, changed: Dict[int, int]) -> None:
        from .state import all_gather_bytes

        changes = [json.loads(text) for text in all_gather_bytes(self.root, json.dumps(changed).encode())]
        for rank, other in enumerate(changes):
            if other != changes[0]:
                id = min(int(id) for id in {**changes[0], **other} if changes[0].get(id) != other.get(id))
                name = self.root.group.entries[id].names[0]
                raise RuntimeError(f"gathered: rank {rank} has written other values into {name} than rank 0, so there "
                                   "is nothing that all could keep: write the same on every rank")


def checksum(tensor: Tensor) -> int:
    """A number that tells a tensor's bits, nearly for sure."""
    integers: Any = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integer = integers.get(tensor.element_size(), torch.int8)
    flat = tensor.detach().contiguous().view(-1).view(integer)
    odd = 2 * torch.arange(min(_BLOCK, flat.numel()), device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in flat.split(_BLOCK):
        mixed = block.long() * odd[: block.numel()]
        total = total * _PRIME + (mixed ^ (mixed >> 29)).mul_(odd[: block.numel()]).sum()
    return int(total)
