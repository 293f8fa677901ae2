"""Before an exchange of parts ranks compare sizes and types. So a mistake is the same error on every rank. Small parts
travel with that comparison, so an exchange of little data is one collective."""

from __future__ import annotations

import ctypes
import struct
import zlib
from typing import List, Sequence

import libdc
import torch

_ROW_BYTES = 4096  # of parts in a rank's row
_TABLE_BYTES = 1 << 17  # of parts in all rows
_CALLS = ("all_to_all", "all_to_all_single", "gather", "scatter")


class Table:
    """One row of each rank. It has the bytes for each rank and those expected from each, the call, its root, and a
    checksum of the type's name. The parts for other ranks follow if they fit. Operations of PyTorch would take longer
    than the collective."""

    def __init__(self, comm: libdc.Comm, parts: Sequence[libdc.Tensor], outs: Sequence[libdc.Tensor], call: str,
                 root: int, dtype: torch.dtype) -> None:
        """parts, outs: flat, in bytes; dtype: what they are to the caller."""
        self.rank, self.size = comm.rank, comm.size
        self._head = struct.Struct(f"={2 * self.size + 3}q")
        self._capacity = min(_ROW_BYTES, _TABLE_BYTES // self.size) & ~7
        self._row_bytes = self._head.size + self._capacity
        self._rows = ctypes.create_string_buffer(self.size * self._row_bytes)
        self._address = ctypes.addressof(self._rows)
        sizes = [each.shape[0] for each in (*parts, *outs)]
        self._head.pack_into(self._rows, self.rank * self._row_bytes, *sizes,
                             _CALLS.index(call), root, zlib.crc32(str(dtype).encode()))
        if self._fits(sizes, self.rank):
            for receiver, part in enumerate(parts):
                if receiver != self.rank:
                    ctypes.memmove(self._place(sizes, self.rank, receiver), part.data, part.shape[0])
        own = libdc.Tensor(self._address + self.rank * self._row_bytes, (self._row_bytes,), libdc.DType.INT8)
        comm.all_gather(own, libdc.Tensor(self._address, (len(self._rows),), libdc.DType.INT8))
        self.sizes: List[Sequence[int]] = [self._head.unpack_from(self._rows, sender * self._row_bytes)
                                           for sender in range(self.size)]
        self.in_row = [self._fits(sizes, sender) for sender, sizes in enumerate(self.sizes)]  # a sender's parts

    def _fits(self, sizes: Sequence[int], sender: int) -> bool:
        return sum(sizes[: self.size]) - sizes[sender] <= self._capacity

    def _place(self, sizes: Sequence[int], sender: int, receiver: int) -> int:
        """Address of a part in its sender's row, which has none for the sender itself."""
        before = sum(sizes[:receiver]) - (sizes[sender] if sender < receiver else 0)
        return self._address + sender * self._row_bytes + self._head.size + before

    def _call_of(self, rank: int) -> str:
        call, root = self.sizes[rank][-3:-1]
        return _CALLS[call] + (f" (root {root})" if root >= 0 else "")

    def check(self, call: str) -> None:
        if len(set(self.sizes)) == 1 and len(set(self.sizes[0][:-3])) == 1:
            return  # all rows are alike, and all parts: the rest takes a step for each two ranks
        for sender in range(self.size):
            if self.sizes[sender][-3:-1] != self.sizes[0][-3:-1]:
                raise libdc.Error(libdc.Status.E_MISMATCH, f"rank {sender} called {self._call_of(sender)} where rank 0 "
                                                           f"called {self._call_of(0)}")
            if self.sizes[sender][-1] != self.sizes[0][-1]:
                raise libdc.Error(libdc.Status.E_MISMATCH, f"{call}: rank {sender} has tensors of another type than "
                                                           "rank 0")
        for sender in range(self.size):
            for receiver in range(self.size):
                sent, expected = self.sizes[sender][receiver], self.sizes[receiver][self.size + sender]
                if sent != expected:
                    raise libdc.Error(libdc.Status.E_MISMATCH, f"{call}: rank {sender} sends {sent} bytes to rank "
                                                               f"{receiver}, which expects {expected}")

    def take(self, outs: Sequence[libdc.Tensor]) -> None:
        """Writes the parts for this rank that came in rows."""
        for sender, out in enumerate(outs):
            if sender != self.rank and out.shape[0] and self.in_row[sender]:
                ctypes.memmove(out.data, self._place(self.sizes[sender], sender, self.rank), out.shape[0])
