"""Modules whose state has more than parameters and buffers, and modules that load by methods and hooks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import libdc.torch as dct
import pytest
import safetensors.torch
import torch
from models import bits
from sharded import on
from torch import nn


class Counted(nn.Linear):
    """Has a value of its own, of any length."""

    def __init__(self, *seen: int) -> None:
        super().__init__(3, 3)
        self.seen = list(seen)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.seen)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state.tolist()


class Logarithm(nn.Linear):
    """Keeps the logarithm of what its state has, and a number that it computes from what was loaded."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.logarithm = torch.zeros(3)
        self.loads = 0
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "loads", module.loads + 1))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "power"] = self.logarithm.exp()

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.logarithm = state.pop(prefix + "power").log()
        super()._load_from_state_dict(state, prefix, *args)


class Untaken(nn.Linear):
    """Shows a value that it does not take."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "shown"] = torch.ones(2)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_modules_take_their_own_state(stage: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    def run(comm: Any) -> None:
        net = nn.Sequential(Counted(5), Counted(7, 8), Counted(9), Logarithm())
        net[3].logarithm = torch.arange(3.0)
        dct.shard(net, stage, comm=comm)
        dct.save_checkpoint(net, path)
        other = dct.shard(nn.Sequential(Counted(), Counted(1), Counted(1), Logarithm()), stage, comm=comm)
        dct.load_checkpoint(other, path)
        assert [layer.seen for layer in other[:3]] == [[5], [7, 8], [9]]
        assert torch.allclose(other[3].logarithm, torch.arange(3.0)) and other[3].loads == 1
        assert bits(dct.full_state_dict(other)) == bits(dct.full_state_dict(net))

    on(2, run)
    stored = safetensors.torch.load_file(path)
    assert [stored[f"{layer}._extra_state"].tolist() for layer in range(3)] == [[5], [7, 8], [9]]


def test_a_value_that_no_module_takes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    def run(comm: Any) -> None:
        net = dct.shard(nn.Sequential(Untaken(3, 3)), 3, comm=comm)
        dct.save_checkpoint(net, path)
        torch.nn.init.zeros_(net[0].weight)
        with pytest.raises(ValueError, match="has 0.shown, which the model's state_dict.. has too, but no module"):
            dct.load_checkpoint(net, path)
        assert not dct.full_state_dict(net)["0.weight"].any()
        dct.load_checkpoint(net, path, strict=False)
        assert dct.full_state_dict(net)["0.weight"].all()

    on(2, run)


def test_modules_of_a_model_on_meta_take_their_own_state(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    def run(comm: Any) -> None:
        net = dct.shard(nn.Sequential(Counted(5), nn.BatchNorm1d(3)), 3, comm=comm)
        dct.save_checkpoint(net, path)
        with torch.device("meta"):
            other = nn.Sequential(Counted(), nn.BatchNorm1d(3))
            other[0].get_extra_state = lambda: None  # as before a first step
        dct.load_checkpoint(dct.shard(other, 3, comm=comm), path)
        assert other[0].seen == [5]
        del other[0].get_extra_state
        assert bits(dct.full_state_dict(other)) == bits(dct.full_state_dict(net))

    on(2, run)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight


@pytest.mark.parametrize("strict", [True, False])
def test_a_tied_weight_with_two_values_is_refused(strict: bool, tmp_path: Path) -> None:
    """On one rank alone the parts differ."""
    path = tmp_path / "a.safetensors"
    state = {name: value.detach().clone() for name, value in Tied().state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "alike.safetensors")
    state["two.weight"][2, 2] += 1
    safetensors.torch.save_file(state, path)

    def run(comm: Any) -> None:
        net = dct.shard(Tied(), 3, comm=comm)
        before = bits(dct.full_state_dict(net))
        with pytest.raises((ValueError, RuntimeError), match="one.weight and two.weight have different values in"):
            dct.load_checkpoint(net, path, strict=strict)
        assert bits(dct.full_state_dict(net)) == before
        dct.load_checkpoint(net, tmp_path / "alike.safetensors", strict=strict)
        assert torch.equal(dct.full_state_dict(net)["two.weight"], state["one.weight"])

    on(2, run)


class OwnLoader(nn.Linear):
    """Its load_state_dict() has other arguments than PyTorch's."""

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        raise AssertionError("load_checkpoint has what it needs without it")


def test_a_model_with_a_loader_of_other_arguments(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    plain = OwnLoader(3, 3)
    safetensors.torch.save_file(plain.state_dict(), path)

    def rank(comm: Any) -> None:
        model = dct.shard(OwnLoader(3, 3), 1, comm=comm)
        dct.load_checkpoint(model, path)
        assert torch.equal(model.weight.full_tensor(), plain.weight)

    on(1, rank)
