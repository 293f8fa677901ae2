"""Tensors in and out: views of the caller's arrays for the library, and the library's memory for the caller."""

from __future__ import annotations

import struct
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ._lib import ffi, gc_handle, lib, new_struct
from .arguments import counted
from .errors import Error
from .types import DType, Status

_TYPESTR = {
    "f4": DType.FLOAT32, "f8": DType.FLOAT64, "f2": DType.FLOAT16, "i1": DType.INT8, "i4": DType.INT32,
    "i8": DType.INT64, "u1": DType.UINT8, "i2": DType.INT16, "b1": DType.BOOL,
}  # fmt: skip
_ALLOWED = DType.allowed()
_TYPESTR_OF = {dtype: ("|" if text[1] == "1" else "<") + text for text, dtype in _TYPESTR.items()}
_FORMAT = {
    ("f", 4): DType.FLOAT32, ("d", 8): DType.FLOAT64, ("e", 2): DType.FLOAT16, ("b", 1): DType.INT8,
    ("i", 4): DType.INT32, ("l", 4): DType.INT32, ("l", 8): DType.INT64, ("q", 8): DType.INT64, ("B", 1): DType.UINT8,
    ("h", 2): DType.INT16, ("?", 1): DType.BOOL,
}  # fmt: skip

# Type codes of Python's struct module.
_CODE = {**{dtype: code for (code, _), dtype in _FORMAT.items()}, DType.INT32: "i", DType.INT64: "q",
         DType.BFLOAT16: "H"}
_MemoryView = memoryview  # Tensor.memoryview() hides the name

# Where memory is, as in DLPack: (device type, number).
Place = Tuple[int, int]
HOST: Place = (1, 0)
PINNED: Place = (3, 0)  # host memory that a CUDA device can read


def place_name(place: Place) -> str:
    return {HOST: "in host memory", PINNED: "in pinned host memory"}.get(place) or f"on cuda:{place[1]}"


class Buffer:
    """Reference-counted memory of the library; see dc_buffer. It lives as long as this object or anything made from
    it."""

    def __init__(self, pointer: Any, place: Place = HOST) -> None:
        """Takes over one reference."""
        self.place = place
        self._handle = gc_handle(pointer, lib.dc_buffer_release)

    @property
    def handle(self) -> int:
        """Address of the dc_buffer, for other bindings."""
        return int(ffi.cast("uintptr_t", self._handle))

    @property
    def data(self) -> int:
        """Address of the first byte; 0 once the library has taken the memory back."""
        return int(ffi.cast("uintptr_t", lib.dc_buffer_data(self._handle)))

    @property
    def nbytes(self) -> int:
        return int(lib.dc_buffer_bytes(self._handle))

    def tensor(self, shape: Sequence[int], dtype: Any, offset: int = 0) -> "Tensor":
        """A view of the memory that begins at byte `offset`."""
        dtype, shape = DType.of(dtype), tuple(int(n) for n in shape)
        need, have = _count(shape) * dtype.itemsize, self.nbytes - offset
        if not 0 <= need <= have or offset < 0:
            raise ValueError(f"shape = {shape} of {dtype.name.lower()} needs {counted(need, 'byte')}, the buffer has "
                             f"{have}")
        return Tensor(self.data + offset, shape, dtype, self, self.place)


class Tensor:
    """A contiguous tensor in the library's memory, which it keeps alive. from_dlpack() reads it in place, and so does
    every call of this package. In host memory, numpy.asarray() and users of the buffer protocol read it too. Before
    Python 3.12, which gives classes that protocol, use memoryview(). The views of a gathered parameter end with
    release_param. Memory of a CUDA device is ready in the order of the context's stream."""

    _export: Any = None  # the last capsule that __dlpack__() made

    def __init__(self, address: int, shape: Tuple[int, ...], dtype: DType, buffer: Any = None,
                 place: Place = HOST) -> None:
        self._address = address
        self.place = place
        self.shape = shape
        self.dtype = dtype
        self.buffer = buffer

    @property
    def nbytes(self) -> int:
        return _count(self.shape) * self.dtype.itemsize

    @property
    def data(self) -> int:
        """Address of the first element. Raises Error if the library has taken the memory back."""
        if isinstance(self.buffer, Buffer) and self.nbytes and not self.buffer.data:
            raise Error(Status.E_STATE, "this tensor's memory was given back: its parameter was released")
        return self._address

    @property
    def __array_interface__(self) -> Dict[str, Any]:
        if self.__dlpack_device__() != HOST:
            raise TypeError(f"this tensor is {place_name(self.place)}, where NumPy cannot read it: use from_dlpack()")
        if self.dtype is DType.BFLOAT16:
            raise TypeError("bfloat16 has no NumPy type: use from_dlpack(), or bits() for its 16-bit words")
        return {"version": 3, "shape": self.shape, "typestr": _TYPESTR_OF[self.dtype], "data": (self.data, False)}

    def numpy(self) -> Any:
        """A NumPy array of the same memory."""
        import numpy

        return numpy.asarray(self)

    def memoryview(self) -> "_MemoryView":
        """A writable memoryview of the memory, which it keeps alive. The view of an empty tensor has one dimension.
        float16 needs Python 3.12; bits() shows 16-bit floats as int16."""
        code = _CODE[self.dtype]
        if self.dtype is DType.BFLOAT16 or (code == "e" and sys.version_info < (3, 12)):
            raise TypeError(f"{self.dtype.name.lower()} has no type in memoryview: use bits() for its 16-bit words")
        data: Any = self._bytes()
        view: _MemoryView = data.cast(code, self.shape) if self.nbytes else data.cast(code)
        return view

    def __buffer__(self, _flags: int) -> "_MemoryView":
        return self.memoryview()

    def _bytes(self) -> "_MemoryView":
        if self.__dlpack_device__() != HOST:
            raise TypeError(f"this tensor is {place_name(self.place)}, which the host cannot read: use from_dlpack()")
        first = ffi.cast("char *", self.data) if self.nbytes else ffi.new("char[1]")
        return _MemoryView(ffi.buffer(ffi.gc(first, lambda _, keep=self.buffer: None), self.nbytes))

    def tolist(self) -> Any:
        """The elements as Python numbers, in nested lists; a single number for a tensor without dimensions."""
        count = _count(self.shape)
        values = struct.unpack(f"{count}{_CODE[self.dtype]}", self._bytes())
        if self.dtype is DType.BFLOAT16:  # the upper half of a float32
            values = struct.unpack(f"{count}f", struct.pack(f"{count}I", *(word << 16 for word in values)))
        return _nested(values, self.shape)

    def bits(self) -> "Tensor":
        """The memory of a 16-bit float tensor viewed as int16."""
        if self.dtype.itemsize != 2:
            raise TypeError(f"bits() of {self.dtype.name.lower()}: must be a type of 16 bits")
        return Tensor(self.data, self.shape, DType.INT16, self.buffer, self.place)

    def __dlpack__(self, *, stream: Any = None, copy: Optional[bool] = None, dl_device: Optional[Place] = None,
                   **_: Any) -> Any:
        """Always exports in place, so requests for a copy or another device are refused."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("a libdc.Tensor is exported in place: copy what from_dlpack() makes of it")
        from . import dlpack  # imported here to keep `import libdc` quick

        # A consumer that refuses the capsule drops it while its error is set, and Python code in the capsule's
        # destructor would lose that error. So the consumer's reference must not be the last.
        capsule = dlpack.write(self.data, self.shape, self.dtype, self.buffer, self.__dlpack_device__())
        self._export = _Export(capsule)  # returned below from the local, since another thread may replace this
        return capsule

    def __dlpack_device__(self) -> Place:
        return HOST if self.place == PINNED else self.place  # not every array library knows pinned memory

    def __repr__(self) -> str:
        return f"libdc.Tensor(shape={self.shape}, dtype={self.dtype.name.lower()})"


class _Export:
    """Keeps a capsule, and drops it in __del__(), around which Python saves a pending error. Tensor itself has no
    __del__(), since a step makes many tensors and exports few."""

    __slots__ = ("capsule",)

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __del__(self) -> None:
        self.capsule = None


def _count(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _nested(values: Tuple[Any, ...], shape: Sequence[int]) -> Any:
    if not shape:
        return values[0]
    step = _count(shape[1:])
    rows: List[Any] = [_nested(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]
    return rows


def _describe(array: Any) -> Tuple[int, Sequence[int], Optional[Sequence[int]], DType, bool, Any, Place, Any]:
    """(address, shape, strides in elements or None, dtype, writable, buffer, place, what keeps it alive)."""
    if isinstance(array, Tensor):
        buffer = array.buffer if isinstance(array.buffer, Buffer) else None
        return array.data, array.shape, None, array.dtype, True, buffer, array.place, array
    interface = getattr(array, "__array_interface__", None)
    if interface is not None and isinstance(interface.get("data"), tuple) and not _is_scalar(array):
        return (*_from_interface(array, interface), None, HOST, array)
    if hasattr(array, "__dlpack__"):
        if hasattr(array, "is_neg") and array.is_neg():  # PyTorch's DLPack export does not show this flag
            raise TypeError("a lazy negative, must have its values in memory: resolve_neg() gives them")
        from . import dlpack

        address, shape, strides, dtype, place, keep = dlpack.read(array)
        return address, shape, strides, dtype, True, None, place, keep
    try:
        view = memoryview(array)
    except TypeError:
        raise TypeError(f"a {type(array).__name__}, must have __dlpack__, __array_interface__ or the buffer protocol"
                        ) from None
    known = _FORMAT.get((view.format.lstrip("@=<"), view.itemsize))
    if known is None:
        raise TypeError(f"a buffer of format {view.format!r}, must be of {_ALLOWED}")
    if not view.c_contiguous:
        raise TypeError("a buffer that is not contiguous, must be contiguous")
    address = int(ffi.cast("uintptr_t", ffi.from_buffer(view)))
    return address, view.shape or (), None, known, not view.readonly, None, HOST, view


def _is_scalar(array: Any) -> bool:
    # A NumPy scalar's interface shows a temporary's memory; its buffer is its own.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(array, numpy.generic)


def _from_interface(array: Any, interface: Dict[str, Any]
                    ) -> Tuple[int, Sequence[int], Optional[Sequence[int]], DType, bool]:
    kind = interface["typestr"]
    dtype = _TYPESTR.get(kind[1:])
    if kind == "<V2" and getattr(getattr(array, "dtype", None), "name", "") == "bfloat16":
        dtype = DType.BFLOAT16
    if dtype is None or kind[0] == ">":
        raise TypeError(f"an array of type {kind!r}, must be of {_ALLOWED} in this machine's order of bytes")
    address, readonly = interface["data"]
    strides = interface.get("strides")
    if strides is not None:
        strides = _in_elements(strides, dtype.itemsize)
    return address, interface["shape"], strides, dtype, not readonly


def _in_elements(strides: Sequence[int], itemsize: int) -> Tuple[int, ...]:
    if any(stride % itemsize for stride in strides):
        raise TypeError(f"an array with strides of {tuple(strides)} bytes, must be multiples of its elements' "
                        f"{itemsize}")
    return tuple(stride // itemsize for stride in strides)


def fill(target: Any, array: Any, writable: bool = False, name: str = "an array",
         places: Sequence[Place] = (HOST,)) -> Any:
    """Describes an array in a dc_tensor, and returns the object that must live as long. places: where the array may
    be."""
    try:
        address, shape, strides, dtype, can_write, buffer, place, keep = _describe(array)
    except TypeError as error:
        raise TypeError(f"{name} is {error}") from None
    if place not in places and not (place == PINNED and HOST in places):
        raise TypeError(f"{name} is {place_name(place)}, must be {' or '.join(map(place_name, places))}")
    if writable and not can_write:
        raise TypeError(f"{name} is read-only, must be writable")
    c_shape = ffi.new("int64_t[]", list(shape)) if len(shape) else ffi.NULL
    c_strides = ffi.new("int64_t[]", list(strides)) if strides else ffi.NULL
    target.data = ffi.cast("void *", address)
    target.shape, target.strides, target.ndim = c_shape, c_strides, len(shape)
    target.dtype = dtype
    target.buffer = buffer._handle if buffer is not None else ffi.NULL
    return c_shape, c_strides, keep


class View:
    """A dc_tensor for a call: `c` is the pointer, NULL for None. It must live as long as the call reads the memory."""

    __slots__ = ("c", "keep")

    def __init__(self, array: Any, writable: bool = False, name: str = "an array",
                 places: Sequence[Place] = (HOST,)) -> None:
        self.c: Any = ffi.NULL
        self.keep: Any = None
        if array is not None:
            self.c = new_struct("dc_tensor")
            self.keep = fill(self.c, array, writable, name, places)


def output() -> Any:
    """An empty dc_tensor for the library to fill in."""
    return new_struct("dc_tensor")


def result(out: Any, keep: Any = None, place: Place = HOST) -> Tensor:
    """The library's output as a Tensor that holds a reference to its memory, or to `keep` if it has no buffer."""
    shape = tuple(out.shape[i] for i in range(out.ndim))
    buffer = Buffer(lib.dc_buffer_retain(out.buffer), place) if out.buffer else keep
    return Tensor(int(ffi.cast("uintptr_t", out.data)), shape, DType(out.dtype), buffer, place)

