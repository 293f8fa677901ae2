"""libdc.optim.Shampoo: plain and sharded models, state, groups and refusals. Its mathematics is tested in C
(tests/optim/test_shampoo.c). Numbers are the points of the second-order conformance list."""

from __future__ import annotations

from typing import Any, Dict, List

import libdc
import libdc.run
import libdc.torch as dct
import pytest
import torch
from libdc import optim

SETTINGS: Dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "precondition_frequency": 3, "max_block": 8}


def model() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Conv1d(3, 6, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(36, 11),
                               torch.nn.Tanh(), torch.nn.Linear(11, 5))


def batch(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 8, generator=generator), torch.randn(4, 5, generator=generator)


def learn(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> List[float]:
    losses = []
    for step in range(first, last):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_49_it_learns_and_does_not_jump_at_a_refresh() -> None:
    net = model()
    optimizer = optim.Shampoo(net.parameters(), **SETTINGS)
    losses = [learn(net, optimizer, 0, 1)[0] for _ in range(60)]
    assert losses[-1] < 0.05 * losses[0]
    assert all(after < 2 * before for before, after in zip(losses, losses[1:]))


def test_48_state_dict_goes_on_bit_for_bit() -> None:
    one, two = model(), model()
    ours = optim.Shampoo(one.parameters(), momentum=0.5, **SETTINGS)
    learn(one, ours, 0, 4)
    two.load_state_dict(one.state_dict())
    theirs = optim.Shampoo(two.parameters(), momentum=0.5, **SETTINGS)
    theirs.load_state_dict(ours.state_dict())
    assert learn(one, ours, 4, 10) == learn(two, theirs, 4, 10)
    state = ours.state[next(iter(one.parameters()))]
    assert {"step", "exp_avg.0", "graft.0", "momentum.0", "factor.0.0", "root.0.0", "basis.0.0", "failures.0.0"} <= set(state)
    other = optim.Shampoo(model().parameters(), **{**SETTINGS, "max_block": 4})
    with pytest.raises(ValueError, match="state"):
        other.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_47_ranks_have_the_losses_of_one(stage: int) -> None:
    alone = model()
    want = learn(alone, optim.Shampoo(alone.parameters(), weight_decay=0.1, decay="l2", **SETTINGS), 0, 8)

    def rank(comm: libdc.Comm) -> List[float]:
        net = models[comm.rank]
        dct.shard(net, stage=stage, comm=comm)
        return learn(net, optim.Shampoo(net.parameters(), weight_decay=0.1, decay="l2", **SETTINGS), 0, 8)

    for world in (1, 2, 3):
        models = [model() for _ in range(world)]
        for got in libdc.run.threads(world, rank):
            if world == 3:  # the mean of three equal gradients is rounded
                assert got == pytest.approx(want, rel=1e-4)
            else:
                assert got == want


def test_43_groups_schedules_and_refusals() -> None:
    net = model()
    first, *rest = net.parameters()
    optimizer = optim.Shampoo([{"params": [first], "graft": "sgd", "lr": 0.0}, {"params": rest}], **SETTINGS)
    before = first.detach().clone()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(3):
        learn(net, optimizer, step, step + 1)
        schedule.step()
    assert torch.equal(first.detach(), before)
    for name, value in {"graft": "lion", "decay": "none"}.items():
        with pytest.raises(ValueError, match=f"Shampoo: {name} = "):
            optim.Shampoo(model().parameters(), **{name: value})
    for name, value in {"betas": (0.9, 1.5), "max_block": -3, "eps_rel": -1.5, "tolerated_failures": -2}.items():
        with pytest.raises(libdc.Error, match="options"):
            optim.Shampoo(model().parameters(), **{name: value})


def test_44_a_gradient_that_is_not_finite_changes_nothing() -> None:
    net = model()
    optimizer = optim.Shampoo(net.parameters(), **SETTINGS)
    learn(net, optimizer, 0, 2)
    before = [p.detach().clone() for p in net.parameters()]
    next(iter(net.parameters())).grad[0, 0, 0] = float("inf")  # type: ignore[index]
    with pytest.raises(libdc.Error, match="not finite"):
        optimizer.step()
    assert all(torch.equal(p.detach(), q) for p, q in zip(net.parameters(), before))
    learn(net, optimizer, 2, 4)
