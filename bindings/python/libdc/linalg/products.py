"""Kronecker products, and products of matrices."""

from __future__ import annotations

import operator
import os
import sys
from typing import Any, NamedTuple, Optional, Sequence, Tuple, Union

from .._lib import ffi, lib, new_struct
from ..arguments import c_double, check_size
from ..errors import Error, check
from ..tensors import HOST
from ..types import DType, Status
from .handle import Array, Handle, default, empty, handle_ptr, output_array


def kron(a: Any, b: Any, *, out: Any = None, max_bytes: Optional[int] = None, handle: Optional[Handle] = None) -> Any:
    """The whole Kronecker product. max_bytes: a larger product is an error."""
    left, right = Array(a, "a", handle), Array(b, "b", handle)
    shape = tuple(m * n for m, n in zip(left.shape, right.shape))
    nbytes = left.dtype.itemsize
    for length in shape:
        nbytes *= length
    if max_bytes is not None and nbytes > check_size("max_bytes", max_bytes):
        raise Error(Status.E_NO_MEMORY, f"kron: the product has {nbytes} bytes, max_bytes = {max_bytes} allows less")
    result = output_array(out, a, shape, left.dtype, handle)
    check(lib.dc_kron(handle_ptr(handle), left.c, right.c, result.c))
    return result.array


def kron_apply(a: Any, b: Any, x: Any, *, out: Any = None, handle: Optional[Handle] = None) -> Any:
    """A X B^T: kron(a, b) times x flattened row by row, without forming the Kronecker product."""
    left, right, given = Array(a, "a", handle), Array(b, "b", handle), Array(x, "x", handle)
    result = output_array(out, x, (*given.shape[:-2], *left.shape[:1], *right.shape[:1]), given.dtype, handle)
    check(lib.dc_kron_apply(handle_ptr(handle), left.c, right.c, given.c, result.c))
    return result.array


def kron_solve(a_vectors: Any, a_values: Any, b_vectors: Any, b_values: Any, damping: float, x: Any, *,
               out: Any = None, handle: Optional[Handle] = None) -> Any:
    """(kron(A, B) + damping I)^-1 x from the eigendecompositions of A and B."""
    bases = dict(a_vectors=a_vectors, a_values=a_values, b_vectors=b_vectors, b_values=b_values)
    arrays = [Array(array, name, handle) for name, array in bases.items()]
    given = Array(x, "x", handle)
    result = output_array(out, x, given.shape, given.dtype, handle)
    check(lib.dc_kron_solve(handle_ptr(handle), *(array.c for array in arrays), c_double("damping", damping),
                            given.c, result.c))
    return result.array


def _matrix_shape(name: str, value: Any) -> Tuple[int, ...]:
    try:
        shape = tuple(operator.index(length) for length in value)
    except TypeError:
        raise TypeError(f"{name} = {value!r}, must be rows and columns, two integers") from None
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"{name} = {value!r}, must be rows and columns, 1 or more of each")
    return shape


def kron_nearest(x: Any, a_shape: Sequence[int], b_shape: Sequence[int], *,
                 handle: Optional[Handle] = None) -> Tuple[Any, Any, float]:
    """(a, b, residual): the Kronecker product nearest to x, and |x - kron(a, b)| / |x|."""
    given = Array(x, "x", handle)
    shapes = _matrix_shape("a_shape", a_shape), _matrix_shape("b_shape", b_shape)
    a, b = (output_array(None, x, shape, given.dtype, handle) for shape in shapes)
    residual = ffi.new("double *")
    check(lib.dc_kron_nearest(handle_ptr(handle), given.c, a.c, b.c, residual))
    return a.array, b.array, float(residual[0])


def matmul(a: Any, b: Any, *, alpha: float = 1, beta: float = 0, out: Any = None, out_dtype: Any = None,
           handle: Optional[Handle] = None) -> Any:
    """alpha A B + beta out for matrices or batches of them. A matrix without a batch dimension is used for every batch
    entry."""
    left, right = Array(a, "a", handle), Array(b, "b", handle)
    if out is None and beta != 0:
        raise ValueError(f"beta = {beta}, but there is no out that it could scale")
    batch = left.shape[:-2] or right.shape[:-2]
    dtype = DType.of(out_dtype) or left.dtype
    result = output_array(out, a, (*batch, *left.shape[-2:-1], *right.shape[-1:]), dtype, handle)
    check(lib.dc_batch_matmul(handle_ptr(handle), left.c, right.c, c_double("alpha", alpha), c_double("beta", beta),
                              result.c))
    return result.array


class FileMatrix(NamedTuple):
    """A row-major matrix in an open file, for matmul_bounded(); offset in bytes."""

    file: Any
    shape: Tuple[int, int]
    dtype: Any = "float32"
    offset: int = 0


def _is_map_of(address: int, path: str) -> bool:
    """Whether the memory maps the file that is at this path now, since another file may have replaced the mapped
    one."""
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            bounds, _, _, _, inode = line.split(maxsplit=5)[:5]
            begin, end = (int(bound, 16) for bound in bounds.split(b"-"))
            if begin <= address < end:
                return os.path.exists(path) and os.stat(path).st_ino == int(inode)
    return False


def _from_memmap(array: Any, writable: bool) -> Any:
    """Replaces a contiguous NumPy memory map by its region of the file, so that reading leaves no mapped pages in
    memory. Other arrays are returned as they are, and so are copy-on-write maps, maps of a replaced file, and read-only
    maps that are to be written."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(array, numpy.memmap) or not array.flags.c_contiguous or array.ndim != 2:
        return array
    base = array
    while isinstance(base.base, numpy.memmap):
        base = base.base
    if base.filename is None or array.mode == "c" or (writable and not array.flags.writeable):
        return array
    address = array.__array_interface__["data"][0]
    if not _is_map_of(address, os.fspath(base.filename)):
        return array
    skip = address - base.__array_interface__["data"][0]
    return FileMatrix(os.fspath(base.filename), array.shape, array.dtype, base.offset + skip)


class _Source:
    """A dc_matrix_source, and the objects that it needs. It opens files that are given by path. array: the caller's
    array, or None if the matrix is in a file."""

    def __init__(self, matrix: Any, name: str, handle: Optional[Handle] = None, writable: bool = False) -> None:
        self.c = new_struct("dc_matrix_source")
        self._own_fd = -1
        self.array: Any = None
        matrix = _from_memmap(matrix, writable)
        if isinstance(matrix, FileMatrix):
            self.dtype, self.shape = DType.of(matrix.dtype), tuple(matrix.shape)
            self._keep = ffi.new("int64_t[]", list(matrix.shape))
            self._tensor = new_struct("dc_tensor")
            self._tensor.shape, self._tensor.ndim, self._tensor.dtype = self._keep, len(matrix.shape), self.dtype
            self.c.in_file, self.c.offset = 1, matrix.offset
            self.c.fd = self._descriptor(matrix.file, writable)
        else:
            given = Array(matrix, name, handle, writable)
            self.array, self.dtype, self.shape = matrix, given.dtype, given.shape
            self._keep, self._tensor = given, given.c
        self.c.tensor = self._tensor

    def _descriptor(self, file: Any, writable: bool) -> int:
        if isinstance(file, int):
            return file
        if hasattr(file, "fileno"):
            return int(file.fileno())
        self._own_fd = os.open(file, os.O_RDWR if writable else os.O_RDONLY)
        return self._own_fd

    def close(self) -> None:
        if self._own_fd >= 0:
            os.close(self._own_fd)
            self._own_fd = -1

    def __del__(self) -> None:
        self.close()


def matmul_bounded(a: Any, b: Any, budget_bytes: int, *, out: Union[Any, FileMatrix] = None,
                   handle: Optional[Handle] = None) -> Any:
    """A B with at most budget_bytes of the handle's device memory beside the operands. Each of a, b and out is an array
    on that device, a FileMatrix, or a NumPy memory map. A map is read and written as the file it maps; one of mode "c"
    counts as an array. If all three are in memory, the budget is not used. If it is too small, Error.needed has the
    smallest that suffices."""
    left, right = _Source(a, "a", handle), _Source(b, "b", handle)
    device = (default() if handle is None else handle).device
    files_kind = a if device.place == HOST else None
    like = next((source.array for source in (left, right) if source.array is not None), files_kind)
    dtype = DType.FLOAT64 if left.dtype is DType.FLOAT64 else DType.FLOAT32
    result = empty(like, (*left.shape[:1], *right.shape[1:]), dtype, device) if out is None else out
    into, needed = _Source(result, "out", handle, True), ffi.new("int64_t *")
    try:
        check(lib.dc_matmul_bounded(handle_ptr(handle), left.c, right.c, into.c, budget_bytes, needed))
    except Error as error:
        error.needed = int(needed[0])  # type: ignore[attr-defined]
        raise
    finally:
        for source in (left, right, into):
            source.close()
    return result
