"""Buffers, of which each rank has its own: one rule for whole states and for checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import libdc.torch as dct
import pytest
import safetensors.torch
import torch
from sharded import on, one_thread  # noqa: F401
from torch import Tensor, nn

RANKS = 3


class Statistics(nn.Module):
    """Buffers of several types; the last is under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("narrow", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("wide", torch.zeros((), dtype=torch.float64))
        self.register_buffer("turns", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("strided", torch.zeros(2, 3).t())
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("spaced", torch.zeros(2)[::2])  # one element, of stride 2
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.norm.register_buffer("same", self.mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def own(model: nn.Module) -> Dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()
            if name not in ("norm.weight", "norm.bias")}


def trained(comm: Any, stage: int) -> nn.Module:
    model = Statistics()
    dct.shard(model, stage, comm=comm)
    model(torch.arange(8.0).view(2, 4) * (comm.rank + 1)).sum().backward()
    model.norm.num_batches_tracked += comm.rank
    for name in ("narrow", "wide", "turns", "strided", "spaced"):
        getattr(model, name).fill_(comm.rank + 1.5)
    model.mask.fill_(comm.rank == 0)
    return model


def check(found: Dict[str, Tensor], owns: List[Dict[str, Tensor]], rule: str) -> None:
    for name, first in owns[0].items():
        want = first
        if rule == "mean" and (first.is_floating_point() or first.is_complex()):
            wide = torch.complex128 if first.is_complex() else torch.float64
            want = torch.stack([every[name].to(wide) for every in owns]).mean(0).to(first.dtype)
        assert found[name].dtype == first.dtype and torch.allclose(found[name], want, rtol=1e-6), name
    assert "passing" not in found


@pytest.mark.parametrize("rule", ["rank0", "mean"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_whole_states_and_checkpoints_have_the_same(stage: int, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"

    def rank(comm: Any) -> Any:
        model = trained(comm, stage)
        before = own(model)
        whole, first = dct.full_state_dict(model, buffers=rule), dct.full_state_dict(model, True, buffers=rule)
        assert bool(first) == (comm.rank == 0)
        del model.turns  # safetensors has no complex numbers
        dct.save_checkpoint(model, path, buffers=rule)
        after = own(model)
        assert all(torch.equal(before[name], value) for name, value in after.items())  # the model keeps its own
        fresh = Statistics()
        del fresh.turns
        dct.shard(fresh, stage, comm=comm)
        dct.load_checkpoint(fresh, path)
        return before, whole, first, own(fresh)

    results = on(RANKS, rank)
    owns = [result[0] for result in results]
    assert not torch.equal(owns[0]["norm.running_var"], owns[1]["norm.running_var"])
    saved = safetensors.torch.load_file(path)
    saved.setdefault("norm.same", saved["mask"])
    for found in [result[1] for result in results] + [results[0][2]]:
        check(found, owns, rule)
    without = [{name: value for name, value in every.items() if name != "turns"} for every in owns]
    for found in [saved] + [result[3] for result in results]:
        check(found, without, rule)


def test_the_rule_is_checked(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        model = dct.shard(nn.Linear(2, 2), comm=comm)
        with pytest.raises(ValueError, match="full_state_dict: buffers = 'median', must be 'rank0' or 'mean'"):
            dct.full_state_dict(model, buffers="median")
        with pytest.raises(ValueError, match="save_checkpoint: buffers = None, must be 'rank0' or 'mean'"):
            dct.save_checkpoint(model, tmp_path / "w", buffers=None)  # type: ignore[arg-type]

    on(2, rank)


class InOneMemory(nn.Module):
    """Buffers that begin where its parameter ends, or before."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        flat = torch.zeros(8)
        self.weight = nn.Parameter(flat[:6].view(2, 3))
        self.register_buffer("rest", flat[begin:])
        self.register_buffer("nothing", flat[3:3])  # has no memory, though it begins in the parameter's


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_buffer_in_a_parameters_memory_is_refused(stage: int, device: str) -> None:
    """It went stale where shard() gives the parameter other memory."""

    def rank(comm: Any) -> None:
        with torch.device(device):
            model, apart = InOneMemory(5), InOneMemory(6)
        dct.shard(apart, stage, comm=comm, device="cpu")
        if stage == 0 and device == "cpu":
            dct.shard(model, stage, comm=comm)
            with torch.no_grad():
                model.weight.fill_(1)
            assert model.rest.tolist() == [1, 0, 0]
            return
        with pytest.raises(ValueError, match="shard: the buffer rest shares memory with the parameter weight, which"):
            dct.shard(model, stage, comm=comm, device="cpu")
        assert type(model.weight) is nn.Parameter and model.weight.device.type == device

    on(2, rank)
