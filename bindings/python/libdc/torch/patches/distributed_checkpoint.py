"""Patches get_state_dict() and similar functions of torch.distributed.checkpoint. With full_state_dict=True, parts
become whole tensors, and a rank also gets the blocks and layers that others own. Copies that async_save() makes are
parts again. Writers that would drop boxes of a part are refused."""

from __future__ import annotations

import collections
import functools
import importlib
import sys
from typing import Any, Callable, Dict, Iterator, Optional

import torch

from ..sharding.checkpointable import check_has_values
from ..sharding.local_shard import LocalShard, OwnedState
from ..sharding.parameter import entry_of
from ..sharding.part import part_of, plain_tensor
from ..sharding.root import Root

_MODULE = "torch.distributed.checkpoint.state_dict"
_STAGER = "torch.distributed.checkpoint._state_dict_stager"
_STAGING = "torch.distributed.checkpoint.staging"
_HUGGING_FACE = "torch.distributed.checkpoint.hf_storage"


def _roots_in(values: Any) -> Iterator[Root]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _roots_in(value)
        return
    part = part_of(values)
    entry = None if part is None else part.entry_ref()
    root = None if entry is None else entry.root_ref()
    if root is not None:
        yield root


def gather_parts(values: Any, keep: bool) -> Any:
    """A state dictionary with whole tensors in place of parts. Collective. keep: whether this rank needs them."""
    if isinstance(values, dict):
        return {key: gather_parts(value, keep) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(gather_parts(value, keep) for value in values)
    part = part_of(values)
    if part is None:
        return values
    check_has_values(values)
    whole = part.gather(values, keep)
    return torch.empty(0) if whole is None else whole


def _make_full_or_cpu(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def full_or_cpu_state_dict(state_dict: Any, info: Any) -> Any:
        if info.full_state_dict:
            for root in dict.fromkeys(_roots_in(state_dict)):
                root.write_back()  # writes made in an open gathered()
            state_dict = gather_parts(state_dict, _is_wanted(info))
        return inner(state_dict, info)

    full_or_cpu_state_dict.knows_parts = True  # type: ignore[attr-defined]
    return full_or_cpu_state_dict


def _is_wanted(info: Any) -> bool:
    """Whether this rank gets the full state."""
    return not info.cpu_offload or not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _make_get_optim(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def get_optim_state_dict(model: Any, optimizers: Any, info: Any) -> Any:
        state_dict = inner(model, optimizers, info)
        if info.full_state_dict and info.handle_optim:
            for optimizer in optimizers:
                _add_owned(model, optimizer, info, state_dict)
        return state_dict

    get_optim_state_dict.knows_parts = True  # type: ignore[attr-defined]
    return get_optim_state_dict


def _make_init_optim(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def init_optim_state(optimizer: torch.optim.Optimizer) -> None:
        """If there are no gradients, PyTorch initialises a state by a step, and then drops gradients. Local sums of
        no_sync() count as gradients, so they stop this."""
        entries = (entry_of(param) for group in optimizer.param_groups for param in group["params"])
        if not any(entry is not None and entry.unreduced is not None for entry in entries):
            inner(optimizer)

    init_optim_state.knows_parts = True  # type: ignore[attr-defined]
    return init_optim_state


def _owning_root(optimizer: torch.optim.Optimizer) -> Optional[Root]:
    """The sharded model of an optimizer of libdc.optim whose blocks or layers have owners."""
    if getattr(optimizer, "_owned_state", None) is None:
        return None
    entries = [entry_of(param) for group in optimizer.param_groups for param in group["params"]]
    return next((entry.root for entry in entries if entry is not None), None)


def _add_owned(model: Any, optimizer: torch.optim.Optimizer, info: Any, state_dict: Dict[str, Any]) -> None:
    """Completes a full state with the blocks and layers that single ranks own. Collective, since a rank's own state
    does not show that others own some."""
    from ..checkpoint.state_dict import gather_owned  # imported here, since it imports modules that import this one

    root = _owning_root(optimizer)
    if root is None:
        return
    owned = gather_owned(root, optimizer, _is_wanted(info))
    for name, param in model.named_parameters():
        for key, piece in owned.get(id(param), {}).items():
            fqn, = sys.modules[_MODULE]._get_fqns(model, name)  # type: ignore[attr-defined]
            piece = piece if info.cpu_offload else piece.to(root.group.device)
            if info.flatten_optimizer_state_dict:
                state_dict[f"state.{fqn}.{key}"] = piece
            else:
                state_dict["state"].setdefault(fqn, {})[key] = piece


def _make_load_optim(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def load_optim_state_dict(model: Any, optimizers: Any, state_dict: Any, info: Any) -> None:
        """Each rank takes its parts, and the pieces that it owns, from the full state itself. PyTorch's way needs the
        same names on all ranks."""
        owning = [optimizer for optimizer in optimizers if _owning_root(optimizer) is not None]
        if not owning or not info.full_state_dict:
            inner(model, optimizers, state_dict, info)
            return
        if info.broadcast_from_rank0:
            raise ValueError(f"broadcast_from_rank0: ranks own pieces of the state of {type(owning[0]).__name__}, and "
                             "PyTorch broadcasts those that rank 0 has: give the state to every rank, or use "
                             "libdc.torch's load_full_optimizer_state_dict() or load_checkpoint()")
        info.full_state_dict = False
        try:
            inner(model, optimizers, state_dict, info)
        finally:
            info.full_state_dict = True

    load_optim_state_dict.knows_parts = True  # type: ignore[attr-defined]
    return load_optim_state_dict


def _make_offload_tensor(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def offload_tensor(self: Any, x: Any, memo: Any, non_blocking: bool = False) -> Any:
        """A host copy of a part, which is a part again."""
        owned = isinstance(x, OwnedState)
        part = x._near if owned else part_of(x)
        if part is None:
            return inner(self, x, memo, non_blocking)
        if not owned:
            check_has_values(x)
        copied = inner(self, plain_tensor(x), memo, non_blocking)
        memo[id(x)] = result = OwnedState.of(part, copied) if owned else LocalShard.of(part, copied)
        return result

    offload_tensor.knows_parts = True  # type: ignore[attr-defined]
    return offload_tensor


def _map_parts(values: Any, copies: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """A state dictionary with convert(part, copy) in place of each part, and with the copies of all else."""
    if isinstance(values, dict):
        return {key: _map_parts(value, copies[key], convert) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        made = [_map_parts(value, copy, convert) for value, copy in zip(values, copies)]
        return tuple(made) if isinstance(values, tuple) else made  # as PyTorch's copies: no named tuples
    return copies if part_of(values) is None else convert(values, copies)


def _make_create_cpu(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def create_cpu_state_dict(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Host memory for a state's tensors, that of parts as parts."""
        plain = _map_parts(state_dict, state_dict, lambda _, value: plain_tensor(value))
        made = inner(plain, *args, **kwargs)
        return _map_parts(state_dict, made, lambda value, memory: LocalShard.of(value._part, memory))

    create_cpu_state_dict.knows_parts = True  # type: ignore[attr-defined]
    return create_cpu_state_dict


def _make_copy_state(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def copy_state_dict(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        _map_parts(state_dict, state_dict, lambda value, _: check_has_values(value))
        return inner(state_dict, *args, **kwargs)

    copy_state_dict.knows_parts = True  # type: ignore[attr-defined]
    return copy_state_dict


def _make_write_data(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        """PyTorch keeps one box of a tensor in a rank's file, under the tensor's name, and would drop the others."""
        boxes = collections.Counter(item.index.fqn for item in plan.items)
        name, count = max(boxes.items(), key=lambda item: item[1], default=("", 0))
        if count > 1:
            raise ValueError(f"{type(self).__name__}: a rank's part of {name} is {count} boxes of the whole, and the "
                             "writer keeps one box of a tensor in a rank's file: use libdc.torch.save_checkpoint(), "
                             "whose file Hugging Face's readers read, or write the state of full_state_dict=True")
        return inner(self, plan, planner)

    write_data.knows_parts = True  # type: ignore[attr-defined]
    return write_data


def prepare_owned_states(optimizer: torch.optim.Optimizer) -> None:
    """Imports and patches torch.distributed.checkpoint's module if the optimizer's ranks own pieces of its state.
    Otherwise it is patched at the first state_dict(), but the module's functions ask for such pieces earlier."""
    root = _owning_root(optimizer)
    if root is not None and root.group.comm.size > 1 and torch.distributed.is_available():
        importlib.import_module(_MODULE)
        patch_if_imported()


def patch_if_imported() -> None:
    """Patches the module if it is imported, since the import is slow and few programs need it. Called before the states
    are made with which the module works."""
    module, staging = sys.modules.get(_MODULE), sys.modules.get(_STAGING)
    stager = getattr(sys.modules.get(_STAGER), "StateDictStager", None)
    writer = getattr(sys.modules.get(_HUGGING_FACE), "HuggingFaceStorageWriter", None)
    for holder, name, make in ((module, "_maybe_full_or_cpu_state_dict", _make_full_or_cpu),
                               (module, "_get_optim_state_dict", _make_get_optim),
                               (module, "_init_optim_state", _make_init_optim),
                               (module, "_load_optim_state_dict", _make_load_optim),
                               (stager, "_offload_tensor", _make_offload_tensor),
                               (staging, "_create_cpu_state_dict", _make_create_cpu),
                               (staging, "_copy_state_dict", _make_copy_state),
                               (writer, "write_data", _make_write_data)):
        function = getattr(holder, name, None)
        if function is not None and not hasattr(function, "knows_parts"):
            setattr(holder, name, make(function))
