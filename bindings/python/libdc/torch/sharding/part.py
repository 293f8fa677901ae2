"""Which elements of a whole tensor this rank has, and how the whole is gathered from parts.

The whole is a parameter, or a contiguous piece of one, possibly in another shape: a row, a reshaped view. In flattened
order a rank has its elements from begin to end. They are the first ones of a flat tensor; padding may follow."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import devices

if TYPE_CHECKING:
    from .sharded_param import ShardedParam


class Cut(NamedTuple):
    """How a parameter's elements are split: each rank has shard_numel of them, except that the last ranks may have
    fewer."""

    rank: int
    size: int
    shard_numel: int
    numel: int

    def range_of(self, rank: int) -> Tuple[int, int]:
        begin = min(rank * self.shard_numel, self.numel)
        return begin, min(begin + self.shard_numel, self.numel)


class Part:
    """This rank's elements of a whole with a shape, which begins at element `start` of a parameter."""

    __slots__ = ("entry_ref", "name", "cut", "shape", "start", "numel", "begin", "end")

    def __init__(self, entry_ref: "weakref.ref[ShardedParam]", name: str, cut: Cut, shape: torch.Size,
                 start: int = 0) -> None:
        self.entry_ref, self.name, self.cut, self.shape, self.start = entry_ref, name, cut, shape, start
        self.numel = math.prod(shape)
        self.begin, self.end = self.range_of(cut.rank)

    def __repr__(self) -> str:
        return f"part {self.cut.rank} of {self.cut.size} of {self.name} {tuple(self.shape)}"

    def range_of(self, rank: int) -> Tuple[int, int]:
        """A rank's elements, from begin to end."""
        begin, end = (min(max(at - self.start, 0), self.numel) for at in self.cut.range_of(rank))
        return begin, end

    @property
    def count(self) -> int:
        return self.end - self.begin

    @property
    def is_parameter(self) -> bool:
        """Whether the whole is all of a parameter, in its own shape or another."""
        return self.start == 0 and self.numel == self.cut.numel

    def fits(self, other: Part) -> bool:
        """Whether both parts are the same elements of wholes of equal shape, on every rank. All ranks get the same
        answer."""
        if self.shape != other.shape or self.cut.size != other.cut.size:
            return False
        alike = self.start == other.start and self.cut.shard_numel == other.cut.shard_numel
        return alike or all(self.range_of(rank) == other.range_of(rank) for rank in range(self.cut.size))

    def piece(self, shape: torch.Size, offset: int) -> Part:
        """This rank's part of the piece of the whole that begins at element `offset`."""
        return Part(self.entry_ref, self.name, self.cut, shape, self.start + offset)

    def entry(self, call: str) -> ShardedParam:
        """The parameter's entry. Raises if its model is gone."""
        entry = self.entry_ref()
        if entry is None or not entry.alive:
            raise RuntimeError(f"{call}: the sharded model that {self} belongs to is gone; keep the model for as long "
                               "as its parameters are used")
        return entry

    def of(self, whole: Tensor) -> Tensor:
        """This rank's elements of a tensor of the whole's shape."""
        return whole.reshape(-1)[self.begin : self.end]

    def gather(self, local: Tensor, keep: bool = True) -> Optional[Tensor]:
        """The whole, from all ranks' parts. Collective. keep: whether this rank needs it."""
        if self.cut.size == 1:
            return plain_tensor(local)[: self.count].clone().view(self.shape)
        group = self.entry("full_tensor").root.group
        local = plain_tensor(local).to(group.device).contiguous()
        ranges = [self.range_of(rank) for rank in range(self.cut.size)]
        longest = self.cut.shard_numel if self.is_parameter else max(end - begin for begin, end in ranges)
        if local.numel() != longest:
            local = local[: self.count]
            local = torch.cat([local, local.new_zeros(longest - local.numel())])
        table = local.new_empty(longest * self.cut.size)
        group.all_gather(local, table)
        if not keep:
            return None
        if self.is_parameter:
            return (table if table.numel() == self.numel else table[: self.numel].clone()).view(self.shape)
        pieces = [table[rank * longest :][: end - begin] for rank, (begin, end) in enumerate(ranges)]
        return torch.cat(pieces).view(self.shape)

    def gather_value(self, value: Tensor, all_ranks: bool = False) -> Tensor:
        """One number of each rank, in rank order. Collective. all_ranks: with those of other replicas."""
        value = value.detach().reshape(1)
        if self.cut.size == 1 and not all_ranks:
            return value
        group = self.entry("a sum over the ranks").root.group
        comm = group.comm_for(group.device, all_ranks)
        if comm.size == 1:
            return value
        table = value.new_empty(comm.size, device=group.device)
        comm.all_gather(value.to(group.device), table, stream=devices.current_stream(group.device))
        return table

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of the ranks' values, of any shape. Collective."""
        total = value.detach().clone(memory_format=torch.contiguous_format)
        if total.numel() > 0:
            comm = self.entry("a sum over the ranks").root.group.comm_for(total.device)
            comm.all_reduce(total, stream=devices.current_stream(total.device))
        return total

    def fill(self, local: Tensor, write: Callable[[Tensor], Any]) -> None:
        """Lets write() fill a whole tensor, and keeps this rank's part. Random numbers are rank 0's, as for the
        unsharded parameter. All ranks draw, so that their generators stay in step. Collective."""
        whole = torch.empty(self.shape, dtype=local.dtype, device=local.device)
        with torch.no_grad():
            write(whole)
            self.entry("random numbers").group.broadcast(whole)
            plain_tensor(local)[: self.count].copy_(self.of(whole))


def part_of(tensor: Any) -> Optional[Part]:
    """A tensor's Part, if it is one; None for any other tensor."""
    return getattr(tensor, "_part", None) if isinstance(tensor, Tensor) else None


def plain_tensor(tensor: Tensor) -> Tensor:
    """The tensor as a plain tensor of the same memory, without autograd."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(tensor).as_subclass(torch.Tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as a flat tensor of bytes. A single element may have any stride, but PyTorch wants
    1 for a view of another type."""
    flat = tensor.reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.int8)


def tensors_in(values: Sequence[Any]) -> Any:
    """The tensors among a call's arguments, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
