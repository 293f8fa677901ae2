"""Optimizers of a sharded model load the whole state_dict() of an optimizer whose model is not sharded."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List

import libdc.torch as dct
import pytest
import torch
from libdc import optim
from sharded import on
from torch import nn

KINDS: Dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch AdamW": lambda net: torch.optim.AdamW(net.parameters(), 0.01),
    "AdamW": lambda net: optim.AdamW(net.parameters(), 0.01),
    "SGD": lambda net: optim.SGD(net.parameters(), 0.01, momentum=0.9),
    "Muon": lambda net: optim.Muon([net.inner.weight, net.outer.weight], 0.01),
    "Shampoo": lambda net: optim.Shampoo(net.parameters(), 0.01, precondition_frequency=2, max_block=3),
    "SOAP": lambda net: optim.SOAP(net.parameters(), 0.01, precondition_frequency=2, max_block=3),
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 2, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Any) -> Any:
        return self.outer(torch.tanh(self.inner(x))) * self.scale


def learn(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> List[float]:
    losses = []
    for step in range(first, last):
        x = torch.linspace(-1, step, 12, dtype=next(net.parameters()).dtype).view(3, 4)
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_from_a_whole_state(kind: str, dtype: torch.dtype) -> None:
    plain = Scaled().to(dtype)
    optimizer = KINDS[kind](plain)
    learn(plain, optimizer, 0, 3)
    state, models = copy.deepcopy(optimizer.state_dict()), [copy.deepcopy(plain) for _ in range(6)]
    expected = learn(plain, optimizer, 3, 6)

    def rank(comm: Any, stage: int) -> List[float]:
        net = models.pop()
        dct.shard(net, stage, comm=comm)
        own = KINDS[kind](net)
        own.load_state_dict(copy.deepcopy(state))  # PyTorch's counts in the step that it got
        return learn(net, own, 3, 6)

    for world, stage in ((1, 3), (2, 1), (2, 3)):
        for losses in on(world, lambda comm: rank(comm, stage)):
            assert losses == pytest.approx(expected, rel=0 if dtype == torch.float32 else 1e-2, abs=1e-6)


def test_a_whole_state_that_does_not_fit_changes_nothing() -> None:
    plain = Scaled()
    optimizer = optim.AdamW(plain.parameters(), 0.01)
    learn(plain, optimizer, 0, 1)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["exp_avg"] = torch.zeros(7)

    def rank(comm: Any) -> None:
        net = dct.shard(Scaled(), 3, comm=comm)
        own = optim.AdamW(net.parameters(), 0.5)
        learn(net, own, 0, 1)
        before = copy.deepcopy(own.state_dict())
        with pytest.raises(ValueError, match="state 'exp_avg' of parameter 1 has shape"):
            own.load_state_dict(state)
        after = own.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for number, values in before["state"].items():
            assert all(torch.equal(torch.as_tensor(after["state"][number][key]), torch.as_tensor(value))
                       for key, value in values.items())

    on(2, rank)


def test_the_numbers_of_a_state_are_its_own() -> None:
    """Those of another program need not count from 0, and a state keeps its types, not the parameters'."""
    plain, other = Scaled().bfloat16(), Scaled().bfloat16()
    one, two = (optim.AdamW(net.parameters(), 0.01) for net in (plain, other))
    learn(plain, one, 0, 2)
    state = copy.deepcopy(one.state_dict())
    state["param_groups"][0]["params"] = [number + 5 for number in state["param_groups"][0]["params"]]
    state["state"] = {number + 5: values for number, values in state["state"].items()}
    two.load_state_dict(state)
    for p, q in zip(plain.parameters(), other.parameters()):
        assert all(torch.equal(torch.as_tensor(two.state[q][key]), torch.as_tensor(value))
                   for key, value in one.state[p].items())


def test_state_from_before_shard_is_refused() -> None:
    def rank(comm: Any) -> None:
        net = Scaled()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        learn(net, optimizer, 0, 1)
        state = copy.deepcopy(optimizer.state_dict())
        dct.shard(net, 3, comm=comm)
        with pytest.raises(ValueError, match="exp_avg of .* is from before libdc.torch.shard.., and whole: make the"):
            learn(net, optimizer, 1, 2)
        again = torch.optim.AdamW(net.parameters(), 0.01)
        again.load_state_dict(state)
        learn(net, again, 1, 2)

    on(2, rank)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Shampoo"])
def test_a_bfloat16_models_state_goes_to_a_float32_model(kind: str) -> None:
    """Without the float32 copies of its weights: those that were loaded are the model's own."""
    plain, other = Scaled().bfloat16(), Scaled()
    optimizer, second = KINDS[kind](plain), KINDS[kind](other)
    learn(plain, optimizer, 0, 3)
    assert "master" in next(iter(optimizer.state.values()))
    other.load_state_dict(plain.state_dict())
    second.load_state_dict(optimizer.state_dict())
    assert learn(other, second, 3, 5) == pytest.approx(learn(plain, optimizer, 3, 5), rel=0.1)
