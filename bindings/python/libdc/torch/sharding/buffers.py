"""Tensors of a model's state that are not sharded, such as BatchNorm's statistics: each rank has its own."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Tuple

import libdc
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import devices
from .meta_init import is_meta
from .parameter import entry_of
from .part import plain_tensor
from .root import Root

BUFFER_RULES = "rank0", "mean"


def refuse_aliases(model: nn.Module, params: Iterable[Tuple[str, nn.Parameter]], stage: int) -> None:
    """Raises for a buffer that shares memory with a parameter to which shard() gives other memory: the buffer would
    keep the old values."""
    moved: Dict[int, List[Tuple[str, int, int]]] = {}  # by storage: name and byte range of each parameter
    for name, param in params:
        if entry_of(param) is None and (stage > 0 or is_meta(param) or not param.is_contiguous()):
            storage, begin, end = _place(param)
            moved.setdefault(storage, []).append((name, begin, end))
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided or is_traceable_wrapper_subclass(buffer):
            continue
        storage, begin, end = _place(buffer)
        for other, first, last in moved.get(storage, ()):
            if begin < last and first < end:
                raise ValueError(f"shard: the buffer {name} shares memory with the parameter {other}, which gets "
                                 "other memory, so it would keep the first weights: compute it in the forward, or make "
                                 "it a clone()")


def _place(tensor: Tensor) -> Tuple[int, int, int]:
    """A tensor's storage, and the range of its bytes there, which is empty for a tensor without elements."""
    tensor = plain_tensor(tensor)
    begin, size = tensor.storage_offset(), tensor.element_size()
    last = begin + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
    return tensor.untyped_storage()._cdata, *((begin * size, (last + 1) * size) if tensor.numel() else (0, 0))


def check_buffer_rule(call: str, rule: Any) -> None:
    if rule not in BUFFER_RULES:
        raise ValueError(f"{call}: buffers = {rule!r}, must be {' or '.join(map(repr, BUFFER_RULES))}")


def synced_buffers(root: Root, values: Mapping[str, Any], rule: str, everywhere: bool) -> Dict[str, Tensor]:
    """Copies of a state dictionary's tensors that are not sharded, with common values for all ranks: rank 0's, or with
    "mean" the ranks' mean of floating-point tensors. Tied tensors share a copy. Collective.

    everywhere  False: only rank 0 needs rank 0's values"""
    copies: Dict[int, Tensor] = {}  # by id of the tensor, which `values` keeps alive
    result: Dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and entry_of(value) is None:
            if id(value) not in copies:
                copies[id(value)] = value.detach().clone(memory_format=torch.contiguous_format)
            result[name] = copies[id(value)]
    if root.group.all_ranks.size == 1:
        return result
    means = [tensor for tensor in copies.values() if rule == "mean" and (tensor.is_floating_point()
                                                                         or tensor.is_complex())]
    for tensor in means:
        _average(root, tensor)
    if everywhere:
        averaged = {id(tensor) for tensor in means}
        for tensor in copies.values():
            if id(tensor) not in averaged:
                root.group.broadcast(tensor)
    return result


def _average(root: Root, tensor: Tensor) -> None:
    """Averages a tensor over ranks in place, in float32 or the tensor's wider type."""
    if tensor.numel() == 0:
        return
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = real.to(torch.promote_types(real.dtype, torch.float32), copy=True).view(-1)
    comm = root.group.comm_for(wide.device, all_ranks=True)
    comm.all_reduce(wide, libdc.ReduceOp.MEAN, stream=devices.current_stream(wide.device))
    real.copy_(wide.view(real.shape))
