"""Files in the safetensors format, in which each rank writes and reads its own bytes.

The format (https://github.com/huggingface/safetensors) is the length of a JSON text in eight bytes, the text, which has
each tensor's type, shape and offset, and the tensors' bytes. The package safetensors writes whole tensors from one
process; this module writes and reads any range of elements.

libdc adds two entries to the metadata: the CRC-32C of each tensor's bytes, and that of the header, computed with zeros
in place of its own digits. Files without them are read, too."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import re
import stat
import struct
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import crc32c

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "I64": torch.int64,
           "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
           "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool}
_TYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_STAGING_BYTES = 64 << 20  # bytes that are copied from a card at once
_CHUNK = 1 << 19  # bytes that are moved and checksummed while they are in the cache
_HEADER_SUM, _SUMS = "libdc.header_crc32c", "libdc.crc32c"  # keys of the metadata
_HEADER_SUM_TEXT = re.compile(rb'"libdc\.header_crc32c":"([0-9a-f]{8})"')
_UNKNOWN_SUM = "0" * 8  # a checksum that is not known yet


class TensorInfo(NamedTuple):
    """A tensor of a file."""

    dtype: str  # the format's name of the type
    shape: Tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


def type_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _TYPE_NAMES:
        raise ValueError(f"{name} is {dtype}, must be {', '.join(str(known)[6:] for known in _TYPE_NAMES)}")
    return _TYPE_NAMES[dtype]


class Layout:
    """Where each tensor's bytes are in the file. Tensors of the widest types come first, so that all are aligned."""

    def __init__(self, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> None:
        self._begin: Dict[str, int] = {}
        self._text: Dict[str, Any] = {"__metadata__": {}}
        self._metadata = dict(metadata)
        self.tensors = dict(tensors)
        end = 0
        for name, of in sorted(tensors.items(), key=lambda item: (-_DTYPES[item[1].dtype].itemsize, item[0])):
            self._begin[name] = end
            end += of.nbytes
            self._text[name] = {"dtype": of.dtype, "shape": of.shape, "data_offsets": [self._begin[name], end]}
        self._header_nbytes = len(self.header(dict.fromkeys(tensors, 0)))
        self.nbytes = self._header_nbytes + end

    def header(self, sums: Mapping[str, int]) -> bytes:
        """The file's header. Its length does not depend on the checksums' values."""
        sums_text = json.dumps({name: f"{sums[name]:08x}" for name in sorted(sums)}, ensure_ascii=False,
                               separators=(",", ":"))
        self._text["__metadata__"] = {_HEADER_SUM: _UNKNOWN_SUM, **self._metadata, _SUMS: sums_text}
        packed = json.dumps(self._text, ensure_ascii=False, separators=(",", ":")).encode()
        packed += b" " * (-len(packed) % 8)
        if len(packed) > _MAX_HEADER_BYTES:
            raise ValueError(f"the tensors' description has {len(packed)} bytes, the format allows {_MAX_HEADER_BYTES}")
        packed = struct.pack("<Q", len(packed)) + packed
        return packed.replace(f'"{_HEADER_SUM}":"{_UNKNOWN_SUM}"'.encode(),
                              f'"{_HEADER_SUM}":"{crc32c.checksum(packed):08x}"'.encode(), 1)

    def offset(self, name: str) -> int:
        """The offset of the tensor's first byte in the file."""
        return self._header_nbytes + self._begin[name]


def reserve(fd: int, nbytes: int) -> None:
    """Sets a file's length and, if the file system can, allocates its blocks, so that a full disk is an error here."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


def write(fd: int, offset: int, elements: Tensor) -> int:
    """Writes the bytes of a flat tensor on any device, and returns their checksum."""
    crc = 0
    for piece in elements.split(max(1, _STAGING_BYTES // elements.element_size())) if elements.is_cuda else (elements,):
        host = piece.cpu().contiguous().resolve_conj().resolve_neg()
        crc = write_bytes(fd, offset, _bytes_of(host), crc)
        offset += host.numel() * host.element_size()
    return crc


def write_bytes(fd: int, offset: int, data: Any, crc: int = 0) -> int:
    """Writes bytes. Returns their checksum, continued from crc, that of the bytes before them."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view[:_CHUNK], offset)
        crc = crc32c.checksum(view[:written], crc)
        view, offset = view[written:], offset + written
    return crc


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, which the caller must keep alive."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


class ReadRange(NamedTuple):
    """A range of a tensor's elements that was read, and its checksum."""

    begin: int
    end: int
    crc: int


class File:
    """A file and its description. Ranges of tensors are read directly into the caller's memory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sums: Optional[Dict[str, int]] = None  # each tensor's checksum; None: the file has none
        self.metadata: Dict[str, str] = {}
        self.tensors: Dict[str, Tensor] = {}  # meta tensors, for types and shapes
        self._fd = _open(path)
        try:
            self._describe()
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1

    def _describe(self) -> None:
        size = os.fstat(self._fd).st_size
        start = os.pread(self._fd, 8, 0)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{self.path} is no safetensors file: its first 8 bytes tell of {length} bytes of "
                             f"description, and it has {size} bytes in all")
        text = bytearray(length)
        self._fill(memoryview(text), 8)
        # The header of a file of libdc has checksums of all tensors, so this identifies their values too.
        self.identity = size, crc32c.checksum(start + text)
        is_summed = self._check_header(start + text)
        try:
            description = json.loads(text.decode(), object_pairs_hook=_unique)
            if not isinstance(description, dict):
                raise ValueError("its description is no object of JSON")
            self.metadata = description.pop("__metadata__", {})
            values = self.metadata.values() if isinstance(self.metadata, dict) else [None]
            if not all(isinstance(value, str) for value in values):
                raise ValueError("its metadata are no strings")
            found = list(_validate(description))
            _check_tiling(found, size - 8 - length)
            if _SUMS in self.metadata or _HEADER_SUM in self.metadata:
                self._read_sums(description, is_summed)
            self.tensors = {name: torch.empty(of.shape, dtype=_DTYPES[of.dtype], device="meta")
                            for name, _, of in found}
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:  # torch's: of a shape
            raise ValueError(f"{self.path} is no safetensors file, or a part of one: {error}") from None
        self._offsets = {name: 8 + length + begin for name, begin, _ in found}

    def _check_header(self, header: bytes) -> bool:
        """Whether there is a checksum to compare the header with."""
        recorded = _HEADER_SUM_TEXT.search(header)
        if recorded is None:
            return False
        crc = crc32c.checksum(header[: recorded.start(1)] + _UNKNOWN_SUM.encode() + header[recorded.end(1) :])
        if crc != int(recorded[1], 16):
            raise ValueError(f"{self.path} is damaged: its header has the checksum {crc:08x}, must be "
                             f"{recorded[1].decode()}")
        return True

    def _read_sums(self, description: Mapping[str, Any], is_summed: bool) -> None:
        if _SUMS not in self.metadata or not is_summed:
            raise ValueError("it lacks the checksum of its header, or those of its tensors")
        self.sums = {name: int(text, 16) for name, text in json.loads(self.metadata[_SUMS]).items()}
        if self.sums.keys() != description.keys():
            names = sorted(self.sums.keys() ^ description.keys())
            raise ValueError(f"{names[0]} is a tensor without a checksum, or a checksum without a tensor")

    def _fill(self, view: memoryview, offset: int) -> int:
        """Fills the view from the file, and returns the checksum of its bytes."""
        crc = 0
        while view:
            got = os.preadv(self._fd, [view[:_CHUNK]], offset)
            if got == 0:
                raise ValueError(f"{self.path} has become shorter while it was read: it ends at byte {offset}")
            if self.sums is not None:
                crc = crc32c.checksum(view[:got], crc)
            view, offset = view[got:], offset + got
        return crc

    def read(self, name: str, begin: int, into: Tensor) -> ReadRange:
        """Reads a tensor's elements from begin on into a flat tensor of the same type in host memory."""
        crc = self._fill(_bytes_of(into), self._offsets[name] + begin * into.element_size())
        return ReadRange(begin, begin + into.numel(), crc)

    def _sum(self, name: str, begin: int, end: int) -> ReadRange:
        """The checksum of elements that no rank has read."""
        dtype = self.tensors[name].dtype
        chunk, crc = torch.empty(min(_CHUNK // dtype.itemsize, end - begin), dtype=dtype), 0
        for at in range(begin, end, max(1, chunk.numel())):
            part = self.read(name, at, chunk[: end - at])
            crc = crc32c.join(crc, part.crc, (part.end - at) * dtype.itemsize)
        return ReadRange(begin, end, crc)

    def check(self, name: str, parts: Sequence[ReadRange]) -> None:
        """Compares a tensor with its checksum, which is joined from those of parts. This rank reads elements that are
        in no part."""
        if self.sums is None:
            return
        tensor, crc, reached = self.tensors[name], 0, 0
        for part in sorted(set(parts)) + [ReadRange(tensor.numel(), tensor.numel(), 0)]:
            if part.begin > reached:
                crc = crc32c.join(crc, self._sum(name, reached, part.begin).crc,
                                  (part.begin - reached) * tensor.element_size())
            elif part.begin < reached:
                part = self._sum(name, reached, max(reached, part.end))
            crc = crc32c.join(crc, part.crc, (part.end - part.begin) * tensor.element_size())
            reached = max(reached, part.end)
        if crc != self.sums[name]:
            raise ValueError(f"{self.path} is damaged: {name} has the checksum {crc:08x}, must be "
                             f"{self.sums[name]:08x}")


def _open(path: str) -> int:
    if "\0" in path:
        raise ValueError(f"{path!r} is no file's name: it has a NUL")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would block
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{path} is no safetensors file: it is a folder, a pipe or a device")
    return fd


def find_in_folder(folder: str) -> Optional[str]:
    """The file with a model's weights in a Hugging Face folder, or its index."""
    paths = (os.path.join(folder, name) for name in ("model.safetensors", "model.safetensors.index.json"))
    return next(filter(os.path.isfile, paths), None)


def open_files(path: str) -> List[File]:
    """Opens a file, or those of an index (`model.safetensors.index.json`). The caller closes them."""
    if not path.endswith(".json"):
        return [File(path)]
    with open(_open(path), encoding="utf-8") as file:
        try:
            names = sorted(set(json.load(file)["weight_map"].values()))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(f"{path} is no index of safetensors files: it has no weight_map") from None
    for name in names:
        if not isinstance(name, str) or os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
            raise ValueError(f"{path} names the file {name!r}, must be one in its own folder")
    files: List[File] = []
    found: Dict[str, str] = {}  # the file that has a tensor
    try:
        for name in names:
            files.append(File(os.path.join(os.path.dirname(path), name)))
            for tensor in files[-1].tensors:
                if found.setdefault(tensor, name) != name:
                    raise ValueError(f"{path} names the files {found[tensor]} and {name}, which both have {tensor}")
    except BaseException:
        for opened in files:
            opened.close()
        raise
    return files


def _unique(pairs: Sequence[Tuple[str, Any]]) -> Dict[str, Any]:
    """A JSON object. Raises for equal names, of which json alone would keep the last."""
    result: Dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"it has {name!a} twice")
        result[name] = value
    return result


def _validate(description: Mapping[str, Any]) -> Iterator[Tuple[str, int, TensorInfo]]:
    """The tensors of a description, and the offset of each."""
    for name, of in description.items():
        dtype, shape, (begin, end) = of["dtype"], of["shape"], of["data_offsets"]
        if dtype not in _DTYPES:
            raise ValueError(f"{name} has type {dtype}")
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in [*shape, begin, end]):
            raise ValueError(f"{name} has shape {shape} at {begin} to {end}")
        described = TensorInfo(dtype, tuple(shape))
        if end - begin != described.nbytes:
            raise ValueError(f"{name} is {dtype} {shape} at bytes {begin} to {end}")
        yield name, begin, described


def _check_tiling(found: Sequence[Tuple[str, int, TensorInfo]], nbytes: int) -> None:
    """Raises for gaps and overlaps, which the format forbids: the file is damaged, or other readers would see other
    tensors."""
    reached = 0
    for name, begin, of in sorted(found, key=lambda item: (item[1], item[2].nbytes)):
        if begin != reached:
            raise ValueError(f"{name} begins at byte {begin}, must be {reached}, where the tensors before it end")
        reached += of.nbytes
    if reached != nbytes:
        raise ValueError(f"its tensors have {reached} bytes, and the file has {nbytes} for them")


def missing_ranges(pieces: Sequence[Tuple[int, int]], count: int) -> List[Tuple[int, int]]:
    """The ranges within 0 to count that no piece covers."""
    missing, reached = [], 0
    for begin, end in sorted(pieces):
        if begin > reached:
            missing.append((reached, begin))
        reached = max(reached, end)
    return missing + ([(reached, count)] if reached < count else [])
