"""Imports and exports DLPack's legacy capsules by ctypes, to share memory with any array library."""

from __future__ import annotations

import ctypes
from typing import Any, Dict, Tuple

from .types import DType


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DLManagedTensor._fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]

CPU, CUDA, PINNED = 1, 2, 3
_HOST_DEVICES = (CPU, PINNED, 11)  # 11: ROCm's pinned memory
_TYPES: Dict[Tuple[int, int], DType] = {
    (0, 8): DType.INT8, (0, 16): DType.INT16, (0, 32): DType.INT32, (0, 64): DType.INT64, (1, 8): DType.UINT8,
    (2, 16): DType.FLOAT16, (2, 32): DType.FLOAT32, (2, 64): DType.FLOAT64, (4, 16): DType.BFLOAT16,
    (6, 8): DType.BOOL,
}  # fmt: skip
_CODES = {dtype: key for key, dtype in _TYPES.items()}
_NAME = b"dltensor"

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
# A capsule that is being destroyed has no references left, so its destructor gets its address.
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi))
_dying_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))


def read(array: Any) -> Tuple[int, Tuple[int, ...], Any, DType, Tuple[int, int], Any]:
    """(address, shape, strides or None, dtype, (device type, number), what keeps them alive) of an object with
    __dlpack__. For memory of a CUDA device nothing waits here: the caller orders the stream that reads it."""
    kind, number = array.__dlpack_device__()
    if kind not in (*_HOST_DEVICES, CUDA):
        raise TypeError(f"a tensor on DLPack device {int(kind)}, must be in host memory, or on a CUDA device")
    device = (CUDA, int(number)) if kind == CUDA else (PINNED if kind == PINNED else CPU, 0)
    capsule = array.__dlpack__(stream=-1) if kind == CUDA else array.__dlpack__()
    tensor = ctypes.cast(_pointer_of(capsule, _NAME), ctypes.POINTER(_DLManagedTensor)).contents.dl_tensor
    dtype = _TYPES.get((tensor.dtype.code, tensor.dtype.bits)) if tensor.dtype.lanes == 1 else None
    if dtype is None:
        raise TypeError(f"a tensor of DLPack's type {tensor.dtype.code} of {tensor.dtype.bits} bits, must be of "
                        f"{DType.allowed()}")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    # The capsule is never marked as used, so it frees the export when it is destroyed.
    return (tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, device, capsule


_exports: Dict[int, Any] = {}


# Tensors may be freed while the interpreter ends, after this module's globals. So these functions bind the objects that
# they need as defaults. A tensor has only a function's address, so a reference that is never released keeps the
# functions.
def _forget(managed: int, _exports: Dict[int, Any] = _exports) -> None:
    _exports.pop(managed, None)  # must come first: where a consumer has set an error, the first call raises it


def _forget_unused(capsule: int, _exports: Dict[int, Any] = _exports, _is_valid: Any = _dying_is_valid,
                   _pointer_of: Any = _dying_pointer_of, _name: bytes = _NAME) -> None:
    if _is_valid(capsule, _name):
        _exports.pop(_pointer_of(capsule, _name), None)


_delete = _Deleter(_forget)
_capsule_dies = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget_unused)
for _function in (_delete, _capsule_dies):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_function))


def write(address: int, shape: Tuple[int, ...], dtype: DType, owner: Any, device: Tuple[int, int] = (CPU, 0)) -> Any:
    """A capsule for contiguous memory of a device, which keeps `owner` alive. The last reference to it must not go
    while an error is set, since its destructor is Python code."""
    ndim = len(shape)
    lengths = (ctypes.c_int64 * max(ndim, 1))(*shape)
    strides = (ctypes.c_int64 * max(ndim, 1))()
    step = 1
    for i in range(ndim - 1, -1, -1):
        strides[i] = step
        step *= max(shape[i], 1)
    code, bits = _CODES[dtype]
    managed = _DLManagedTensor()
    managed.dl_tensor = _DLTensor(address, _DLDevice(*device), ndim, _DLDataType(code, bits, 1), lengths, strides, 0)
    managed.deleter = _delete
    key = ctypes.addressof(managed)
    _exports[key] = (managed, lengths, strides, owner)
    return _new(key, _NAME, ctypes.cast(_capsule_dies, ctypes.c_void_p))
