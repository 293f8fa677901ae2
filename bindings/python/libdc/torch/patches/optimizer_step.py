"""The step of any torch.optim.Optimizer tells sharded models which parameters it changed."""

from __future__ import annotations

from typing import Any, Dict, List

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..sharding.parameter import entry_of
from ..sharding.root import Root
from ..sharding.sharded_param import ShardedParam


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Announces the parameters that an optimizer has stepped to their models."""
    stepped: Dict[Root, List[ShardedParam]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for param in group["params"]:
                entry = entry_of(param)
                if entry is None or param.grad is None:
                    continue
                root = entry.root_ref()
                if root is not None:
                    entry.optimizer_steps += 1
                    stepped.setdefault(root, []).append(entry)
    for root, entries in stepped.items():
        root.group.params_updated(entries if len(entries) < len(root.group.entries) else None)


def announce_steps() -> None:
    register_optimizer_step_post_hook(_after_step)
