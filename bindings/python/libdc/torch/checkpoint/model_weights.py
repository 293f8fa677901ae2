"""Matches a model's weights with a checkpoint's tensors, and gives the loaded values to its modules.

Modules load them by load_state_dict(), where each rank has its own parts. So a module's extra state, its own
_load_from_state_dict() and its hooks work as without shard(), except that they see parts."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

import torch
from torch import Tensor, nn

from ..sharding.local_shard import LocalShard
from ..sharding.parameter import entry_of
from ..sharding.sharded_param import ShardedParam
from .items import Target

_EXTRA_STATE = "_extra_state"  # PyTorch's key for the result of get_extra_state()
_NOT_OWN = "torch.nn.modules.module", "libdc.torch.sharding.module_class"


class Weights(NamedTuple):
    """Memory for this rank's part of the weights. values: by the model's names, as load_state_dict() takes them;
    targets: by the file's names. aliases: maps a tied weight's other names in the file to the one whose values are
    loaded."""

    values: Dict[str, Tensor]
    targets: Dict[str, Target]
    aliases: Dict[str, str]


def match(model: nn.Module, path: Union[str, "os.PathLike[str]"], tensors: Mapping[str, Tensor], strict: bool,
          prefix: str, others: Tuple[str, ...]) -> Weights:
    """Finds the model's weights in a file, where a tied weight may have any of its names. others: prefixes of names in
    the file that are not the model's."""
    current = model.state_dict(keep_vars=True)
    same: Dict[Any, List[str]] = {}
    for name, value in current.items():
        same.setdefault(id(value) if isinstance(value, Tensor) else name, []).append(name)
    registered = _registered_names(model)
    weights = Weights({}, {}, {})
    missing = []
    for group in same.values():
        found = [prefix + name for name in group if prefix + name in tensors]
        if not found:
            missing.append(group[0])
            continue
        value = current[group[0]]
        entry = entry_of(value)
        for name in found if group[0] in registered else ():
            _check_shape(path, name, tensors[name], value)
        target = weights.targets[found[0]] = _target_of(tensors[found[0]], entry)
        weights.values.update(dict.fromkeys(group, _value_of(target, entry)))
        for name in found[1:]:
            weights.targets[name] = target._replace(memory=torch.empty_like(target.elements, device="cpu"))
            weights.aliases[name] = found[0]
    unknown = [name for name in tensors if name.startswith(prefix) and name[len(prefix):] not in current
               and not name.startswith(others)]
    if strict and (missing or unknown):
        raise ValueError(f"load_checkpoint: {path} lacks {_name_list(missing)}, and has {_name_list(unknown)}, which "
                         "the model does not have; strict=False reads the rest")
    lost = _without_taker(model, weights.values.keys() - registered)
    if strict and lost:
        raise ValueError(f"load_checkpoint: {path} has {_name_list(lost)}, which the model's state_dict() has too, but "
                         "no module takes: it needs a buffer, set_extra_state() or a _load_from_state_dict() of its "
                         "own; strict=False reads the rest")
    return weights


def check_aliases(path: Any, weights: Weights) -> None:
    """After reading, raises if a tied weight's names have different values. PyTorch would take those of the last name,
    and readers of another name would differ."""
    for name, taken in weights.aliases.items():
        one, other = (weights.targets[each].elements.cpu().view(torch.uint8) for each in (taken, name))
        if not torch.equal(one, other):
            raise ValueError(f"load_checkpoint: {taken} and {name} have different values in {path}, but are one tied "
                             "weight in the model: untie it before shard(), or leave one of them out of the file")


def load(model: nn.Module, weights: Weights) -> None:
    if not weights.values:
        return
    state = model.state_dict(keep_vars=True)  # its attributes have the modules' versions
    state.clear()
    state.update(weights.values)
    load_state_dict: Any = model.load_state_dict
    try:
        inspect.signature(load_state_dict).bind(state, strict=False)
    except TypeError:  # the model overrides it with other arguments
        load_state_dict = functools.partial(nn.Module.load_state_dict, model)
    load_state_dict(state, strict=False)


def _check_shape(path: Any, name: str, tensor: Tensor, value: Tensor) -> None:
    shape = tuple(value.shape)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"load_checkpoint: {name} has shape {tuple(tensor.shape)} in {path}, must be {shape}")


def _registered_names(model: nn.Module) -> Set[str]:
    """The names of parameters and persistent buffers. A module's state may have more."""
    names = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        buffers = module._buffers.keys() - module._non_persistent_buffers_set
        names |= {f"{prefix}.{name}" if prefix else name for name in module._parameters.keys() | buffers}
    return names


def _without_taker(model: nn.Module, names: Set[str]) -> List[str]:
    """The names that load_state_dict() would ignore."""
    if not names or not _is_torch(type(model), "load_state_dict"):
        return []
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefix = f"{prefix}." if prefix else ""
        if module._load_state_dict_pre_hooks or not _is_torch(type(module), "_load_from_state_dict"):
            names = {name for name in names if not name.startswith(prefix)}
        elif not _is_torch(type(module), "set_extra_state"):
            names = names - {prefix + _EXTRA_STATE}
    return sorted(names)


def _is_torch(kind: Any, method: str) -> bool:
    """Whether a class of modules has nn.Module's method, or shard()'s around it."""
    return all(base.__dict__[method].__module__ in _NOT_OWN for base in kind.__mro__ if method in base.__dict__)


def _target_of(tensor: Tensor, entry: Optional[ShardedParam]) -> Target:
    if entry is None or entry.group.uninitialized is None or not entry.group.uninitialized.has(entry):
        return new_target(tensor, None if entry is None or entry.part is None else entry)
    begin, end = entry.shard_range
    return Target(entry.data.data.view(-1)[: end - begin], begin, end)


def new_target(tensor: Tensor, entry: Optional[ShardedParam] = None) -> Target:
    """Memory for a whole tensor of a file, or for this rank's flat part of it."""
    begin, end = (0, tensor.numel()) if entry is None else entry.shard_range
    shape = tensor.shape if entry is None else torch.Size([end - begin])
    return Target(torch.empty(shape, dtype=tensor.dtype), begin, end)


def _value_of(target: Target, entry: Optional[ShardedParam]) -> Tensor:
    if entry is None:
        return target.memory
    return target.memory.view(entry.shape) if entry.part is None else LocalShard.of(entry.part, target.memory)


def _name_list(names: List[str]) -> str:
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"
