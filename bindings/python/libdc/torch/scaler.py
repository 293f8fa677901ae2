"""torch.amp.GradScaler on sharded models: ranks have other parts of the gradients, and one scale."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable

import torch
from torch import Tensor

from . import devices
from .shard import entry_of


def agree(optimizer: torch.optim.Optimizer, found: Iterable[Tensor]) -> None:
    """What a rank has found in its part of the gradients becomes what some rank has found; in the order of PyTorch's
    current stream."""
    entries = [entry_of(param) for group in optimizer.param_groups for param in group["params"]]
    roots = dict.fromkeys(entry.root for entry in entries if entry is not None and entry.root.stage > 0)
    for root in roots:
        for tensor in found if root.comm.size > 1 else ():
            root.comm_for(tensor.device).all_reduce(tensor, stream=devices.current_stream(tensor.device))


def _agreeing(look: Callable[[Any, torch.optim.Optimizer], Any]) -> Callable[[Any, torch.optim.Optimizer], Any]:
    """A method of GradScaler that looks for infinities and NaN in an optimizer's gradients."""

    @functools.wraps(look)
    def method(self: Any, optimizer: torch.optim.Optimizer) -> Any:
        result = look(self, optimizer)
        if self.is_enabled():
            agree(optimizer, self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        return result

    return method


def follow_scalers() -> None:
    """Scalers that anybody makes; of optimizers without sharded parameters they change nothing."""
    for name in ("unscale_", "_check_inf_per_device"):
        setattr(torch.amp.GradScaler, name, _agreeing(getattr(torch.amp.GradScaler, name)))


follow_scalers()
