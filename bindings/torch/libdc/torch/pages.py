"""Large host memory that is used again. A layer's step makes large tensors and drops them; the C library gives such
memory back to the system, which clears it page by page when it is touched anew: up to a seventh of the layer's time."""

from __future__ import annotations

import math
import mmap
import weakref
from typing import List

import torch
from torch import Tensor

LEAST = 1 << 20  # bytes; smaller memory stays with the C library anyway
MOST = 1 << 30  # bytes that wait to be used again

_HUGE_PAGE = 2 << 20
_free: List[mmap.mmap] = []  # the newest last


def _take(nbytes: int) -> mmap.mmap:
    """Who drops a tensor is any thread, at any time, in the middle of this too: so a copy is searched, and removal,
    which is one step, decides who has a block."""
    for block in reversed(tuple(_free)):
        if len(block) == nbytes:
            try:
                _free.remove(block)
                return block
            except ValueError:
                pass
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE:
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _give(block: mmap.mmap) -> None:
    _free.append(block)
    excess = sum(map(len, tuple(_free))) - MOST
    while excess > 0 and _free:
        excess -= len(_free.pop(0))


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty(shape, dtype=dtype, device=device); large host memory comes from tensors that were dropped before."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST or device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    block = _take(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    view = memoryview(block)[:nbytes]  # lives as long as any tensor of the storage
    weakref.finalize(view, _give, block).atexit = False
    storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)
