"""Gradient clipping by the global norm, with equal bits at every stage."""

from __future__ import annotations

import math
from typing import Iterable, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from .. import devices
from .parameter import entry_of
from .part import part_of, plain_tensor
from .root import Root
from .sharded_param import ShardedParam

_BLOCK = 1 << 16  # elements summed at a time: their float64 copy stays in the cache


def clip_grad_norm_(parameters: Union[nn.Module, Tensor, Iterable[Tensor]], max_norm: float,
                    norm_type: float = 2.0) -> Tensor:
    """Scales all gradients so that their norm over all ranks is at most max_norm. Returns the norm before scaling, in
    float64.

    parameters    a model, or parameters. Those that are not sharded (Policy(ignored=True)) count with the mean over
                  the ranks of their sums of |x|^norm_type, or the maximum for an infinite norm. All ranks get one norm
    max_norm      math.inf: only computes the norm

    Every rank's part of every parameter is summed separately in float64, and the sums are added in rank order. That is
    so at stage 0 too, where each rank has all parts, and makes the bits equal."""
    if not float(max_norm) >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm = {max_norm!r}, must be >= 0")
    _check_norm_type(norm_type)
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    params = list(parameters)
    norm = total_norm([(entry_of(param), param.grad) for param in params], norm_type)
    scale_to_norm([param.grad for param in params if param.grad is not None], max_norm, norm)
    return norm


def _check_norm_type(norm_type: float) -> None:
    if not float(norm_type) > 0:
        raise ValueError(f"clip_grad_norm_: norm_type = {norm_type!r}, must be > 0")


def entry_of_grad(grad: Tensor) -> Optional[ShardedParam]:
    """The entry of the sharded parameter whose `.grad` this is."""
    part = part_of(grad)
    if part is not None:
        return part.entry("the norm of gradients")
    entry = getattr(grad, "dc_grad_of", lambda: None)()
    return entry if entry is not None and entry.grad is grad else None


def total_norm(grads: Sequence[Tuple[Optional[ShardedParam], Optional[Tensor]]], norm_type: float) -> Tensor:
    """The norm of gradients over all ranks, in float64. grads: pairs of a parameter's entry, or None if it is not
    sharded, and its gradient. Parameters without a gradient must be in the list too, since other ranks may have one."""
    _check_norm_type(norm_type)
    norm_type = float(norm_type)
    parts = [(entry, plain_tensor(grad)) for entry, grad in grads if entry is not None and grad is not None]
    powers = _gather_norm_powers(parts, norm_type)
    if any(entry is None for entry, _ in grads):
        own = [grad for entry, grad in grads if entry is None and grad is not None]
        powers.append(_agree_on_own(own, [entry.root for entry, _ in grads if entry is not None], norm_type))
    if not powers:
        return torch.zeros((), dtype=torch.float64)
    power = torch.cat([part.to(powers[0].device) for part in powers])
    if math.isinf(norm_type):
        return power.max()
    return power.sum().pow(1.0 / norm_type)


def _agree_on_own(grads: Sequence[Tensor], roots: Sequence[Root], norm_type: float) -> Tensor:
    """A common value for gradients that are not averaged: the mean over the ranks of their sums, or the maximum for an
    infinite norm. If ranks clipped by different norms, their shards and replicas would drift apart."""
    device = roots[0].group.device if roots else grads[0].device if grads else torch.device("cpu")
    powers = torch.zeros(1 + len(grads), dtype=torch.float64, device=device)
    for k, grad in enumerate(grads):
        powers[k] = _norm_power(grad.detach().reshape(-1), norm_type)
    if math.isinf(norm_type):
        return _every_rank(powers.max(), roots).max().reshape(1)
    return _every_rank(powers.sum(), roots).mean().reshape(1)


def _every_rank(value: Tensor, roots: Sequence[Root]) -> Tensor:
    """Gathers one number from each rank of the model with the most ranks."""
    group = max((root.group for root in roots), key=lambda group: group.all_ranks.size, default=None)
    if group is None or group.all_ranks.size == 1:
        return value
    every = value.new_empty(group.all_ranks.size, device=group.device)
    group.comm_for(group.device, all_ranks=True).all_gather(
        value.reshape(1).to(group.device), every, stream=devices.current_stream(group.device))
    return every


def scale_to_norm(grads: List[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales gradients with this norm to at most max_norm."""
    if not math.isinf(max_norm):
        multiply(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def multiply(grads: List[Tensor], factor: Tensor) -> None:
    """grads = factor grads, in float32. On a card the host does not read the factor, so that it need not wait."""
    if factor.device.type == "cpu" and float(factor) != 1.0:
        torch._foreach_mul_(grads, float(factor))
    elif factor.device.type != "cpu":
        multiply_on_device(grads, factor.float())


def multiply_on_device(grads: List[Tensor], factor: Tensor) -> None:
    for grad in grads:
        by = factor.to(grad.device)
        exact = grad.dtype == torch.float32 or grad.is_complex()
        grad.mul_(by) if exact else grad.copy_(grad.float().mul_(by))


def _gather_norm_powers(parts: List[Tuple[ShardedParam, Tensor]], norm_type: float) -> List[Tensor]:
    """For each root, the sums of all ranks' parts of all its gradients, ordered by rank."""
    roots: List[Root] = list(dict.fromkeys(entry.root for entry, _ in parts))
    result = []
    for root in roots:
        own = [(entry, grad) for entry, grad in parts if entry.root is root]
        ranks = range(root.group.comm.size)
        if root.group.stage == 0:
            powers = [_norm_power(_shard_of(*pair, rank), norm_type) for rank in ranks for pair in own]
            result.append(torch.stack(powers))
            continue
        mine = torch.stack([_norm_power(grad[: entry.part.count], norm_type) for entry, grad in own])
        if root.group.comm.size == 1:
            result.append(mine)
            continue
        every = mine.new_empty(len(ranks) * len(own))
        root.group.all_gather(mine, every)
        result.append(every)
    return result


def _shard_of(entry: ShardedParam, grad: Tensor, rank: int) -> Tensor:
    """A rank's shard of a whole gradient."""
    begin, end = entry.cut.range_of(rank)
    return grad.view(-1)[begin:end]


def _norm_power(part: Tensor, norm_type: float) -> Tensor:
    """The sum of |x|^norm_type, or the largest |x|, in float64."""
    if part.is_complex() and norm_type == 2.0:
        part = torch.view_as_real(part.detach().resolve_conj()).reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=part.device)
    for block in part.detach().split(_BLOCK) if part.numel() else ():
        if math.isinf(norm_type):
            total = torch.maximum(total, block.abs().amax().double())
        elif norm_type == 2.0:
            exact = block.double()
            total = total + torch.dot(exact, exact)
        else:
            total = total + block.abs().double().pow(norm_type).sum()
    return total
