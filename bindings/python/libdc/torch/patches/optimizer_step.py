"""Makes the step of any torch.optim.Optimizer tell sharded models which parameters it changed.

Fused optimizers do not raise a tensor's version. So a parameter counts as stepped if it has a gradient when the step
begins or ends, since the step itself, or an earlier hook, may set `.grad` to None. A closure computes gradients during
the step, so with one every trained parameter counts."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..sharding.parameter import entry_of
from ..sharding.root import Root
from ..sharding.sharded_param import ShardedParam


class _Begun(NamedTuple):
    """An optimizer's sharded parameters at the beginning of its last step."""

    stepped: List[ShardedParam]
    without_grad: List[Tuple[Any, ShardedParam]]


def _look(optimizer: torch.optim.Optimizer, closure: bool) -> _Begun:
    begun = _Begun([], [])
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for param in group["params"]:
                entry = entry_of(param)
                if entry is None:
                    continue
                if param.grad is not None or (closure and entry.requires_grad):
                    begun.stepped.append(entry)
                else:
                    begun.without_grad.append((param, entry))
    return begun


def _before_step(optimizer: torch.optim.Optimizer, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    # It stays after the step: a step() that calls another one ends later, and needs the same parameters.
    optimizer.__dict__["_dc_begun_step"] = _look(optimizer, callable(closure))


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Tells models which of their parameters an optimizer has stepped."""
    begun: _Begun = optimizer.__dict__.get("_dc_begun_step") or _look(optimizer, False)
    with torch._C.DisableTorchFunctionSubclass():
        later = [entry for param, entry in begun.without_grad if param.grad is not None]
    stepped: Dict[Root, List[ShardedParam]] = {}
    for entry in begun.stepped + later:
        root = entry.root_ref()
        if root is not None:
            entry.optimizer_steps += 1
            torch.autograd.graph.increment_version(entry.data)  # shows compiled backwards the change
            stepped.setdefault(root, []).append(entry)
    for root, entries in stepped.items():
        root.group.params_updated(entries if len(entries) < len(root.group.entries) else None)


def announce_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
