"""Before an exchange of parts ranks compare sizes and types. So a mistake is the same error on every rank. Small parts
travel with that comparison, so an exchange of little data is one collective."""

from __future__ import annotations

import zlib
from typing import List, Sequence

import libdc
import torch

_ROW_BYTES = 4096  # of parts in a rank's row
_TABLE_BYTES = 1 << 17  # of parts in all rows


class Table:
    """One row of each rank: the bytes for each rank, the bytes expected from each, a checksum of the type's name, and
    the parts for other ranks if they fit."""

    def __init__(self, rows: torch.Tensor, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        head = 8 * (2 * size + 1)
        self.sizes: List[List[int]] = rows[:, :head].contiguous().view(torch.int64).tolist()
        self._data = rows[:, head:]

    @staticmethod
    def row(rank: int, parts: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> torch.Tensor:
        size = len(parts)
        sizes = [part.nbytes for part in parts] + [out.nbytes for out in outs]
        head = torch.tensor([*sizes, zlib.crc32(str(parts[0].dtype).encode())]).view(torch.uint8)
        row = torch.empty(head.numel() + _capacity(size), dtype=torch.uint8)
        row[: head.numel()] = head
        if sum(sizes[:size]) - sizes[rank] <= _capacity(size):
            others = [part.reshape(-1).view(torch.uint8) for to, part in enumerate(parts) if to != rank]
            at = head.numel()
            for part in others:
                row[at : at + part.numel()] = part
                at += part.numel()
        return row

    def check(self, call: str) -> None:
        for sender in range(self.size):
            if self.sizes[sender][-1] != self.sizes[0][-1]:
                raise libdc.Error(libdc.Status.E_MISMATCH, f"{call}: rank {sender} has tensors of another type than "
                                                           "rank 0")
            for receiver in range(self.size):
                sent, expected = self.sizes[sender][receiver], self.sizes[receiver][self.size + sender]
                if sent != expected:
                    raise libdc.Error(libdc.Status.E_MISMATCH, f"{call}: rank {sender} sends {sent} bytes to rank "
                                                               f"{receiver}, which expects {expected}")

    def travels_in_row(self, sender: int) -> bool:
        sizes = self.sizes[sender][: self.size]
        return sum(sizes) - sizes[sender] <= _capacity(self.size)

    def take(self, outs: Sequence[torch.Tensor]) -> None:
        """Writes the parts for this rank that came in rows."""
        for sender, out in enumerate(outs):
            if sender != self.rank and out.numel() and self.travels_in_row(sender):
                before = self.sizes[sender][: self.rank]
                at = sum(before) - (before[sender] if sender < self.rank else 0)
                part = self._data[sender, at : at + out.nbytes].clone()  # of its own, and so aligned
                out.copy_(part.view(out.dtype).view(out.shape))


def _capacity(size: int) -> int:
    return min(_ROW_BYTES, _TABLE_BYTES // size) & ~7
