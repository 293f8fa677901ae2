"""Reads folders of torch.distributed.checkpoint; each rank reads its own part.

A rank's part of a parameter is a range of the whole's elements. The folder's storage reader cuts boxes out of the saved
pieces. The rows that contain the range are such a box."""

from __future__ import annotations

import enum
import io
import math
import os
import pickle
from typing import Any, Dict, Sequence

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from . import crc32c
from .safetensors_file import ReadRange


class _Rows(checkpoint.DefaultLoadPlanner):
    """A load planner that makes the storage reader write into rows of one tensor."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def resolve_tensor(self, read_item: Any) -> Tensor:
        rows = self.rows
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            rows = rows.narrow(dim, begin, length)
        return rows

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        """Does nothing: the tensor is a view of the rows."""


_PICKLED = {  # the types in a description, besides torch's data types
    ("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "BytesStorageMetadata", "_MEM_FORMAT_ENCODING")} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath")}


def _member(kind: Any, name: str) -> Any:
    """Stands in for getattr(), by which the first releases of Python 3.11 pickle an enum's member."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it reads {name} of {kind!r}, which is no part of a description")


class _Unpickler(pickle.Unpickler):
    """Loads only the types of a description. A pickle may call any function that it names, and torch's own reader
    allows that."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _PICKLED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a description")


def _read_metadata(path: str) -> Any:
    try:
        with open(os.path.join(path, ".metadata"), "rb") as file:
            text = file.read()
        metadata = _Unpickler(io.BytesIO(text)).load()
        for info in metadata.storage_data.values():
            name = info.relative_path
            if os.path.isabs(name) or ".." in name.split("/"):
                raise ValueError(f"it names the file {name!r}, must be one in the folder")
        return metadata, (len(text), crc32c.checksum(text))
    except Exception as error:
        raise ValueError(f"{path} is no folder of torch.distributed.checkpoint: its .metadata cannot be read "
                         f"({type(error).__name__}: {error})") from None


class Folder:
    """A folder with the interface of safetensors_file.File, but without checksums."""

    metadata: Dict[str, str] = {}

    def __init__(self, path: str) -> None:
        self.path = path
        self._reader = checkpoint.FileSystemReader(path)
        metadata, self.identity = _read_metadata(path)
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self._tensors: Dict[str, TensorStorageMetadata] = {
            name: of for name, of in metadata.state_dict_metadata.items() if isinstance(of, TensorStorageMetadata)}
        self.tensors = {name: torch.empty(of.size, dtype=of.properties.dtype, device="meta")
                        for name, of in self._tensors.items()}

    def close(self) -> None:
        """Does nothing: files are open only while they are read."""

    def read(self, name: str, begin: int, into: Tensor) -> ReadRange:
        """Reads a tensor's elements from begin on into a flat tensor of its type, in the host's memory."""
        whole, end = self.tensors[name], begin + into.numel()
        if into.numel():
            width = math.prod(whole.shape[1:])
            first = begin // width
            count = -(-end // width) - first
            offsets, sizes = [first, *[0] * (whole.dim() - 1)], [count, *whole.shape[1:]]
            if whole.dim() == 0:
                offsets, sizes, first = [], [], 0
            box = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            items = create_read_items_for_chunk_list(name, self._tensors[name], [box])
            rows = torch.empty(sizes, dtype=whole.dtype)
            covered = sum(math.prod(item.lengths) for item in items)
            if covered != rows.numel():
                raise ValueError(f"{self.path} has {covered} of {rows.numel()} elements of {name}")
            self._reader.read_data(checkpoint.LoadPlan(items), _Rows(rows)).wait()
            into.copy_(rows.view(-1)[begin - first * width :][: into.numel()])
        return ReadRange(begin, end, 0)

    def check(self, name: str, parts: Sequence[ReadRange]) -> None:
        """Does nothing: the folder has no checksums to compare."""
