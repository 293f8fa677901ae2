"""Checkpoints: files to which each rank writes its own part, and which appear only when they are complete.

    step-000240.safetensors     the weights under the model's own names, readable by anything, the optimizer's state,
    the
                                step, and each rank's random state

A run can continue at another stage or on another number of ranks."""
from __future__ import annotations

import os
import re
from typing import Any, List, Optional

import libdc.torch as dct
import torch

_KEEP = 2


def _files(folder: str) -> List[str]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, n) for n in sorted(names) if re.fullmatch(r"step-\d{6,}\.safetensors", n)]


def latest(folder: str) -> Optional[str]:
    """The newest checkpoint in a folder."""
    found = _files(folder)
    return found[-1] if found else None


def save(folder: str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> None:
    """Saves a checkpoint, and deletes old ones. Every rank must call it."""
    own = torch.get_rng_state().view(torch.int8)  # a type that collectives take
    random = group.all_gather(own, torch.empty(group.size, own.numel(), dtype=own.dtype)).view(torch.uint8)
    dct.save_checkpoint(model, os.path.join(folder, f"step-{step:06d}.safetensors"), optimizer,
                        {"step": step, "random": random})
    if group.rank == 0:
        for old in _files(folder)[:-_KEEP]:
            os.unlink(old)


def load(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> int:
    """Loads a checkpoint into a sharded model, its optimizer and this rank's random state, and returns its step. A rank
    that the saved run did not have gets rank 0's random state."""
    extra = dct.load_checkpoint(model, path, optimizer)
    random = extra["random"][group.rank if group.rank < len(extra["random"]) else 0]
    torch.set_rng_state(random.clone())  # clone(): PyTorch 2.13 reads from the storage's beginning
    return int(extra["step"])
