"""Modules around several sharded models: functions are right for all of them, or say which call is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import libdc.torch as dct
import pytest
import torch
from sharded import on
from torch import nn


def two() -> nn.ModuleDict:
    """Not sharded yet."""
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    with torch.no_grad():
        for number, param in enumerate(net.parameters()):
            param.fill_(number)
    return net


def shard_both(net: nn.ModuleDict, comm: Any, stage: int = 3) -> nn.ModuleDict:
    dct.shard(net["a"], stage, comm=comm)
    dct.shard(net["b"], 3, comm=comm)
    return net


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("inside", [False, True])
def test_each_has_its_own_weights_and_state(inside: bool, stage: int, tmp_path: Path) -> None:
    """inside: the second model became a module of the first."""
    path = tmp_path / "both.safetensors"

    def made(comm: Any) -> Any:
        net = shard_both(two(), comm, stage)
        if inside:
            net["a"].other = net["b"]
        model: Any = net["a"] if inside else net
        return model, net, torch.optim.AdamW(model.parameters(), 0.1)

    def rank(comm: Any) -> None:
        model, net, optimizer = made(comm)
        (net["a"](torch.ones(2, 4)).sum() + net["b"](torch.full((2, 4), 3.0)).sum()).backward()
        optimizer.step()
        whole, state = dct.full_state_dict(model), dct.full_optimizer_state_dict(model, optimizer)
        for name, param in model.named_parameters():
            assert torch.equal(whole[name], param.full_tensor())
        grads = {float(values["exp_avg"].flatten()[0]) for values in state["state"].values()}
        assert len(whole) == len(state["state"]) == 4 and len(grads) > 1
        dct.save_checkpoint(model, path, optimizer)
        other, _, fresh = made(comm)
        dct.load_checkpoint(other, path, fresh)
        for name, value in dct.full_state_dict(other).items():
            assert torch.equal(value, whole[name])
        again = dct.full_optimizer_state_dict(other, fresh)["state"]
        for name, values in state["state"].items():
            assert all(torch.equal(values[key], again[name][key]) for key in values)

    on(2, rank)


def test_what_an_open_block_has_written_is_there(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        net = shard_both(two(), comm)
        with dct.gathered(net):
            with torch.no_grad():
                net["a"].weight.fill_(7)
                net["b"].weight.fill_(8)
            whole = dct.full_state_dict(net)
            dct.save_checkpoint(net, tmp_path / "both.safetensors")
        assert [float(whole[f"{name}.weight"][0, 0]) for name in "ab"] == [7, 8]
        other = shard_both(two(), comm)
        dct.load_checkpoint(other, tmp_path / "both.safetensors")
        assert [float(other[name].weight.full_tensor()[0, 0]) for name in "ab"] == [7, 8]

    on(2, rank)


def test_weights_without_values_are_an_error_in_each(tmp_path: Path) -> None:
    with torch.device("meta"):
        late = nn.Linear(4, 4)
    net = nn.ModuleDict({"a": dct.shard(nn.Linear(4, 4), 3), "b": dct.shard(late, 3, device="cpu")})
    with pytest.raises(RuntimeError, match="weight has no values yet"):
        dct.full_state_dict(net)
    with pytest.raises(RuntimeError, match="weight has no values yet"):
        dct.save_checkpoint(net, tmp_path / "both.safetensors")


def test_questions_for_one_model() -> None:
    net = shard_both(two(), None)
    for question in (dct.stats, dct.trace_start, dct.trace_read, dct.prefetch, dct.unshard, dct.reshard):
        with pytest.raises(ValueError, match="ModuleDict has modules of several sharded models: name one of them"):
            question(net)
    assert dct.stats(net["b"]).registered_params == 2


def test_models_on_other_ranks_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "both.safetensors")

    def rank(comm: Any) -> None:
        net = two()
        dct.shard(net["a"], 3, comm=comm)
        dct.shard(net["b"], 3, comm=comm, mesh=(2, 1))
        optimizer = torch.optim.AdamW(net.parameters())
        for call in (lambda: dct.full_state_dict(net), lambda: dct.full_optimizer_state_dict(net, optimizer),
                     lambda: dct.save_checkpoint(net, path), lambda: dct.load_checkpoint(net, path)):
            with pytest.raises(ValueError, match="spread over other ranks than one another: call it for each of them"):
                call()
        for name in "ab":
            assert dct.full_state_dict(net[name])["bias"].shape == (4,)

    on(2, rank)
