"""Parameters of one element beside a loss, outside of the model's forward: a scale, a weight of a task's loss."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Callable, Dict

import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from libdc.torch.sharding.local_shard import LocalShard
from sharded import on, one_thread  # noqa: F401


class Weighted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.log_var = nn.Parameter(torch.tensor(0.3))
        self.frozen = nn.Parameter(torch.tensor([[0.7]]), requires_grad=False)


def added(loss: torch.Tensor, model: Any) -> torch.Tensor:
    loss += model.log_var
    return loss


LOSSES: Dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "a sum": lambda loss, model: loss + model.scale,
    "a product": lambda loss, model: model.scale * loss,
    "uncertainty": lambda loss, model: torch.exp(-model.log_var) * loss + model.log_var,
    "a frozen one": lambda loss, model: loss * model.frozen,
    "two": lambda loss, model: torch.addcmul(loss, model.scale, model.log_var),
    "in place": added,
    "an element of more": lambda loss, model: loss * model.weight[2, 1] + model.bias[0],
    "a penalty": lambda loss, model: loss + 2 * model.scale * model.weight.square().sum(),
    "a constant loss": lambda loss, model: loss.detach() * model.log_var.exp() + model(torch.ones(4)).sum(),
    "lists": lambda loss, model: torch._foreach_mul([loss], [model.log_var])[0],
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_each_ranks_own(name: str) -> None:
    """All ranks had rank 0's loss, and the gradient was the sum of the ranks', not their mean."""
    made, function = Weighted(), LOSSES[name]
    inputs = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        return function(model(x).square().mean(), model)

    plain = copy.deepcopy(made)
    expected = [loss_of(plain, x) for x in inputs]
    (sum(expected) / 2).backward()  # type: ignore[union-attr]

    def rank(comm: Any, stage: int) -> None:
        model = dct.shard(copy.deepcopy(made), stage, comm=comm)
        for i in (0, 2):
            with dct.no_sync(model) if i == 0 else contextlib.nullcontext():
                loss = loss_of(model, inputs[i + comm.rank])
                assert type(loss) is torch.Tensor and loss.shape == expected[i].shape
                assert loss.item() == pytest.approx(expected[i + comm.rank].item())
                with torch.no_grad():
                    assert loss_of(model, inputs[i + comm.rank]).item() == pytest.approx(loss.item())
                loss.backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            if q.grad is None:
                assert p.grad is None
                continue
            torch.testing.assert_close(p.grad.full_tensor() if stage else p.grad, q.grad)

    for stage in (0, 1, 3):
        on(2, lambda comm: rank(comm, stage))


def test_replicas() -> None:
    def rank(comm: Any) -> None:
        model = dct.shard(Weighted(), 3, comm=comm, mesh=(2, 2))
        (comm.rank * model(torch.zeros(4)).sum() * 0 + comm.rank * torch.ones(()) * model.scale).backward()
        assert model.scale.grad.full_tensor().item() == 1.5

    on(4, rank)


def test_an_optimizer_of_the_users_own() -> None:
    """Parts stay parts where they are written, and beside numbers and other parts."""

    def step(model: nn.Module, states: Any) -> None:
        rate = torch.tensor(0.1)
        for p, state in zip(model.parameters(), states):
            if p.grad is not None:
                state.mul_(rate).add_(p.grad).mul_(torch.ones(p.shape))
                p.data -= state * rate + 0.5 * state
                p.grad *= rate

    made = Weighted()

    def rank(comm: Any, stage: int) -> None:
        plain = copy.deepcopy(made)
        model = dct.shard(copy.deepcopy(made), stage, comm=comm)
        for each in (plain, model):
            states = [torch.zeros_like(p) for p in each.parameters()]
            for _ in range(2):
                torch.exp(each(torch.ones(2, 4)).mean() * each.scale + each.log_var).backward()
                with torch.no_grad():
                    step(each, states)
        for p, q in zip(model.parameters(), plain.parameters()):
            assert stage == 0 or p.grad is None or type(p.grad) is LocalShard
            for a, b in ((p, q), (p.grad, q.grad)):
                torch.testing.assert_close(a.full_tensor() if stage and a is not None else a, b)

    for stage in (0, 1, 3):
        on(2, lambda comm: rank(comm, stage))
