"""Checkpoints: a folder of safetensors files that appears under its name only when it is whole.

    step-000240/weights.safetensors     the weights under the model's own names, readable by anything
    step-000240/optimizer.safetensors   "exp_avg:NAME" and so on, and each rank's random state as "random:RANK"
    step-000240/state.json              the step

All tensors are whole, so a run may go on at another stage or on another number of ranks.
"""
from __future__ import annotations

import json
import os
import re
import shutil
from typing import Any, Dict, List, Optional

import libdc.torch as dct
import torch
from safetensors.torch import load_file, save_file

_KEEP = 2


def _steps(folder: str) -> List[str]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, n) for n in sorted(names) if re.fullmatch(r"step-\d{6,}", n)]


def latest(folder: str) -> Optional[str]:
    """The newest whole checkpoint under a folder."""
    found = _steps(folder)
    return found[-1] if found else None


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(folder: str, step: int, files: Dict[str, Dict[str, torch.Tensor]]) -> str:
    final = os.path.join(folder, f"step-{step:06d}")
    part = final + ".part"
    shutil.rmtree(part, ignore_errors=True)
    os.makedirs(part)
    for name, tensors in files.items():
        path = os.path.join(part, name)
        save_file({k: t.contiguous() for k, t in tensors.items()}, path, metadata={"format": "pt"})
        _sync(path)
    with open(os.path.join(part, "state.json"), "w") as f:
        json.dump({"step": step}, f)
        f.flush()
        os.fsync(f.fileno())
    shutil.rmtree(final, ignore_errors=True)
    os.rename(part, final)
    _sync(folder)
    for old in _steps(folder)[:-_KEEP]:
        shutil.rmtree(old)
    return final


def save(folder: str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> None:
    """Every rank calls it; rank 0 writes."""
    weights = dct.full_state_dict(model, rank0_only=True)
    state = dct.full_optimizer_state_dict(model, optimizer, rank0_only=True)
    own = torch.get_rng_state().view(torch.int8)  # a type that collectives take
    random = group.all_gather(own, torch.empty(group.size, own.numel(), dtype=own.dtype)).view(torch.uint8)
    if group.rank == 0:
        values = {f"{key}:{name}": t for name, part in state["state"].items() for key, t in part.items()}
        values.update({f"random:{rank}": random[rank].clone() for rank in range(group.size)})
        _write(folder, step, {"weights.safetensors": weights, "optimizer.safetensors": values})
    group.barrier()


def load_weights(path: str, model: torch.nn.Module) -> int:
    """Into a model that is not sharded yet. Returns the step of the checkpoint."""
    model.load_state_dict(load_file(os.path.join(path, "weights.safetensors")))
    with open(os.path.join(path, "state.json")) as f:
        return int(json.load(f)["step"])


def load_optimizer(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> None:
    """Into the optimizer of a sharded model, and this rank's random state. A rank that was not there gets rank 0's."""
    state: Dict[str, Dict[str, torch.Tensor]] = {}
    random: Dict[int, torch.Tensor] = {}
    for full, value in load_file(os.path.join(path, "optimizer.safetensors")).items():
        key, _, name = full.partition(":")
        if key == "random":
            random[int(name)] = value
        else:
            state.setdefault(name, {})[key] = value
    names = [name for name, _ in model.named_parameters()]
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in optimizer.state_dict()["param_groups"]]
    dct.load_full_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups})
    torch.set_rng_state(random.get(group.rank, random[0]))
