"""torch.amp.GradScaler on sharded models: ranks have other parts of the gradients, and one scale."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable

import torch
from torch import Tensor

from .. import devices
from ..sharding.parameter import entry_of
from ..sharding.part import plain_tensor

_Method = Callable[[Any, torch.optim.Optimizer], Any]


def sync_found_inf(optimizer: torch.optim.Optimizer, found: Iterable[Tensor]) -> None:
    """Sets found_inf to 1 on all ranks where one rank's is, since each looks at its part of the gradients alone; in the
    order of PyTorch's current stream.

    At stage 0 all ranks have the same averaged gradients, but those of parameters without an entry are their own. So
    are they in groups of ranks with all parameters each; therefore all ranks of the model take part."""
    entries = [entry_of(param) for group in optimizer.param_groups for param in group["params"]]
    differ = None in entries
    roots = dict.fromkeys(entry.root for entry in entries if entry is not None and (entry.group.stage > 0 or differ))
    for root in roots:
        for tensor in found if root.group.all_ranks.size > 1 else ():
            comm = root.group.comm_for(tensor.device, all_ranks=True)
            comm.all_reduce(tensor, stream=devices.current_stream(tensor.device))
            tensor.clamp_(max=1.0)  # a sum; PyTorch's fused optimizers compare with 1


def clear_padding(optimizer: torch.optim.Optimizer) -> None:
    """Zeroes the padding behind this rank's elements of gradients, in which an operation may have left a NaN: zero
    times infinity, or over zero."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        entry = entry_of(param)
        if entry is not None and entry.part is not None and param.grad is not None:
            plain_tensor(param.grad)[entry.part.count :].zero_()


def _with_synced_found_inf(inner: _Method) -> _Method:
    """A method of GradScaler that looks for infinities and NaN in an optimizer's gradients."""

    @functools.wraps(inner)
    def method(self: Any, optimizer: torch.optim.Optimizer) -> Any:
        if self.is_enabled():
            clear_padding(optimizer)
        result = inner(self, optimizer)
        if self.is_enabled():
            sync_found_inf(optimizer, self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        return result

    return method


def patch_grad_scaler() -> None:
    """Of all scalers, those made before included; without sharded parameters nothing changes."""
    for name in ("unscale_", "_check_inf_per_device"):
        setattr(torch.amp.GradScaler, name, _with_synced_found_inf(getattr(torch.amp.GradScaler, name)))
