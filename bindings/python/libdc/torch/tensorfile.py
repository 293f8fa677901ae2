"""Files in the safetensors format, of which each rank writes and reads its own bytes.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON text, the text, which
tells each tensor's type, shape and place, and the tensors' bytes. The package of that name writes whole tensors from
one process; here any range of elements is written, and what is read is a view of the mapped file."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import struct
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "I64": torch.int64,
           "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
           "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the format's own limit
_STAGE = 64 << 20  # bytes of a card's memory that are copied at once


class Described(NamedTuple):
    """A tensor of a file."""

    dtype: str  # the format's name of the type
    shape: Tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


def type_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise ValueError(f"{name} is {dtype}, must be {', '.join(str(known)[6:] for known in _NAMES)}")
    return _NAMES[dtype]


class Layout:
    """Where each tensor's bytes lie. Widest types first, so that all are aligned."""

    def __init__(self, tensors: Mapping[str, Described], metadata: Mapping[str, str]) -> None:
        self._begin: Dict[str, int] = {}
        text: Dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for name, of in sorted(tensors.items(), key=lambda item: (-_DTYPES[item[1].dtype].itemsize, item[0])):
            self._begin[name] = end
            end += of.nbytes
            text[name] = {"dtype": of.dtype, "shape": of.shape, "data_offsets": [self._begin[name], end]}
        packed = json.dumps(text, ensure_ascii=False, separators=(",", ":")).encode()
        packed += b" " * (-len(packed) % 8)
        if len(packed) > _LONGEST_HEADER:
            raise ValueError(f"the tensors' description has {len(packed)} bytes, the format allows {_LONGEST_HEADER}")
        self.header = struct.pack("<Q", len(packed)) + packed
        self.nbytes = len(self.header) + end

    def place(self, name: str) -> int:
        """Of the tensor's first byte in the file."""
        return len(self.header) + self._begin[name]


def reserve(fd: int, nbytes: int) -> None:
    """Gives a file its length, and where the file system can, its blocks: a full disk is an error here."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


def write(fd: int, place: int, elements: Tensor) -> None:
    """Writes a flat tensor's bytes, of any device's memory."""
    for piece in elements.split(max(1, _STAGE // elements.element_size())) if elements.is_cuda else (elements,):
        here = piece.cpu().contiguous()
        nbytes = here.numel() * here.element_size()
        write_bytes(fd, place, memoryview((ctypes.c_char * nbytes).from_address(here.data_ptr())))
        place += nbytes


def write_bytes(fd: int, place: int, data: Any) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view[: 1 << 30], place)
        view, place = view[written:], place + written


def read(path: str) -> Tuple[Dict[str, Tensor], Dict[str, str]]:
    """A file's tensors, which are pages of the file that are not read yet, and its metadata. An index of several
    files (`model.safetensors.index.json`) stands for all of them."""
    if not path.endswith(".json"):
        return _read_one(path)
    with open(path, encoding="utf-8") as file:
        try:
            names = sorted(set(json.load(file)["weight_map"].values()))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{path} is no index of safetensors files: it has no weight_map") from None
    tensors: Dict[str, Tensor] = {}
    metadata: Dict[str, str] = {}
    for name in names:
        more, told = _read_one(os.path.join(os.path.dirname(path), name))
        tensors.update(more)
        metadata.update(told)
    return tensors, metadata


def _read_one(path: str) -> Tuple[Dict[str, Tensor], Dict[str, str]]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"{path} is no safetensors file: its first 8 bytes tell of {length} bytes of description, "
                             f"and it has {size} bytes in all")
        try:
            told = json.loads(file.read(length))
            metadata = told.pop("__metadata__", {})
            found = list(_check(told, size - 8 - length))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is no safetensors file, or a part of one: {error}") from None
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _view(pages, 8 + length + begin, of) for name, begin, of in found}, metadata


def _check(told: Mapping[str, Any], nbytes: int) -> Iterator[Tuple[str, int, Described]]:
    """What a description says, if the file's bytes bear it out."""
    for name, of in told.items():
        dtype, shape, (begin, end) = of["dtype"], of["shape"], of["data_offsets"]
        if dtype not in _DTYPES:
            raise ValueError(f"{name} has type {dtype}")
        if not all(isinstance(n, int) and n >= 0 for n in [*shape, begin, end]):
            raise ValueError(f"{name} has shape {shape} at {begin} to {end}")
        described = Described(dtype, tuple(shape))
        if not begin <= end <= nbytes or end - begin != described.nbytes:
            raise ValueError(f"{name} is {dtype} {shape} at bytes {begin} to {end} of {nbytes}")
        yield name, begin, described


def _view(pages: mmap.mmap, place: int, of: Described) -> Tensor:
    dtype = _DTYPES[of.dtype]
    if of.nbytes == 0:
        return torch.empty(of.shape, dtype=dtype)
    return torch.frombuffer(pages, dtype=torch.uint8, count=of.nbytes, offset=place).view(dtype).view(of.shape)


def cover(pieces: Sequence[Tuple[int, int]], count: int) -> List[Tuple[int, int]]:
    """The elements of 0 to count that no piece has, as ranges."""
    missing, reached = [], 0
    for begin, end in sorted(pieces):
        if begin > reached:
            missing.append((reached, begin))
        reached = max(reached, end)
    return missing + ([(reached, count)] if reached < count else [])
