"""PyTorch's own functions on sharded parameters: they are made to work if a few lines suffice; others raise an error
that names an alternative. Functions are changed in place if possible, so that modules that imported them before use the
change too."""

from __future__ import annotations

import functools
import types
from typing import Any, Callable, Dict, Iterable, List, Optional

import torch
from torch import Tensor, nn
from torch.nn.utils import _named_member_accessor, clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..checkpoint.state_dict import is_like, is_owned, is_read, is_shard_like
from ..compile import tracing
from ..sharding import clip_grad as sharded_clip
from ..sharding.local_shard import LocalShard, OwnedState, dispatch
from ..sharding.managed_modules import MODULE_STATE, managed_param
from ..sharding.parameter import copy_shard, entry_of
from ..sharding.part import part_of, plain_tensor
from ..sharding.sharded_param import ShardedParam
from .distributed_checkpoint import patch_if_imported, prepare_owned_states
from .run_backward import make_run_backward

_Function = Callable[..., Any]


def _patch(module: Any, name: str, make: Callable[[_Function], _Function]) -> None:
    """Replaces a module's function. For a decorated one, it replaces the function that the decorator calls, so that all
    existing references see the change."""
    function = getattr(module, name)
    inner = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if inner is not None and cell.cell_contents is inner:
            cell.cell_contents = make(inner)
            return
    setattr(module, name, make(function))


# torch.nn.utils: norms over all ranks


def _norm_like(norm: Tensor, grad: Tensor, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
                           "cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
                           "anyway, set `error_if_nonfinite=False`")
    return norm.to(torch.promote_types(grad.dtype, torch.float32))


def _make_get_total_norm(inner: _Function) -> _Function:
    @functools.wraps(inner)
    def get_total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False,
                       foreach: Optional[bool] = None) -> Tensor:
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not any(sharded_clip.entry_of_grad(grad) is not None for grad in grads):
            return inner(grads, norm_type, error_if_nonfinite, foreach)
        norm = sharded_clip.total_norm([(sharded_clip.entry_of_grad(grad), grad) for grad in grads], norm_type)
        return _norm_like(norm, grads[0], norm_type, error_if_nonfinite)

    return get_total_norm


def _make_clip_grad_norm(inner: _Function) -> _Function:
    @functools.wraps(inner)
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,
                        foreach: Optional[bool] = None) -> Tensor:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not any(entry_of(param) is not None for param in params):
            if isinstance(parameters, types.GeneratorType):
                parameters = (param for param in params)
            return inner(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        norm = sharded_clip.total_norm([(entry_of(param), param.grad) for param in params], norm_type)
        grads = [param.grad for param in params if param.grad is not None]
        result = _norm_like(norm, grads[0] if grads else torch.tensor(0.0), norm_type, error_if_nonfinite)
        sharded_clip.scale_to_norm(grads, max_norm, norm)
        return result

    return clip_grad_norm_


# torch.nn.init: functions that draw random numbers, or need the shape, fill a whole tensor


def _make_full_init(inner: _Function) -> _Function:
    @functools.wraps(inner)
    def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        part = part_of(tensor)
        if part is None:
            entry = entry_of(tensor)
            if entry is None:
                return inner(tensor, *args, **kwargs)
            inner(plain_tensor(tensor), *args, **kwargs)
            entry.group.broadcast(tensor)
            return tensor
        part.fill(tensor, lambda whole: inner(whole, *args, **kwargs))
        return tensor

    return filled


# Optimizers

_ELEMENTWISE = tuple(getattr(torch.optim, name) for name in (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam")
    if hasattr(torch.optim, name))
# PyTorch's optimizers that need whole parameters, and alternatives.
_NEED_FULL_PARAM = {
    "Adafactor": "use libdc.optim.SOAP, which knows parts, or an optimizer that works element by element, as AdamW",
    "LBFGS": "use libdc.optim.KFAC or Shampoo, which know parts",
    "Muon": "use libdc.optim.Muon, which knows parts",
    "ZeroRedundancyOptimizer": "use the optimizer that it wraps: shard() has shared its state out already",
}


def _check_optimizer(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> None:
    """Refuses PyTorch's optimizers that need whole parameters. In other optimizers, each function that needs them is an
    error."""
    entries = [entry for entry in map(entry_of, group["params"]) if entry is not None and entry.group.stage > 0]
    for base in type(optimizer).__mro__ if entries else ():
        if base.__name__ in _NEED_FULL_PARAM and base.__module__.startswith("torch."):
            raise ValueError(f"{type(optimizer).__name__}: {entries[0].names[0]} is sharded, so the optimizer has a "
                             f"part of {tuple(entries[0].shape)}, but needs the whole: "
                             f"{_NEED_FULL_PARAM[base.__name__]}; or shard the model at stage 0")


def _check_state(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> None:
    """Refuses state from before shard(), which may differ between ranks. libdc.optim's optimizers check this
    themselves."""
    for param in group["params"] if isinstance(optimizer, _ELEMENTWISE) else ():
        entry = entry_of(param)
        for key, value in optimizer.state.get(param, {}).items():
            if entry is None or not is_like(entry.shape, key, value):
                continue
            if not is_shard_like(optimizer, entry, key, value):
                raise ValueError(f"{type(optimizer).__name__}: {key} of {entry.names[0]} is from before "
                                 "libdc.torch.shard(), and whole: make the optimizer after it, and give it the earlier "
                                 "one's state_dict() by load_state_dict()")


def _has_parts(optimizer: torch.optim.Optimizer) -> bool:
    return any(part_of(param) is not None for param in _params_of(optimizer))


def _make_step(inner: _Function) -> _Function:
    """Wraps the step of an element-by-element optimizer, which then works on plain tensors, at their speed."""

    @functools.wraps(inner)
    def step(self: torch.optim.Optimizer, closure: Optional[Callable[[], Any]] = None) -> Any:
        if not _has_parts(self):
            return inner(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch._C.DisableTorchFunctionSubclass():
            inner(self)
        return loss

    return step


def _params_of(optimizer: torch.optim.Optimizer) -> List[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _drop_local_sums(params: Iterable[Any]) -> None:
    """Drops the local sums of no_sync() for these parameters."""
    dropped: Dict[Any, List[ShardedParam]] = {}
    for entry in map(entry_of, params):
        root = None if entry is None else entry.root_ref()
        if entry is not None and root is not None and root.local_sums.entries:
            dropped.setdefault(root, []).append(entry)
    for root, entries in dropped.items():
        root.local_sums.drop(entries)


def _make_zero_grad(inner: _Function, params_of: Callable[[Any], Iterable[Any]]) -> _Function:
    """Wraps a module's or an optimizer's zero_grad(). It drops the local sums of no_sync() together with the
    gradients."""

    @functools.wraps(inner)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        params = list(params_of(self))
        _drop_local_sums(params)
        if not any(part_of(param) is not None for param in params):
            return inner(self, set_to_none)
        with torch._C.DisableTorchFunctionSubclass():  # setting gradients to None, or to 0, is valid for parts
            inner(self, set_to_none)

    return zero_grad


def _make_add_param_group(inner: _Function) -> _Function:
    @functools.wraps(inner)
    def add_param_group(self: torch.optim.Optimizer, param_group: Dict[str, Any]) -> None:
        inner(self, param_group)
        try:
            _inspect_param_groups(self)
        except ValueError:
            self.param_groups.pop()
            raise

    return add_param_group


def _make_state_method(inner: _Function) -> _Function:
    """Wraps state_dict() or load_state_dict(), so that an optimizer that was made before shard() learns of its
    shards."""

    @functools.wraps(inner)
    def method(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        _add_state_hooks(self)
        return inner(self, *args, **kwargs)

    return method


def _inspect_param_groups(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Checks an optimizer's groups once they have sharded parameters. It also runs before each step, since shard() may
    have been called after the optimizer was made."""
    inspected = optimizer.__dict__.get("_dc_inspected_groups")
    if inspected == len(optimizer.param_groups):
        return
    groups = optimizer.param_groups
    if not any(map(entry_of, _params_of(optimizer))):
        return
    for group in groups:
        _check_optimizer(optimizer, group)
        _check_state(optimizer, group)
    _add_state_hooks(optimizer)
    optimizer.__dict__["_dc_inspected_groups"] = len(groups)


def _add_state_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Adds hooks to an optimizer with sharded parameters. A wrapper such as Lookahead may have none, and call the inner
    optimizer's methods."""
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        return
    if "_dc_has_state_hooks" not in optimizer.__dict__ and any(map(entry_of, _params_of(optimizer))):
        optimizer.__dict__["_dc_has_state_hooks"] = True
        optimizer.register_state_dict_post_hook(_state_as_parts)
        optimizer.register_load_state_dict_pre_hook(_state_as_tensors)
        prepare_owned_states(optimizer)


def _params_by_number(optimizer: torch.optim.Optimizer, packed: Dict[str, Any]) -> Dict[Any, Any]:
    """The parameters of a state_dict(), by their numbers in it."""
    return {number: param for group, shown in zip(optimizer.param_groups, packed["param_groups"])
            for number, param in zip(shown["params"], group["params"])}


def _map_state(optimizer: torch.optim.Optimizer, packed: Dict[str, Any],
               convert: Callable[[ShardedParam, str, Tensor], Tensor]) -> Dict[str, Any]:
    """A state_dict() with converted tensors for parameters of which each rank has a part."""
    params = _params_by_number(optimizer, packed)

    def value_of(number: Any, key: str, value: Any) -> Any:
        entry = entry_of(params.get(number))
        if entry is None or entry.part is None or not isinstance(value, Tensor):
            return value
        return convert(entry, key, value)

    state = {number: {key: value_of(number, key, value) for key, value in values.items()}
             for number, values in packed["state"].items()}
    return {**packed, "state": state}


def _state_as_parts(optimizer: torch.optim.Optimizer, packed: Dict[str, Any]) -> Dict[str, Any]:
    """A state_dict() whose shards are LocalShards. Plain ones, saved by one rank, would be loaded by all ranks."""
    patch_if_imported()

    def convert(entry: ShardedParam, key: str, value: Tensor) -> Tensor:
        if is_owned(optimizer, key):
            return OwnedState.of(entry.part, value)
        return LocalShard.of(entry.part, value) if is_shard_like(optimizer, entry, key, value) else value

    return _map_state(optimizer, packed, convert)


def _state_as_tensors(optimizer: torch.optim.Optimizer, packed: Dict[str, Any]) -> Dict[str, Any]:
    """The reverse of _state_as_parts(). It also takes whole states, of which each rank takes its part of each tensor,
    and the blocks and layers that it owns."""
    # A user's own step, even in a class derived from PyTorch's or libdc's, may compute norms of its state, and needs
    # parts.
    plain = type(optimizer).step.__module__.startswith(("torch.optim.", "libdc."))

    def convert(entry: ShardedParam, key: str, value: Tensor) -> Tensor:
        if part_of(value) is None and not is_owned(optimizer, key) and is_like(entry.shape, key, value):
            local = torch.zeros_like(entry.data, dtype=value.dtype)
            copy_shard(entry, value, local)
            value = LocalShard.of(entry.part, local)
        return plain_tensor(value) if plain else value

    params = _params_by_number(optimizer, packed)
    for entry in filter(None, map(entry_of, params.values())):
        entry.group.loaded = True  # so every rank must load its part

    def is_others(number: Any, key: str) -> bool:
        entry = entry_of(params.get(number))
        return entry is not None and entry.group.comm.size > 1 and not is_read(optimizer, params[number], key)

    state = {number: {key: value for key, value in values.items() if not is_others(number, key)}
             for number, values in packed["state"].items()}
    return _map_state(optimizer, {**packed, "state": state}, convert)


# torch.func.functional_call


def _make_swap_tensor(inner: _Function) -> _Function:
    @functools.wraps(inner)
    def swap_tensor(module: nn.Module, name: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        original = inner(module, name, tensor, *args, **kwargs)
        state = module.__dict__.get(MODULE_STATE)
        if state is not None and name in state.entries:
            tracing.note_given(module, name, managed_param(module, name, tensor) is not None)
        return original

    return swap_tensor


# torch.distributed


def _make_broadcast_coalesced(inner: _Function) -> _Function:
    """Wraps the function that _sync_module_states() calls. Public collectives ask the tensor's class instead."""

    @functools.wraps(inner)
    def broadcast_coalesced(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if any(part_of(tensor) is not None for tensor in tensors):
            return dispatch(inner, (group, tensors, *args), kwargs)  # raises
        return inner(group, tensors, *args, **kwargs)

    return broadcast_coalesced


def patch_torch_functions() -> None:
    """Patches PyTorch's functions. For models and optimizers without sharded parameters nothing changes."""
    _patch(clip_grad, "clip_grad_norm_", _make_clip_grad_norm)
    _patch(clip_grad, "_get_total_norm", _make_get_total_norm)
    for name in ("eye_", "dirac_", "orthogonal_", "sparse_", "_no_grad_trunc_normal_"):
        _patch(nn.init, name, _make_full_init)
    for kind in _ELEMENTWISE:  # below the code that calls step hooks, since users' hooks see parts
        if "step" in kind.__dict__:  # AdamW may inherit Adam's
            _patch(kind, "step", _make_step)
    _patch(_named_member_accessor, "swap_tensor", _make_swap_tensor)
    _patch(torch.autograd, "_engine_run_backward", make_run_backward)
    if torch.distributed.is_available():
        _patch(torch.distributed, "_broadcast_coalesced", _make_broadcast_coalesced)
    module: Any = nn.Module
    module.zero_grad = _make_zero_grad(module.zero_grad, module.parameters)
    optimizer: Any = torch.optim.Optimizer
    optimizer.zero_grad = _make_zero_grad(optimizer.zero_grad, _params_of)
    optimizer.state_dict = _make_state_method(optimizer.state_dict)
    optimizer.load_state_dict = _make_state_method(optimizer.load_state_dict)
    optimizer.add_param_group = _make_add_param_group(optimizer.add_param_group)
    register_optimizer_step_pre_hook(_inspect_param_groups)
