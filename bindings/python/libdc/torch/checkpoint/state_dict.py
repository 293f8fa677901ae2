"""Whole weights and whole optimizer states of a sharded model, for checkpoints that any number of ranks can read."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Tuple

import torch
from libdc.arguments import counted
from torch import Tensor, nn

from ..sharding.buffers import check_buffer_rule, synced_buffers
from ..sharding.local_shard import LocalShard
from ..sharding.parameter import copy_shard, entry_of, gather_full
from ..sharding.part import part_of
from ..sharding.root import Root
from ..sharding.sharded_param import ShardedParam
from .collective_errors import roots_on_same_ranks


# State that PyTorch's optimizers need for a step, which raises a KeyError without it. They load other state silently.
_TORCH_STATE = {name: set(keys.split()) for name, keys in {
    "ASGD": "step eta ax mu", "Adadelta": "step square_avg acc_delta", "Adagrad": "step sum",
    "Adam": "step exp_avg exp_avg_sq", "AdamW": "step exp_avg exp_avg_sq", "Adamax": "step exp_avg exp_inf",
    "NAdam": "step exp_avg exp_avg_sq mu_product", "RAdam": "step exp_avg exp_avg_sq", "RMSprop": "step square_avg",
    "Rprop": "step prev step_size", "SGD": ""}.items()}


def full_state_dict(model: nn.Module, rank0_only: bool = False, buffers: str = "rank0",
                    cpu_offload: bool = False) -> Dict[str, Tensor]:
    """The model's state_dict() with whole weights, as before shard(). Every rank must call it. model.state_dict()
    itself has flat shards and the rank's own buffers, and only the same number of ranks can load it.

    rank0_only   all ranks other than rank 0 get an empty one, with `mesh` too
    buffers      "rank0": all ranks get rank 0's; "mean": the ranks' mean of floating-point ones (BatchNorm's)
    cpu_offload  values are in host memory; each is copied there before the next weight is gathered"""
    roots = roots_on_same_ranks("full_state_dict", model)
    root = roots[0]
    keep = not rank0_only or root.group.all_ranks.rank == 0
    whole: Dict[ShardedParam, Optional[Tensor]] = {}
    result: Dict[str, Tensor] = {}
    check_buffer_rule("full_state_dict", buffers)
    for each in roots:
        each.group.check_initialized()
        each.write_back()
    current = model.state_dict(keep_vars=True)
    agreed = synced_buffers(root, current, buffers, everywhere=not rank0_only)

    def on_host(value: Any) -> Any:
        return value.cpu() if cpu_offload and value is not None else value

    for name, value in current.items():
        entry = entry_of(value)
        if entry is None:
            if keep:
                result[name] = on_host(agreed[name]) if isinstance(value, Tensor) else value
            continue
        if entry not in whole:
            whole[entry] = on_host(gather_full(entry, value, keep))
        if keep:
            result[name] = whole[entry]
    return result


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """load_state_dict() from whole weights; each rank reads the same state and keeps its part."""
    current = model.state_dict(keep_vars=True)
    for name, value in state.items():
        entry = entry_of(current.get(name))
        if entry is not None and tuple(value.shape) != tuple(entry.shape):
            raise ValueError(f"load_full_state_dict: {name} has shape {tuple(value.shape)}, must be "
                             f"{tuple(entry.shape)}")
    return model.load_state_dict(state, strict=strict)


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer,
                              rank0_only: bool = False) -> Dict[str, Any]:
    """The optimizer's state_dict() with whole tensors, and parameters by name instead of by number. Every rank must
    call it. A state tensor as long as the shard, with or without padding, counts as a part of a whole one. Other
    tensors are equal on every rank, except those of blocks and layers that libdc.optim's optimizers distribute: these
    are gathered from all ranks."""
    root = roots_on_same_ranks("full_optimizer_state_dict", model)[0]
    keep = not rank0_only or root.group.all_ranks.rank == 0
    packed = optimizer.state_dict()
    names = names_of(model)
    for group in optimizer.param_groups:
        check_params("full_optimizer_state_dict", names, group["params"])
    state: Dict[str, Any] = {}
    groups = []
    owned = gather_owned(root, optimizer, keep)
    for group, shown in zip(optimizer.param_groups, packed["param_groups"]):
        groups.append({**shown, "params": [names[id(param)] for param in group["params"]]})
        for param in group["params"]:
            if param in optimizer.state:
                shared = {key: value for key, value in optimizer.state[param].items() if not is_owned(optimizer, key)}
                values = _map_shards(optimizer, shared, param, lambda entry, part: gather_full(entry, part, keep))
                state[names[id(param)]] = {**values, **owned.get(id(param), {})}
    return {"state": state, "param_groups": groups} if keep else {}


def load_full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer,
                                   state: Mapping[str, Any]) -> None:
    """The reverse of full_optimizer_state_dict(), on any number of ranks and at any stage."""
    numbers, groups = _numbered(model, optimizer, state["param_groups"])
    params = dict(model.named_parameters())
    packed = {}
    for name, values in state["state"].items():
        packed[numbers[name]] = {key: _shard_of(optimizer, params[name], key, value) for key, value in values.items()
                                 if is_read(optimizer, params[name], key)}
    _check_kind(optimizer, packed, groups)
    optimizer.load_state_dict({"state": packed, "param_groups": groups})


def load_optimizer_shards(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """As load_full_optimizer_state_dict(), from tensors that have only this rank's part (see new_shard())."""
    numbers, groups = _numbered(model, optimizer, state["param_groups"])
    packed = {numbers[name]: values for name, values in state["state"].items()}
    _check_kind(optimizer, packed, groups)
    optimizer.load_state_dict({"state": packed, "param_groups": groups})


def _check_kind(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any], groups: List[Dict[str, Any]]) -> None:
    """Refuses the state of another type of optimizer, with which PyTorch's next step would raise a KeyError."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or kind.__name__ not in _TORCH_STATE:
        return
    numbers = {name for name, value in optimizer.defaults.items() if type(value) in (int, float, tuple)}
    for group in groups:
        lacking = numbers - group.keys()
        for values in filter(None, (state.get(number) for number in group["params"])):
            lacking |= _TORCH_STATE[kind.__name__] - values.keys()
        if lacking:
            raise ValueError(f"{kind.__name__}: the saved state is of another kind of optimizer: it lacks "
                             f"{', '.join(sorted(lacking))}")


def _numbered(model: nn.Module, optimizer: torch.optim.Optimizer,
              saved: List[Dict[str, Any]]) -> Tuple[Dict[str, int], List[Dict[str, Any]]]:
    """The parameters' numbers by their names, and the saved groups with numbers."""
    if len(optimizer.param_groups) != len(saved):
        raise ValueError("load_full_optimizer_state_dict: the optimizer has "
                         f"{counted(len(optimizer.param_groups), 'parameter group')}, the saved one {len(saved)}")
    numbers: Dict[str, int] = {}
    names = names_of(model)
    groups = []
    for group, shown in zip(optimizer.param_groups, saved):
        check_params("load_full_optimizer_state_dict", names, group["params"])
        ours = [names[id(param)] for param in group["params"]]
        if ours != list(shown["params"]):
            raise ValueError("load_full_optimizer_state_dict: a parameter group has other parameters than the "
                             "saved one")
        for name in ours:
            numbers[name] = len(numbers)
        groups.append({**shown, "params": [numbers[name] for name in ours]})
    return numbers, groups


def _shard_of(optimizer: torch.optim.Optimizer, param: nn.Parameter, key: str, value: Any) -> Any:
    entry = entry_of(param)
    if entry is None or not _is_shared(optimizer, entry, key, value):
        return _copy(value)
    part = torch.zeros_like(entry.data, dtype=value.dtype)
    copy_shard(entry, value, part)
    return part if entry.part is None else LocalShard.of(entry.part, part)


def is_read(optimizer: torch.optim.Optimizer, param: nn.Parameter, key: str) -> bool:
    """Whether this rank loads a piece of a parameter's state."""
    return not is_owned(optimizer, key) or key in optimizer.pieces(param)  # type: ignore[attr-defined]


def as_shard(optimizer: torch.optim.Optimizer, param: nn.Parameter, key: str, value: Tensor, memory: Tensor) -> Tensor:
    """new_shard()'s memory as a LocalShard, so that norms and sums in a user's own optimizer are those of the whole
    tensor. For optimizers that work on plain tensors, libdc's hook unwraps it again."""
    entry = entry_of(param)
    if entry is None or entry.part is None or not _is_shared(optimizer, entry, key, value):
        return memory
    return LocalShard.of(entry.part, memory)


def new_shard(optimizer: torch.optim.Optimizer, param: nn.Parameter, key: str,
              value: Tensor) -> Tuple[Tensor, int, int]:
    """New host memory for this rank's part of a piece, and the range, begin to end, of its elements. They go to the
    beginning of the memory; the padding after them is zeroed already."""
    entry = entry_of(param)
    if entry is None or not _is_shared(optimizer, entry, key, value):
        return torch.empty(value.shape, dtype=value.dtype), 0, value.numel()
    begin, end = entry.shard_range
    part = torch.empty(entry.data.shape, dtype=value.dtype)
    part.view(-1)[end - begin :].zero_()
    return part, begin, end


def _is_shared(optimizer: torch.optim.Optimizer, entry: ShardedParam, key: str, value: Any) -> bool:
    """Whether each rank has a part of a piece."""
    return not is_owned(optimizer, key) and is_like(entry.shape, key, value)


def is_owned(optimizer: torch.optim.Optimizer, key: str) -> bool:
    """Whether a piece of state belongs to a block or a layer, which one rank owns."""
    return bool(getattr(optimizer, "is_owned", lambda _: False)(key))


def gather_owned(root: Root, optimizer: torch.optim.Optimizer, keep: bool) -> Dict[int, Dict[str, Tensor]]:
    """The pieces of the parameters' state that single ranks own, by the parameters' ids. Collective."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    mine = [(i, key, value) for i, param in enumerate(params) for key, value in optimizer.state.get(param, {}).items()
            if is_owned(optimizer, key)]
    listed = [(i, key, str(value.dtype)[6:], list(value.shape)) for i, key, value in mine]
    result: Dict[int, Dict[str, Tensor]] = {}
    for rank, pieces in enumerate(root.group.all_gather_bytes(json.dumps(listed).encode())):
        for number, (i, key, dtype, shape) in enumerate(json.loads(pieces)):
            own = rank == root.group.comm.rank
            piece = (mine[number][2].detach().to("cpu", copy=True) if own
                     else torch.empty(shape, dtype=getattr(torch, dtype)))
            if root.group.comm.size > 1:
                root.group.comm.broadcast(piece.view(-1), rank)
            if keep:
                result.setdefault(id(params[i]), {})[key] = piece
    return result


def is_like(shape: torch.Size, key: str, value: Any) -> bool:
    """Whether a value of an optimizer's state has one number for each element of a parameter. A scalar parameter's
    state has the shape of a step counter, so counters are recognised by their key."""
    return isinstance(value, Tensor) and value.shape == shape and (value.dim() > 0 or key != "step")


def is_shard_like(optimizer: torch.optim.Optimizer, entry: ShardedParam, key: str, value: Any) -> bool:
    """Whether a value of an optimizer's state has this rank's elements of the parameter. All ranks get the same answer.
    Only values of libdc.optim may lack padding, so that shapes differ between ranks."""
    if part_of(value) is not None or is_like(entry.data.shape, key, value):
        return True
    begin, end = entry.shard_range
    return hasattr(optimizer, "is_owned") and is_like(torch.Size([end - begin]), key, value)


def names_of(model: nn.Module) -> Dict[int, str]:
    return {id(param): name for name, param in model.named_parameters()}


def check_params(call: str, names: Mapping[int, str], params: Iterable[Tensor]) -> None:
    """Raises for a parameter of an optimizer that is not among the model's names."""
    for param in params:
        if id(param) not in names:
            raise ValueError(f"{call}: the optimizer has a parameter of shape {tuple(param.shape)} that the model does "
                             "not have")


def _map_shards(optimizer: torch.optim.Optimizer, values: Mapping[str, Any], param: nn.Parameter,
                gather: Callable[[ShardedParam, Tensor], Any]) -> Dict[str, Any]:
    entry = entry_of(param)
    result = {}
    for key, value in values.items():
        if entry is not None and is_shard_like(optimizer, entry, key, value):
            result[key] = gather(entry, value)
        else:
            result[key] = _copy(value)
    return result


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
