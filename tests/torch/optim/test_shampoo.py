"""libdc.optim.Shampoo and SOAP: plain and sharded models, state, groups and refusals. Their mathematics is tested in
tests/optim/blockwise/test_shampoo.c and tests/python/test_soap.py. Numbers are the points of the second-order
conformance list."""

from __future__ import annotations

import copy
from typing import Any, Dict, List

import libdc
import libdc.run
import libdc.torch as dct
import pytest
import torch
from libdc import optim

SETTINGS: Dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "precondition_frequency": 3, "max_block": 8}
KINDS = [(optim.Shampoo, {"weight_decay": 0.1, "decay": "l2", "momentum": 0.5, "tolerance": 1e-2},
          {"graft.0", "momentum.0", "root.0.0", "basis.0.0"}),
         (optim.SOAP, {"weight_decay": 0.1}, {"exp_avg_sq.0", "vectors.0.0"})]  # fmt: skip
each_kind = pytest.mark.parametrize("kind, options, pieces", KINDS)


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


@each_kind
def test_49_it_learns_and_does_not_jump_at_a_refresh(kind: Any, options: Any, pieces: Any) -> None:
    net = model()
    optimizer = kind(net.parameters(), **SETTINGS)
    losses = [learn(net, optimizer, 0, 1)[0] for _ in range(60)]
    assert losses[-1] < 0.05 * losses[0]
    assert all(after < 2 * before for before, after in zip(losses, losses[1:]))


@each_kind
def test_48_state_dict_goes_on_bit_for_bit(kind: Any, options: Any, pieces: Any) -> None:
    one, two = model(), model()
    ours = kind(one.parameters(), **options, **SETTINGS)
    learn(one, ours, 0, 4)
    two.load_state_dict(one.state_dict())
    theirs = kind(two.parameters(), **options, **SETTINGS)
    theirs.load_state_dict(ours.state_dict())
    assert learn(one, ours, 4, 10) == learn(two, theirs, 4, 10)
    state = ours.state[next(iter(one.parameters()))]
    assert {"step", "exp_avg.0", "factor.0.0", "failures.0.0", *pieces} <= set(state)
    other = kind(model().parameters(), **{**SETTINGS, "max_block": 4})
    with pytest.raises(ValueError, match="state"):
        other.load_state_dict(ours.state_dict())


@each_kind
def test_48_a_state_that_does_not_fit_changes_nothing(kind: Any, options: Any, pieces: Any) -> None:
    """Of the last matrix, when the first parameters' state would be in place already."""
    one, two = model(), model()
    ours, same = (kind(net.parameters(), **options, **SETTINGS) for net in (one, two))
    learn(one, ours, 0, 4)
    learn(two, same, 0, 4)
    last = len(list(one.parameters())) - 2

    def lacks(state: Any) -> None:
        del state["factor.0.0"]

    def has_more(state: Any) -> None:
        state["factor.9.9"] = torch.zeros(1)

    def has_another_shape(state: Any) -> None:
        state["exp_avg.0"] = torch.zeros(3, 3, 3)

    for spoil, text in ((lacks, "lacks 'factor.0.0'"), (has_more, "no state 'factor.9.9'"),
                        (has_another_shape, "shape")):
        state = copy.deepcopy(ours.state_dict())
        state["param_groups"][0]["lr"] = 7.0
        state["state"][0]["step"].fill_(77)
        spoil(state["state"][last])
        with pytest.raises(ValueError, match=f"parameter {last}.*{text}|{text}.*parameter {last}"):
            ours.load_state_dict(state)
        assert ours.param_groups[0]["lr"] == SETTINGS["lr"] and len(ours.state) == last + 2
        assert ours.state[next(one.parameters())]["step"] == 4
    assert learn(one, ours, 4, 10) == learn(two, same, 4, 10)


@each_kind
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_47_ranks_have_the_losses_of_one(kind: Any, options: Any, pieces: Any, stage: int) -> None:
    alone = model()
    want = learn(alone, kind(alone.parameters(), **options, **SETTINGS), 0, 8)

    def rank(comm: libdc.Comm) -> List[float]:
        net = models[comm.rank]
        dct.shard(net, stage=stage, comm=comm)
        return learn(net, kind(net.parameters(), **options, **SETTINGS), 0, 8)

    for world in (1, 2) if kind is optim.SOAP else (1, 2, 3):  # SOAP's bases are any where a factor has no rank yet
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
        with pytest.raises(ValueError, match=name[:4]):
            optim.Shampoo(model().parameters(), **{name: value})
    for name, value in {"betas": (0.9, 1.5), "max_block": -3, "shampoo_beta": 1.0, "max_precond_dim": -2}.items():
        with pytest.raises(ValueError, match=name[:4]):
            optim.SOAP(model().parameters(), **{name: value})


@each_kind
def test_44_a_gradient_that_is_not_finite_changes_nothing(kind: Any, options: Any, pieces: Any) -> None:
    net = model()
    optimizer = kind(net.parameters(), **options, **SETTINGS)
    learn(net, optimizer, 0, 2)
    before = [p.detach().clone() for p in net.parameters()]
    next(iter(net.parameters())).grad[0, 0, 0] = float("inf")  # type: ignore[index]
    with pytest.raises(libdc.Error, match="not finite"):
        optimizer.step()
    assert all(torch.equal(p.detach(), q) for p, q in zip(net.parameters(), before))
    learn(net, optimizer, 2, 4)


@pytest.mark.parametrize("kind", [optim.Muon, optim.Shampoo, optim.SOAP])
@pytest.mark.parametrize("world", [1, 2])
def test_any_group_may_be_of_a_sharded_model(kind: Any, world: int) -> None:
    def rank(comm: libdc.Comm) -> List[float]:
        net, other = (dct.shard(torch.nn.Linear(6, 6, bias=False), 3, comm=ranks) for ranks in (comm, comm.dup()))
        own = torch.nn.Parameter(torch.ones(6, 6))

        def moved(groups: Any, *added: Any) -> float:
            with torch.no_grad():
                own.fill_(1)
            optimizer = kind([{"params": group} for group in groups], lr=0.5)
            for params in added:
                optimizer.add_param_group({"params": params})
            for _ in range(2):
                net(torch.ones(3, 6)).square().sum().backward()
                own.grad = torch.eye(6)
                optimizer.step()
            assert next(net.parameters()) in optimizer.state
            return own[0, 0].item()

        params = list(net.parameters())
        results = [moved([params, [own]]), moved([[own], params]), moved([[], params, [own]]),
                   moved([[], params], [own])]
        with pytest.raises(ValueError, match=f"{kind.__name__}: the parameters belong to models that were sharded"):
            moved([[own], params, list(other.parameters())])
        with pytest.raises(ValueError, match="parameter 1 is of a sharded model that the optimizer was not made for"):
            moved([params], list(other.parameters()))
        with pytest.raises(ValueError, match="parameter 1 is of a sharded model that the optimizer was not made for"):
            moved([[own]], params)
        return results

    for results in libdc.run.threads(world, rank):
        assert len(set(results)) == 1 and results[0] != 1
