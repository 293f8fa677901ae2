"""Whole states of the optimizers whose blocks and layers ranks own: from any number of ranks and stage to any other.
Numbers are the points of the second-order conformance list."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn.functional as F
from libdc import optim
from libdc.torch.sharding.local_shard import LocalShard
from torch import nn

KINDS: Dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Shampoo": lambda net: optim.Shampoo(net.parameters(), 0.02, precondition_frequency=3, max_block=5),
    "Muon": lambda net: optim.Muon([param for name, param in net.named_parameters() if name.endswith("weight")], 0.02),
    "SOAP": lambda net: optim.SOAP(net.parameters(), 0.02, precondition_frequency=3, max_block=5),
    "KFAC": lambda net: optim.KFAC(net, lr=0.02, damping=0.1, refresh_frequency=3),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 1))


def learn(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> List[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 1, generator=generator)
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@each_kind
def test_48_whole_states_go_to_any_number_of_ranks(kind: str) -> None:
    saved: Dict[str, Any] = {}
    models = [model() for _ in range(2)]  # one generator serves all threads

    def first(comm: libdc.Comm) -> List[float]:
        net = models[comm.rank]
        dct.shard(net, stage=3, comm=comm)
        optimizer = KINDS[kind](net)
        learn(net, optimizer, 0, 5)
        whole = dct.full_optimizer_state_dict(net, optimizer, rank0_only=True)
        assert bool(whole) == (comm.rank == 0)
        weights = dct.full_state_dict(net)
        if comm.rank == 0:
            saved.update(state=whole, weights=weights)
        return learn(net, optimizer, 5, 10)

    def second(comm: libdc.Comm, stage: int) -> List[float]:
        net = models[comm.rank]
        dct.shard(net, stage=stage, comm=comm)
        dct.load_full_state_dict(net, saved["weights"])
        optimizer = KINDS[kind](net)
        dct.load_full_optimizer_state_dict(net, optimizer, saved["state"])
        again = dct.full_optimizer_state_dict(net, optimizer)["state"]
        assert {name: set(values) for name, values in again.items()} == {
            name: set(values) for name, values in saved["state"]["state"].items()}
        for name, values in again.items():
            assert all(torch.equal(value, saved["state"]["state"][name][key]) for key, value in values.items())
        return learn(net, optimizer, 5, 10)

    expected = libdc.run.threads(2, first, timeout=60)[0]
    for world, stage in ((1, 0), (1, 3), (2, 1), (2, 3), (2, 0)):
        models = [model() for _ in range(world)]
        for losses in libdc.run.threads(world, second, stage, timeout=60):
            assert losses == expected


@each_kind
def test_48_a_state_that_lacks_something_is_refused(kind: str) -> None:
    net = model()
    optimizer = KINDS[kind](net)
    learn(net, optimizer, 0, 3)
    state = optimizer.state_dict()
    piece = next(name for name in state["state"][0] if optimizer.is_owned(name))  # type: ignore[attr-defined]
    del state["state"][0][piece]
    with pytest.raises(ValueError, match=f"{kind}: the state of parameter 0 lacks '{piece}'"):
        KINDS[kind](model()).load_state_dict(state)


@pytest.mark.parametrize("kind, piece", [("Shampoo", "root.0.0"), ("SOAP", "vectors.0.0")])
def test_48_what_a_state_says_nothing_of_begins_anew(kind: str, piece: str) -> None:
    net, other = model(), model()
    first, second = KINDS[kind](net), KINDS[kind](other)
    learn(net, first, 0, 3)
    learn(other, second, 0, 3)
    state = first.state_dict()
    del state["state"][0]
    second.load_state_dict(state)
    weight = next(iter(other.parameters()))
    assert weight not in second.state
    native: Any = second
    assert torch.equal(torch.from_dlpack(native._native.state(0, piece)), torch.eye(5))
    learn(other, second, 3, 5)
    assert int(second.state[weight]["step"]) == 2


@each_kind
def test_a_state_of_more_parameters_is_refused(kind: str, tmp_path: Path) -> None:
    net = dct.shard(model(), 3)
    params = [net[0].weight, net[2].weight]
    make: Callable[[Any], Any] = {"KFAC": lambda given: optim.KFAC(net, given)}.get(kind, getattr(optim, kind))
    optimizer = make(params)
    learn(net, optimizer, 0, 2)
    dct.save_checkpoint(net, tmp_path / "whole.safetensors", optimizer)
    with pytest.raises(ValueError, match="a parameter group has other parameters than the saved one"):
        dct.load_checkpoint(net, tmp_path / "whole.safetensors", make(params[:1]))


def test_a_state_of_more_groups_is_refused() -> None:
    net = dct.shard(model(), 3)
    groups = [{"params": [param]} for param in net.parameters()]
    state = dct.full_optimizer_state_dict(net, optim.AdamW(groups))
    with pytest.raises(ValueError, match="the optimizer has 1 parameter group, the saved one 5"):
        dct.load_full_optimizer_state_dict(net, optim.AdamW(groups[0]["params"]), state)


class Counting(torch.optim.Optimizer):
    """Of a user's own, with a state of one number for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            count = self.state[param].setdefault("count", torch.zeros(1)).add_(1)
            param.sub_(param.grad, alpha=0.1 / float(count))


def test_a_state_of_one_number_is_no_part_on_any_rank() -> None:
    """Where the last rank has one element of a parameter, and others more."""
    models = [nn.Linear(6, 10) for _ in range(4)]

    def rank(comm: Any) -> List[List[int]]:
        net = dct.shard(models[comm.rank], 1, comm=comm)
        optimizer = Counting(net.parameters())
        net(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        assert not any(isinstance(value, LocalShard) for state in optimizer.state_dict()["state"].values()
                       for value in state.values())
        whole = dct.full_optimizer_state_dict(net, optimizer)["state"]
        return [list(state["count"].shape) for state in whole.values()]

    assert libdc.run.threads(4, rank, timeout=60) == [[[1], [1]]] * 4
