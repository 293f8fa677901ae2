"""Parts in torch.distributed.checkpoint: the boxes of the whole tensor that this rank has.

A part is a range of the whole's elements. In n dimensions that is at most 2 n - 1 boxes: the end of a row, full rows,
the beginning of a row, and recursively inside those two rows. So a checkpoint has whole tensors, which any program can
read on any number of ranks."""

from __future__ import annotations

import math
from typing import Any, Iterator, List, NamedTuple, Tuple

import torch
from torch import Tensor

from .part import Part, plain_tensor


class Box(NamedTuple):
    """A box of a tensor: its offset and size in each dimension."""

    offsets: Tuple[int, ...]
    sizes: Tuple[int, ...]


def boxes_of(shape: Tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The boxes that make up elements begin to end of a tensor, in their order."""
    if begin >= end:
        return
    if len(shape) == 0:
        yield Box((), ())
        return
    row, rest = math.prod(shape[1:]), shape[1:]
    first, last = -(-begin // row), end // row  # full rows
    if begin % row:
        stop = min(end - (first - 1) * row, row)
        yield from (Box((first - 1, *box.offsets), (1, *box.sizes))
                    for box in boxes_of(rest, begin - (first - 1) * row, stop))
    if first < last:
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    if end % row and last >= first:
        yield from (Box((last, *box.offsets), (1, *box.sizes)) for box in boxes_of(rest, 0, end - last * row))


def check_has_values(tensor: Any) -> None:
    """Raises, on all ranks, for a weight that was on meta when shard() was called, and has no values yet. Raises, on
    this rank, for one that was written whole in an open gathered()."""
    entry = tensor._part.entry_ref()
    if entry is None or plain_tensor(tensor).untyped_storage()._cdata != entry.data.untyped_storage()._cdata:
        return
    root = entry.root
    if root.group.uninitialized is not None and root.group.uninitialized.has(entry):
        root.group.uninitialized.check()
    if root.block is not None:
        root.block.refuse_unsaved(entry)


class Checkpointable:
    """The methods by which torch.distributed.checkpoint writes and reads a part."""

    _part: Part

    def _boxes(self) -> List[Box]:
        part = self._part
        if part.numel == 0:
            return [Box((0,) * len(part.shape), part.shape)] if part.cut.rank == 0 else []
        return list(boxes_of(part.shape, part.begin, part.end))

    def __create_write_items__(self, fqn: str, _: Any) -> List[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._check_group("save")
        check_has_values(self)
        properties = TensorProperties.create_from_tensor(plain_tensor(self))  # type: ignore[arg-type]
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._part.shape))
                for chunk in self.__create_chunk_list__()]

    def __create_chunk_list__(self) -> List[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self._check_group("load")
        return [ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
                for box in self._boxes()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        begin = 0
        for box in self._boxes():
            numel = math.prod(box.sizes)
            if tuple(index.offset) == box.offsets:
                return plain_tensor(self)[begin : begin + numel].view(box.sizes)  # type: ignore[arg-type]
            begin += numel
        raise ValueError(f"{self._part} has no piece that begins at {tuple(index.offset)}")

    def _check_group(self, call: str) -> None:
        """Raises if torch.distributed is not initialised: each rank would write the same files, as if it were alone."""
        if self._part.cut.size > 1 and not torch.distributed.is_initialized():
            raise RuntimeError(f"torch.distributed.checkpoint.{call}: {self._part} needs the other ranks, but "
                               "torch.distributed is not initialized: call torch.distributed.init_process_group("
                               "'libdc') first, or use libdc.torch's save_checkpoint() and load_checkpoint()")
