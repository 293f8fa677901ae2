"""Tensors of a model's state that are no shards, such as BatchNorm's statistics: each rank has its own."""

from __future__ import annotations

from typing import Any, Dict, Mapping

import libdc
import torch
from torch import Tensor

from .. import devices
from .parameter import entry_of
from .root import Root

BUFFER_RULES = "rank0", "mean"


def check_buffer_rule(call: str, rule: Any) -> None:
    if rule not in BUFFER_RULES:
        raise ValueError(f"{call}: buffers = {rule!r}, must be {' or '.join(map(repr, BUFFER_RULES))}")


def synced_buffers(root: Root, values: Mapping[str, Any], rule: str, everywhere: bool) -> Dict[str, Tensor]:
    """Copies of a state dictionary's tensors that are no shards, with the values that stand for all ranks. Those are
    rank 0's, or with "mean" the ranks' mean where elements are floating-point numbers. Tied ones have one copy.
    Collective.

    everywhere  False: rank 0's are wanted on rank 0 alone"""
    copies: Dict[int, Tensor] = {}  # by ids of the tensors, which `values` holds
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
    """In place, in float32 or a wider type of the tensor's own."""
    if tensor.numel() == 0:
        return
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = real.to(torch.promote_types(real.dtype, torch.float32), copy=True).view(-1)
    comm = root.group.comm_for(wide.device, all_ranks=True)
    comm.all_reduce(wide, libdc.ReduceOp.MEAN, stream=devices.current_stream(wide.device))
    real.copy_(wide.view(real.shape))
