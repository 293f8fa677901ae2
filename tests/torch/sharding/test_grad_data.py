"""`p.grad.data`, and the data of other parts."""

from __future__ import annotations

import copy
from typing import Any

import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from libdc.torch.sharding.local_shard import LocalShard
from sharded import on, one_thread  # noqa: F401

STAGES = 0, 1, 3


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, LocalShard) else tensor


@pytest.mark.parametrize("stage", STAGES)
def test_replaced_memory_of_gradients_is_added_to(stage: int) -> None:
    """Backwards went on in the memory that was there before, which no `.grad` showed any more."""

    def steps(model: nn.Module) -> Any:
        seen = []
        for factor in (0.5, 2.0):
            (3 * model(torch.arange(10.0).view(2, 5)).square().mean()).backward()
            for p in model.parameters():
                p.grad.data = p.grad.data * factor
            model(torch.ones(2, 5)).square().mean().backward()
            seen += [full(p.grad).clone() for p in model.parameters()]
            for p in model.parameters():
                p.grad.data = torch.ones(p.shape)
            model.zero_grad()  # what is in no `.grad` goes
            model(torch.ones(2, 5)).square().mean().backward()
            seen += [full(p.grad).clone() for p in model.parameters()]
        return seen

    made = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3, bias=False))
    expected = steps(copy.deepcopy(made))

    def rank(comm: Any) -> None:
        model = dct.shard(copy.deepcopy(made), stage, comm=comm)
        model(torch.ones(1, 5)).sum().backward()
        first = [p.grad for p in model.parameters()]
        model.zero_grad()
        for got, wanted in zip(steps(model), expected):
            torch.testing.assert_close(got, wanted)
        assert all(p.grad is grad for p, grad in zip(model.parameters(), first))

    on(2, rank)


def test_gradients_of_another_shape_are_refused() -> None:
    def rank(comm: Any, stage: int) -> None:
        model = dct.shard(nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)), stage, comm=comm)
        model(torch.ones(1, 4)).sum().backward()
        p, q = model.parameters()
        if stage == 0:
            p.grad.data = torch.ones(4)
            with pytest.raises(RuntimeError, match=r"0.weight: .grad.data has the shape \(4,\), must have \(6, 4\)"):
                model(torch.ones(1, 4)).sum().backward()
            return
        for values in (q.grad, torch.ones(4), torch.ones(()), p.grad[1:3]):
            with pytest.raises(RuntimeError, match="grad: a .* cannot be that of part . of 2 of 0.weight"):
                p.grad = values
            with pytest.raises(RuntimeError, match=r"data: a .* or this rank's elements, of shape \(12,\)"):
                p.grad.data = values
        for values in (torch.full((6, 4), 2.0), torch.full((12,), 2.0), p.grad * 0 + 2):
            p.grad.zero_()
            p.grad = values
            assert torch.equal(p.grad.full_tensor(), torch.full((6, 4), 2.0))

    for stage in STAGES:
        on(2, lambda comm: rank(comm, stage))


def test_data_of_parts_are_parts() -> None:
    """They were plain tensors with this rank's elements, and so were their norms."""

    def rank(comm: Any, stage: int) -> None:
        model = dct.shard(nn.Linear(5, 3, bias=False), stage, comm=comm)
        model(torch.arange(5.0)).sum().backward()
        p = model.weight
        grad = torch.arange(5.0).expand(3, 5)
        torch.testing.assert_close(p.grad.data.norm(), grad.norm())
        p.grad.data.mul_(2)
        torch.testing.assert_close(full(p.grad), 2 * grad)
        for value in (p.data, p.grad.data, p.detach().data, model.state_dict()["weight"].data, p.grad.clone().data):
            assert value.shape == (3, 5) and not value.requires_grad
            assert stage == 0 or type(value) is LocalShard
            torch.testing.assert_close(value.norm(), full(value).norm())
        before, copied = full(p.detach()).clone(), p.detach()
        copied.data = torch.zeros(3, 5)
        assert torch.equal(full(p.detach()), before) and not full(copied).any()

    for stage in STAGES:
        on(2, lambda comm: rank(comm, stage))
