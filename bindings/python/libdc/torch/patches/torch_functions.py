"""PyTorch's own functions on sharded parameters: right where a few lines make them so, else an error that names the way
out. Functions are changed in place where that is possible, so that modules that imported them before use them too."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any, Callable, Dict, Optional, Set

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..checkpoint.state_dict import is_owned, is_shard_like
from ..sharding import clip_grad as sharded_clip
from ..sharding.parameter import LocalShard, entry_of, init_shard, plain_tensor
from ..sharding.sharded_param import ShardedParam

_Function = Callable[..., Any]


def _patch(module: Any, name: str, make: Callable[[_Function], _Function]) -> None:
    """Replaces a module's function, for all holders of it. Of a decorated one, the function that the decorator
    calls."""
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
        return _norm_like(sharded_clip.total_norm(grads, norm_type), grads[0], norm_type, error_if_nonfinite)

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
        params = [param for param in params if param.grad is not None]
        if not params:
            return torch.tensor(0.0)
        norm = sharded_clip.total_norm([param.grad for param in params], norm_type, params)
        result = _norm_like(norm, params[0].grad, norm_type, error_if_nonfinite)
        sharded_clip.scale_to_norm([param.grad for param in params], max_norm, norm)
        return result

    return clip_grad_norm_


# torch.nn.init: functions that draw, or need the shape, fill a whole tensor


def _any_entry_of(tensor: Any) -> Optional[ShardedParam]:
    return tensor.entry() if isinstance(tensor, LocalShard) else entry_of(tensor)


def _make_full_init(inner: _Function) -> _Function:
    @functools.wraps(inner)
    def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        entry = _any_entry_of(tensor)
        if entry is None:
            return inner(tensor, *args, **kwargs)
        init_shard(entry, tensor, lambda whole: inner(whole, *args, **kwargs))
        return tensor

    return filled


def _make_calculate_fans(inner: _Function) -> _Function:
    @functools.wraps(inner)
    def fan_in_and_out(tensor: Tensor) -> Any:
        entry = _any_entry_of(tensor)
        return inner(tensor if entry is None else torch.empty(entry.shape, device="meta"))

    return fan_in_and_out


def _make_compute_weight(inner: _Function) -> _Function:
    @functools.wraps(inner)
    def compute_weight(self: Any, module: nn.Module) -> Any:
        """Of the old weight_norm, whose kernel trusts in shapes that parts do not have."""
        g, v = getattr(module, self.name + "_g"), getattr(module, self.name + "_v")
        for entry in (entry_of(g), entry_of(v)):
            if entry is not None and entry.group.stage > 0:
                raise RuntimeError(f"weight_norm: {entry.names[0]} is only whole in a forward of the sharded model: "
                                   "call this before libdc.torch.shard(), or in `with libdc.torch.gathered(model):`")
        return inner(self, module)

    return compute_weight


# Optimizers

_ELEMENTWISE = tuple(getattr(torch.optim, name) for name in (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam")
    if hasattr(torch.optim, name))
_ADVICE = "use one of libdc.optim, which know parts, or one that works element by element, as AdamW does"
# Names of optimizers that need whole parameters or norms of them, torch.optim's and others', and what to do.
_NEED_FULL_PARAM = {
    **dict.fromkeys(("Adafactor", "CAME", "GaLoreAdamW", "LAMB", "LARS", "LBFGS", "Lamb", "Lars"), _ADVICE),
    **{name: f"use libdc.optim.{name}, which knows parts" for name in ("KFAC", "Muon", "SOAP", "Shampoo")},
    "ZeroRedundancyOptimizer": "use the optimizer that it wraps: shard() has shared its state out already",
}
_warned: Set[type] = set()


def _check_optimizer(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> None:
    """Refuses optimizers that would do something else on flat parts than on whole parameters."""
    entries = [entry for entry in map(entry_of, group["params"]) if entry is not None and entry.group.stage > 0]
    kind = type(optimizer)
    if not entries or kind.__module__.startswith("libdc."):
        return
    for base in kind.__mro__:
        if base.__name__ in _NEED_FULL_PARAM and not base.__module__.startswith("libdc."):
            raise ValueError(f"{kind.__name__}: {entries[0].names[0]} is sharded, so the optimizer has a flat part of "
                             f"{tuple(entries[0].shape)}, but needs the whole: {_NEED_FULL_PARAM[base.__name__]}; or "
                             "shard the model at stage 0")
    if not isinstance(optimizer, _ELEMENTWISE) and kind not in _warned:
        _warned.add(kind)
        warnings.warn(f"{kind.__name__} gets flat parts of a sharded model's parameters: that is right if it works "
                      f"element by element, as AdamW does, and wrong if it looks at shapes or norms; {_ADVICE}",
                      stacklevel=4)


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


def _inspect_param_groups(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Looks at an optimizer's groups once they have sharded parameters; before each step too, since shard() may have
    come later than the optimizer."""
    inspected = optimizer.__dict__.get("_dc_inspected_groups")
    if inspected == len(optimizer.param_groups):
        return
    groups = optimizer.param_groups
    if not any(entry_of(param) is not None for group in groups for param in group["params"]):
        return
    for group in groups:
        _check_optimizer(optimizer, group)
    if inspected is None:
        optimizer.register_state_dict_post_hook(_state_as_parts)
        optimizer.register_load_state_dict_pre_hook(_state_as_tensors)
    optimizer.__dict__["_dc_inspected_groups"] = len(groups)


def _state_as_parts(optimizer: torch.optim.Optimizer, packed: Dict[str, Any]) -> Dict[str, Any]:
    """A state_dict() whose shards are LocalShard: if one rank saved plain ones, all ranks would load them."""
    params = {number: param for group, shown in zip(optimizer.param_groups, packed["param_groups"])
              for number, param in zip(shown["params"], group["params"])}

    def value_of(number: Any, key: str, value: Any) -> Any:
        entry = entry_of(params.get(number))
        if entry is None or entry.group.stage == 0 or not isinstance(value, Tensor):
            return value
        return LocalShard.of(entry, value) if is_owned(optimizer, key) or is_shard_like(entry, key, value) else value

    state = {number: {key: value_of(number, key, value) for key, value in values.items()}
             for number, values in packed["state"].items()}
    return {**packed, "state": state}


def _state_as_tensors(optimizer: torch.optim.Optimizer, packed: Dict[str, Any]) -> Dict[str, Any]:
    def value_of(value: Any) -> Any:
        return plain_tensor(value) if isinstance(value, LocalShard) else value

    state = {number: {key: value_of(value) for key, value in values.items()}
             for number, values in packed["state"].items()}
    return {**packed, "state": state}


def patch_torch_functions() -> None:
    """On models and optimizers without sharded parameters nothing changes."""
    _patch(clip_grad, "clip_grad_norm_", _make_clip_grad_norm)
    _patch(clip_grad, "_get_total_norm", _make_get_total_norm)
    for name in ("eye_", "dirac_", "orthogonal_", "sparse_", "_no_grad_trunc_normal_"):
        _patch(nn.init, name, _make_full_init)
    _patch(nn.init, "_calculate_fan_in_and_fan_out", _make_calculate_fans)
    _patch(WeightNorm, "compute_weight", _make_compute_weight)
    optimizer: Any = torch.optim.Optimizer
    optimizer.add_param_group = _make_add_param_group(optimizer.add_param_group)
    register_optimizer_step_pre_hook(_inspect_param_groups)
