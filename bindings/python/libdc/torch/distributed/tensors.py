"""Converts PyTorch's tensors for libdc's collectives."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator, List, Optional, Sequence

import libdc
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..dtypes import DTYPES

# libdc's types for those PyTorch types that its collectives sum. A sum of uint8 has the same bits as one of int8.
_NATIVE_DTYPES = {dtype: DTYPES[dtype] for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16,
                                                     torch.int8, torch.int32, torch.int64)}
_NATIVE_DTYPES[torch.uint8] = libdc.DType.INT8
SUMMABLE = frozenset(_NATIVE_DTYPES)
_MODES: Any = torch._C._TorchDispatchModeKey
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_Tensor, _is_included = torch.Tensor, torch._C._dispatch_tls_is_dispatch_key_included
count_modes = torch._C._len_torch_dispatch_stack


def settled(tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """A new list, in which results of functional collectives are waited for and replaced by their plain tensors."""
    for tensor in tensors:
        if type(tensor) is not _Tensor:
            return [_settled(each) for each in tensors]
    return list(tensors)


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    functional: Any = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    return tensor


def refuse_tracing() -> None:
    """Raises if PyTorch traces or the tensors are fake: the call would move wrong data, and be missing in the graph."""
    records_early = _is_included(_PRE_DISPATCH)
    if not (records_early or count_modes()):
        return
    modes = [torch._C._get_dispatch_mode(key) for key in (_MODES.PROXY, _MODES.FAKE, _MODES.FUNCTIONAL)]
    if records_early:
        modes.append(torch._ops._get_dispatch_mode_pre_dispatch(_MODES.PROXY))
    for mode in modes:
        if mode is not None:
            raise RuntimeError(f"libdc: a process group's method was called under {type(mode).__name__}, which can't "
                               "record it, only collectives of torch.distributed._functional_collectives")


def check(name: str, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if type(tensor) is not _Tensor and (isinstance(tensor, FakeTensor)
                                           or is_traceable_wrapper_subclass(tensor)):
            raise ValueError(f"{name}: a tensor is a {type(tensor).__name__}, must have memory of its own, as "
                             "to_local() of a DTensor has")
        check_device(name, tensor)
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: a tensor's layout is {tensor.layout}, must be torch.strided")
        if tensor.is_quantized:
            raise ValueError(f"{name}: a tensor is quantized ({tensor.dtype}), whose scale would not go along: give "
                             "int_repr(), and the scale as a tensor of its own")
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{name}: a tensor is a lazy conjugate or negative, must have its values in memory: "
                             "resolve_conj() or resolve_neg() gives them")


def check_device(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: a tensor is on {tensor.device}, must be on the CPU, or for a collective on a card "
                         "of CUDA where PyTorch has NCCL; messages of cards need a group of the backend nccl")


def check_parts(name: str, parts: Sequence[torch.Tensor], rank: int, mine: torch.Tensor) -> None:
    """Checks the ranks' parts: all must have the type of this rank's tensor, and this rank's part must have its
    size."""
    for place, part in enumerate(parts):
        if part.dtype is not mine.dtype or place == rank and part.numel() != mine.numel():
            raise ValueError(f"{name}: the part of rank {place} has {part.numel()} elements of {part.dtype}, must have "
                             f"{f'{mine.numel()} of ' if place == rank else ''}{mine.dtype} as rank {rank}'s tensor")


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors have memory in common."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def flat_view(tensor: torch.Tensor) -> libdc.Tensor:
    """A contiguous tensor as a flat libdc.Tensor, which keeps it alive; as bytes if libdc lacks its type."""
    dtype = _NATIVE_DTYPES.get(tensor.dtype)
    count = tensor.numel()
    if dtype is None:
        return libdc.Tensor(tensor.data_ptr(), (count * tensor.element_size(),), libdc.DType.INT8, tensor)
    return libdc.Tensor(tensor.data_ptr(), (count,), dtype, tensor)


def flat_count(dtype: torch.dtype, numel: int) -> int:
    """The number of elements of flat_view()."""
    return numel if dtype in _NATIVE_DTYPES else numel * dtype.itemsize


class contiguous_output:
    """A context manager that yields the tensor itself, or a contiguous copy that is written back unless there is an
    error. keep: whether the copy needs the tensor's values. It is a class, since contextlib's generator is slower."""

    __slots__ = ("_tensor", "_data")

    def __init__(self, tensor: torch.Tensor, keep: bool = True) -> None:
        self._tensor = self._data = tensor
        if not tensor.is_contiguous():
            self._data = (tensor.contiguous() if keep else
                          torch.empty_like(tensor, memory_format=torch.contiguous_format))

    def __enter__(self) -> torch.Tensor:
        return self._data

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None and self._data is not self._tensor:
            self._tensor.copy_(self._data)


def flat_alias(tensors: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
    """The tensors as one flat tensor if they follow each other in memory; else None."""
    first = tensors[0]
    address = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address or not tensor.is_contiguous() or tensor.dtype is not first.dtype:
            return None
        address += tensor.numel() * tensor.element_size()
    storage = first.untyped_storage()
    if address > storage.data_ptr() + storage.nbytes():
        return None
    total = sum(tensor.numel() for tensor in tensors)
    return torch.as_strided(first.detach(), (total,), (1,), first.storage_offset())


@contextlib.contextmanager
def flat_output(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields a flat tensor to write to. Its parts become the tensors' values."""
    block = flat_alias(tensors)
    if block is not None:
        yield block
        return
    counts: List[int] = [tensor.numel() for tensor in tensors]
    block = tensors[0].new_empty(sum(counts))
    yield block
    for tensor, part in zip(tensors, block.split(counts)):
        tensor.copy_(part.view_as(tensor))


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors' values as one flat tensor to read from."""
    block = flat_alias(tensors)
    return block if block is not None else torch.cat([tensor.reshape(-1) for tensor in tensors])
