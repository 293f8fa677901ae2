"""torch.amp.GradScaler on sharded models, where each rank has its own part of the gradients, but all have one scale."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Dict, Iterable, List

import torch
from torch import Tensor

from .. import devices
from ..sharding.parameter import entry_of
from ..sharding.part import plain_tensor
from ..sharding.root import Root, root_that_ignores

_Method = Callable[[Any, torch.optim.Optimizer], Any]
_Roots = List["weakref.ref[Root]"]


class _Checks:
    """The models of the optimizers that a scaler has checked. References are weak, so that a scaler keeps no model
    alive."""

    def __init__(self) -> None:
        self.since_update: Dict[int, _Roots] = {}  # since the last update(), by the optimizer's id()
        self.last: _Roots = []  # those of the last update() that had any


_checks: "weakref.WeakKeyDictionary[Any, _Checks]" = weakref.WeakKeyDictionary()


def _roots_of(params: Iterable[Any]) -> List[Root]:
    """The sharded models of these parameters, without those of one rank. A parameter that shard()'s policy left out
    belongs to its model."""
    entries = ((param, entry_of(param)) for param in params)
    roots = dict.fromkeys(root_that_ignores(param) if entry is None else entry.root for param, entry in entries)
    return [root for root in roots if root is not None and root.group.all_ranks.size > 1]


def _sync(root: Root, found: Tensor) -> None:
    comm = root.group.comm_for(found.device, all_ranks=True)
    comm.all_reduce(found, stream=devices.current_stream(found.device))
    found.clamp_(max=1.0)  # a sum may exceed 1, with which PyTorch's fused optimizers compare


def sync_found_inf(optimizer: torch.optim.Optimizer, found: Iterable[Tensor]) -> _Roots:
    """Sets found_inf to 1 on all ranks if it is 1 on any, since each rank checks only its part of the gradients. Runs
    in the order of PyTorch's current stream. Returns the models whose ranks now agree.

    At stage 0 all ranks have the same averaged gradients, but gradients of parameters without an entry are each rank's
    own. With replicas that also holds between groups of ranks, so all ranks of the model take part."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    roots, differ = _roots_of(params), any(entry_of(param) is None for param in params)
    for root in roots:
        for tensor in found if root.group.stage > 0 or differ else ():
            _sync(root, tensor)
    return [weakref.ref(root) for root in roots]


def _sync_scale(scaler: torch.amp.GradScaler, checks: _Checks) -> None:
    """Makes ranks agree on the scale. It serves all optimizers, even those of parameters outside of sharded models. An
    overflow that one rank found there, or in another model, must lower the scale on all ranks of each model."""
    agreed = [set(roots) for roots in checks.since_update.values()]
    checks.last = list(dict.fromkeys(root for roots in checks.since_update.values() for root in roots)) or checks.last
    found = [tensor for state in scaler._per_optimizer_states.values()
             for tensor in state["found_inf_per_device"].values()]
    if not found or all(roots == set(checks.last) for roots in agreed):
        return
    total = torch.stack([tensor.to(found[0].device, non_blocking=True) for tensor in found]).amax(0)
    for root in (reference() for reference in checks.last):
        if root is not None:
            _sync(root, total)
    found[0].copy_(total)  # update() adds up all of them


def clear_padding(optimizer: torch.optim.Optimizer) -> None:
    """Zeroes the padding after this rank's elements of gradients. An operation such as 0 * inf or 0 / 0 may have left a
    NaN there."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        entry = entry_of(param)
        if entry is not None and entry.part is not None and param.grad is not None:
            plain_tensor(param.grad)[entry.part.count :].zero_()


def _with_synced_found_inf(inner: _Method) -> _Method:
    """Wraps a method of GradScaler that looks for infinities and NaN in an optimizer's gradients."""

    @functools.wraps(inner)
    def method(self: Any, optimizer: torch.optim.Optimizer) -> Any:
        if self.is_enabled():
            clear_padding(optimizer)
        result = inner(self, optimizer)
        if self.is_enabled():
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            _checks.setdefault(self, _Checks()).since_update[id(optimizer)] = sync_found_inf(optimizer, found)
        return result

    return method


def _with_synced_scale(inner: Callable[..., None]) -> Callable[..., None]:
    """Wraps GradScaler.update()."""

    @functools.wraps(inner)
    def update(self: Any, new_scale: Any = None) -> None:
        checks = _checks.get(self)
        if checks is not None:
            if new_scale is None:
                _sync_scale(self, checks)
            checks.since_update = {}
        inner(self, new_scale)

    return update


def patch_grad_scaler() -> None:
    """Patches all scalers, including existing ones. Without sharded parameters nothing changes."""
    for name in ("unscale_", "_check_inf_per_device"):
        setattr(torch.amp.GradScaler, name, _with_synced_found_inf(getattr(torch.amp.GradScaler, name)))
    torch.amp.GradScaler.update = _with_synced_scale(torch.amp.GradScaler.update)  # type: ignore[method-assign]
