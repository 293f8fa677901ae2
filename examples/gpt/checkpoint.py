"""Checkpoints: a folder of safetensors files that appears under its name only when it is whole.

    step-000240/weights.safetensors        the full weights under the model's own names, readable by anything
    step-000240/optimizer-0.safetensors    rank 0's part of the optimizer state and its random state; one file a rank
    step-000240/state.json                 step, ranks, element counts

A sharded parameter's optimizer state is the flat, contiguous part [rank * P, (rank + 1) * P) with P = ceil(N / ranks),
so that the files' parts, put in a row, are the whole state: a run may go on at another stage or with other ranks.
"""
from __future__ import annotations

import json
import os
import re
import shutil
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from safetensors import safe_open
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


def save(folder: str, step: int, weights: Dict[str, torch.Tensor], sizes: Dict[str, int],
         params: Dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, rank: int, ranks: int,
         barrier: Callable[[], None]) -> str:
    """Every rank calls it. `weights` are full (used on rank 0), `params` this rank's parameters by name, `sizes` the
    full parameters' element counts. Returns the checkpoint's path."""
    final = os.path.join(folder, f"step-{step:06d}")
    part = final + ".part"
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        os.makedirs(part)
    barrier()
    tensors = {f"{key}:{name}": value.contiguous().clone() for name, p in params.items()
               for key, value in optimizer.state[p].items()}
    tensors["rng"] = torch.get_rng_state()
    path = os.path.join(part, f"optimizer-{rank}.safetensors")
    save_file(tensors, path)
    _sync(path)
    if rank == 0:
        path = os.path.join(part, "weights.safetensors")
        save_file({n: t.detach().contiguous().clone() for n, t in weights.items()}, path, metadata={"format": "pt"})
        _sync(path)
        with open(os.path.join(part, "state.json"), "w") as f:
            json.dump({"step": step, "ranks": ranks, "sizes": sizes}, f)
            f.flush()
            os.fsync(f.fileno())
    barrier()
    if rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(part, final)
        _sync(folder)
        for old in _steps(folder)[:-_KEEP]:
            shutil.rmtree(old)
    barrier()
    return final


def read_weights(path: str) -> Dict[str, torch.Tensor]:
    return load_file(os.path.join(path, "weights.safetensors"))


def read_state(path: str) -> Dict[str, Any]:
    with open(os.path.join(path, "state.json")) as f:
        return json.load(f)


def _whole(parts: List[torch.Tensor], size: int) -> torch.Tensor:
    if parts[0].numel() >= size:  # every rank had all of it
        return parts[0].flatten()
    return torch.cat([p.flatten() for p in parts])[:size]


def load_optimizer(path: str, params: Dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, rank: int,
                   ranks: int) -> None:
    """Puts the optimizer state back on this rank's parameters, whatever the ranks and the stage that saved it."""
    state = read_state(path)
    files = [safe_open(os.path.join(path, f"optimizer-{r}.safetensors"), framework="pt") for r in range(state["ranks"])]
    for key, name in _keys(files[0].keys()):
        p, size = params[name], state["sizes"][name]
        parts = [f.get_tensor(f"{key}:{name}") for f in files]
        if parts[0].dim() == 0 and key == "step":
            optimizer.state[p][key] = parts[0]
            continue
        value = _whole(parts, size)
        if p.numel() != size:
            share = -(-size // ranks)
            value = value[rank * share:(rank + 1) * share]
        mine = torch.zeros_like(p)
        mine.view(-1)[:value.numel()] = value
        optimizer.state[p][key] = mine
    torch.set_rng_state(files[min(rank, len(files) - 1)].get_tensor("rng"))


def _keys(names: List[str]) -> Iterator[Tuple[str, str]]:
    for full in names:
        key, _, name = full.partition(":")
        if name:
            yield key, name
