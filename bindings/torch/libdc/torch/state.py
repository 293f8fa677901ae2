"""Whole weights and whole optimizer states of a sharded model, for checkpoints that any number of ranks can read."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn

from .root import Entry, Root
from .shard import entry_of, root_of


def _gather(entry: Entry, part: Tensor, keep: bool) -> Optional[Tensor]:
    """The whole of which each rank has a part like the parameter's; collective. keep: it is wanted here."""
    root = entry.root
    if root.stage == 0:
        return part.detach().clone() if keep else None
    part = part.detach().contiguous()
    if part.numel() < entry.length:
        part = torch.cat([part, part.new_zeros(entry.length - part.numel())])
    if root.comm.size == 1:
        whole = part.clone()
    else:
        whole = part.new_empty(entry.length * root.comm.size)
        root.comm.all_gather(part, whole)
    return whole[: entry.numel].clone().view(entry.shape) if keep else None


def _split(entry: Entry, whole: Tensor, part: Tensor) -> None:
    """Writes this rank's part of the whole."""
    if entry.root.stage == 0:
        part.copy_(whole)
        return
    begin, end = entry.part
    part[: end - begin].copy_(whole.reshape(-1)[begin:end])


def full_state_dict(model: nn.Module, rank0_only: bool = False) -> Dict[str, Tensor]:
    """The model's state_dict() with whole weights, as before shard(). Every rank must call it. rank0_only: the other
    ranks get an empty one. model.state_dict() itself has the flat shards, and loads again on as many ranks."""
    root = root_of(model)
    keep = not rank0_only or root.comm.rank == 0
    whole: Dict[int, Optional[Tensor]] = {}
    result: Dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        entry = entry_of(value)
        if entry is None:
            if keep:
                result[name] = value.detach().clone() if isinstance(value, Tensor) else value
            continue
        if entry.id not in whole:
            whole[entry.id] = _gather(entry, value, keep)
        if keep:
            result[name] = whole[entry.id]
    return result


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """load_state_dict() from whole weights; each rank reads the same state and keeps its part."""
    shards: Dict[str, Any] = {}
    current = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in state.items():
            entry = entry_of(current.get(name))
            if entry is not None:
                if tuple(value.shape) != tuple(entry.shape):
                    raise ValueError(f"load_full_state_dict: {name} has shape {tuple(value.shape)}, must be "
                                     f"{tuple(entry.shape)}")
                part = torch.zeros_like(entry.data)
                _split(entry, value, part)
                value = part
            shards[name] = value
    return model.load_state_dict(shards, strict=strict)


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer,
                              rank0_only: bool = False) -> Dict[str, Any]:
    """The optimizer's state_dict() with whole tensors, and parameters by name instead of by number. Every rank must
    call it. A state tensor as long as the shard, with its padding or without, is a part of a whole; others are the same
    on every rank."""
    root = root_of(model)
    keep = not rank0_only or root.comm.rank == 0
    packed = optimizer.state_dict()
    names = _names(model)
    state: Dict[str, Any] = {}
    groups = []
    for group, shown in zip(optimizer.param_groups, packed["param_groups"]):
        groups.append({**shown, "params": [names[id(param)] for param in group["params"]]})
        for param in group["params"]:
            if param in optimizer.state:
                values = _each(optimizer.state[param], param, lambda entry, part: _gather(entry, part, keep))
                state[names[id(param)]] = values
    return {"state": state, "param_groups": groups} if keep else {}


def load_full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer,
                                   state: Mapping[str, Any]) -> None:
    """The reverse of full_optimizer_state_dict(), on any number of ranks and at any stage."""
    params = {name: param for name, param in model.named_parameters()}
    numbers: Dict[str, int] = {}
    groups = []
    for group, shown in zip(optimizer.param_groups, state["param_groups"]):
        names = _names(model)
        ours = [names[id(param)] for param in group["params"]]
        if ours != list(shown["params"]):
            raise ValueError("load_full_optimizer_state_dict: a parameter group has other parameters than the "
                             "saved one")
        for name in ours:
            numbers[name] = len(numbers)
        groups.append({**shown, "params": [numbers[name] for name in ours]})

    def cut(entry: Entry, whole: Tensor) -> Tensor:
        part = torch.zeros(entry.data.shape, dtype=whole.dtype)
        _split(entry, whole, part)
        return part

    packed = {}
    for name, values in state["state"].items():
        entry = entry_of(params[name])
        packed[numbers[name]] = {
            key: cut(entry, value) if entry is not None and _is_like(entry.shape, key, value) else _copy(value)
            for key, value in values.items()}
    optimizer.load_state_dict({"state": packed, "param_groups": groups})


def _is_like(shape: torch.Size, key: str, value: Any) -> bool:
    """Whether a value of an optimizer's state is one number for each of a parameter. A scalar's look like counters."""
    return isinstance(value, Tensor) and value.shape == shape and (value.dim() > 0 or key != "step")


def _shapes(entry: Entry) -> Tuple[torch.Size, ...]:
    """What state that has this rank's elements may look like."""
    begin, end = entry.part
    return entry.data.shape, torch.Size([end - begin])


def _names(model: nn.Module) -> Dict[int, str]:
    return {id(param): name for name, param in model.named_parameters()}


def _each(values: Mapping[str, Any], param: nn.Parameter, gather: Callable[[Entry, Tensor], Any]) -> Dict[str, Any]:
    entry = entry_of(param)
    result = {}
    for key, value in values.items():
        if entry is not None and any(_is_like(shape, key, value) for shape in _shapes(entry)):
            result[key] = gather(entry, value)
        else:
            result[key] = _copy(value)
    return result


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
