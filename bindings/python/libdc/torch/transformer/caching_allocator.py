"""A caching allocator for large host memory. Each step of a layer allocates large tensors and drops them. The C library
returns such memory to the system, which clears each page at its next use. That takes up to a seventh of the layer's
time."""

from __future__ import annotations

import math
import mmap
import weakref
from typing import List

import torch
from torch import Tensor

MIN_BYTES = 1 << 20  # bytes; smaller memory stays with the C library anyway

_HUGE_PAGE = 2 << 20
_cache_limit = 1 << 30  # bytes that may be kept for reuse
_free: List[mmap.mmap] = []  # the newest last


def _reuse_or_map(nbytes: int) -> mmap.mmap:
    """Takes a free block of this length, or maps a new one. It searches a copy of the list, since any thread may drop a
    tensor at any time, even during this call. Removal is atomic, and decides which thread gets a block."""
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


def _shrink() -> None:
    """Frees the oldest blocks until the limit is kept."""
    excess = sum(map(len, tuple(_free))) - _cache_limit
    while excess > 0:
        try:
            excess -= len(_free.pop(0))
        except IndexError:  # another thread took the last one
            return


def _recycle(block: mmap.mmap) -> None:
    _free.append(block)
    _shrink()


def set_cache_limit(nbytes: int) -> int:
    """Sets how many bytes of host memory of dropped tensors are kept for the next step of a TransformerLayer. More than
    that is returned to the system, now and later; 0 keeps nothing. The limit is for the process, and initially 1 GiB.
    Memory of live tensors does not count. Returns the old limit."""
    global _cache_limit
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f"nbytes = {nbytes!r}, must be a number of bytes, 0 or more")
    before, _cache_limit = _cache_limit, nbytes
    _shrink()
    return before


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty(shape, dtype=dtype, device=device), but large host memory is reused from tensors that were dropped
    before."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MIN_BYTES or device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    block = _reuse_or_map(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    view = memoryview(block)[:nbytes]  # lives as long as any tensor of the storage
    weakref.finalize(view, _recycle, block).atexit = False
    storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)
