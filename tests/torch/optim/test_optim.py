"""libdc.optim's AdamW and SGD: equal to torch.optim's within rounding, the same bits however a model is cut, and all
that torch.optim.Optimizer promises. Numbers are the points of the second-order conformance list."""

from __future__ import annotations

import copy
import io
from typing import Any, Dict, List, Tuple

import libdc
import libdc.run
import libdc.torch as dct
import pytest
import torch
from libdc import optim
from models import bits, data, make, trainable

PAIRS: List[Tuple[Any, Any, Dict[str, Any]]] = [
    (optim.AdamW, torch.optim.AdamW, {}),
    (optim.AdamW, torch.optim.AdamW, {"lr": 3e-3, "betas": (0.5, 0.99), "eps": 1e-4, "weight_decay": 0.2}),
    (optim.AdamW, torch.optim.AdamW, {"amsgrad": True}),
    (optim.AdamW, torch.optim.AdamW, {"maximize": True, "weight_decay": 0.0}),
    (optim.AdamW, torch.optim.AdamW, {"betas": (0.0, 0.9)}),
    (optim.SGD, torch.optim.SGD, {"lr": 1e-2}),
    (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
]  # fmt: skip
SHAPES = [(33, 17), (1,), (), (0, 3), (5, 4, 3), (1000,)]


def parameters(dtype: torch.dtype = torch.float32) -> List[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give(params: List[torch.nn.Parameter], step: int, skip: int = -1) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if i == skip else grad


def close(ours: Any, theirs: Any, tolerance: float = 2e-6) -> None:
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ours, theirs, options", PAIRS)
def test_43_as_torch_within_rounding(ours: Any, theirs: Any, options: Dict[str, Any]) -> None:
    a, b = parameters(), parameters()
    one, two = ours(a, **options), theirs(b, **options)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 50) for o in (one, two)]
    for step in range(50):
        for params, optimizer, schedule in ((a, one, schedules[0]), (b, two, schedules[1])):
            give(params, step, skip=0 if step in (0, 7) else -1)
            optimizer.step()
            schedule.step()
    close(a, b)
    for p, q in zip(a, b):
        for name, value in two.state[q].items():
            if isinstance(value, torch.Tensor) and name != "step":
                close([one.state[p][name]], [value])
    assert int(one.state[a[0]]["step"]) == 48 and int(one.state[a[1]]["step"]) == 50


def test_schedulers_give_a_momentum_before_the_first_step() -> None:
    a, b = parameters(), parameters()
    optimizers = optim.SGD(a, lr=0.01), torch.optim.SGD(b, lr=0.01)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20) for o in optimizers]
    for step in range(20):
        if step == 10:  # goes on in other objects
            saved = [(o.state_dict(), s.state_dict()) for o, s in zip(optimizers, schedules)]
            optimizers = optim.SGD(a, lr=0.01), torch.optim.SGD(b, lr=0.01)
            schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20) for o in optimizers]
            for optimizer, schedule, (state, scheduled) in zip(optimizers, schedules, saved):
                optimizer.load_state_dict(state)
                schedule.load_state_dict(scheduled)
        for params, optimizer, schedule in zip((a, b), optimizers, schedules):
            give(params, step)
            optimizer.step()
            schedule.step()
    close(a, b)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}, {"momentum": 0.5, "nesterov": True}])
def test_an_infinite_weight_stays_infinite(options: Dict[str, Any]) -> None:
    """Without weight decay it has no part in the direction, which would be 0 times infinity."""
    values = [float("-inf"), float("inf"), 1.0] * 30
    moved = []
    for library in (torch.optim, optim):
        param = torch.nn.Parameter(torch.tensor(values))
        optimizer = library.SGD([param], lr=0.25, **options)
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved.append(param.detach())
    assert torch.equal(moved[0], moved[1]) and moved[1].isinf().sum() == 60


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_take_the_float32_way(dtype: torch.dtype) -> None:
    a = parameters(dtype)
    b = [torch.nn.Parameter(p.detach().float()) for p in a]
    one, two = optim.AdamW(a, lr=1e-3), torch.optim.AdamW(b, lr=1e-3)
    for step in range(30):
        give(a, step)
        for p, q in zip(a, b):
            q.grad = p.grad.float()
        one.step()
        two.step()
    close([one.state[p]["master"] for p in a], b)
    assert all(torch.equal(p.detach(), one.state[p]["master"].to(dtype)) for p in a)


def test_closures_versions_and_autograd() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = optim.SGD([p], lr=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 5 and p.tolist() == [0, 0]
    version = p._version
    kept = (p * p).sum()
    p.grad = torch.ones(2)
    optimizer.step()
    assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    optimizer.zero_grad()
    assert p.grad is None


def test_zero_learning_rate_changes_no_weight() -> None:
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = optim.AdamW(params, lr=0.0)
    give(params, 0)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before))
    assert optimizer.state[params[0]]["exp_avg"].abs().sum() > 0


def test_groups_change_between_steps_and_grow() -> None:
    a, b = parameters(), parameters()
    one, two = (kind([{"params": p[:2]}, {"params": p[2:5], "lr": 0.1, "weight_decay": 0.5}])
                for kind, p in ((optim.AdamW, a), (torch.optim.AdamW, b)))
    for step in range(12):
        for params, optimizer in ((a, one), (b, two)):
            if step == 4:
                optimizer.param_groups[0].update(lr=0.05, betas=(0.8, 0.9), weight_decay=0.0)
                optimizer.param_groups[1]["lr"] = torch.tensor(0.02)
            if step == 8:
                optimizer.add_param_group({"params": params[5], "eps": 1e-3})
            give(params, step)
            optimizer.step()
    close(a, b, 5e-6)


def test_layouts_other_than_rows() -> None:
    w = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    a, b = torch.nn.Parameter(w.clone()), torch.nn.Parameter(w.clone())
    one, two = optim.AdamW([a]), torch.optim.AdamW([b])
    for _ in range(3):
        a.grad = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        b.grad = a.grad.contiguous()
        one.step()
        two.step()
    assert not a.is_contiguous()
    close([a], [b])


def test_48_state_dict_through_a_file() -> None:
    a, b = parameters(), parameters()
    one = optim.AdamW(a, amsgrad=True)
    for step in range(3):
        give(a, step)
        one.step()
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p, q in zip(a, b):
            q.copy_(p)
    two = optim.AdamW(b, lr=1)  # all options are those of the state, as with torch.optim
    with pytest.raises(ValueError, match="the state of parameter 0 lacks 'max_exp_avg_sq'"):
        two.load_state_dict({**one.state_dict(), "state": {0: {"step": 1, "exp_avg": a[0], "exp_avg_sq": a[0]}}})
    assert not two.param_groups[0]["amsgrad"] and not two.state
    two.load_state_dict(torch.load(file))
    third = copy.deepcopy(two)  # of the optimizer, with its parameters
    for optimizer in (one, two, third):
        params = optimizer.param_groups[0]["params"]
        for step in range(3, 6):
            give(params, step)
            optimizer.step()
    close(b, a, 0)
    close(third.param_groups[0]["params"], a, 0)
    assert two.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.Muon, optim.Shampoo, optim.SOAP])
def test_an_optimizer_takes_its_own_state(kind: Any) -> None:
    """Its tensors are the library's memory, which is cleared before a state is loaded."""
    param = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = kind([param], lr=1e-2)
    param.grad = torch.arange(16.0).view(4, 4)
    optimizer.step()
    before = {name: piece.clone() for name, piece in optimizer.state[param].items()}
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(piece, before[name]) for name, piece in optimizer.state[param].items())


@pytest.mark.parametrize("steps", [0, 1, 5])
# second-order: 48
@pytest.mark.parametrize("to_torch", [False, True], ids=["from_torch", "to_torch"])
@pytest.mark.parametrize("ours, theirs, options", PAIRS)
def test_48_states_of_torch_and_ours_are_exchanged(ours: Any, theirs: Any, options: Dict[str, Any], to_torch: bool,
                                                   steps: int) -> None:
    """An optimizer that takes the other's state goes on as the other does. Parameter 0 has had no gradient by then."""
    a, b = parameters(), parameters()
    source, target = (ours, theirs) if to_torch else (theirs, ours)
    one, two = source(a, **options), target(b, **{**options, "lr": 7.0})
    for step in range(steps):
        give(a, step, skip=0)
        one.step()
    with torch.no_grad():
        for p, q in zip(a, b):
            q.copy_(p)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for step in range(5, 9):
        for params, optimizer in ((a, one), (b, two)):
            give(params, step)
            optimizer.step()
    close(b, a)


def test_48_a_missing_piece_of_state_is_refused() -> None:
    a = parameters()
    one = optim.AdamW(a)
    give(a, 0)
    one.step()
    state = copy.deepcopy(one.state_dict())
    del state["state"][2]["exp_avg_sq"]
    with pytest.raises(ValueError, match="the state of parameter 2 lacks 'exp_avg_sq'"):
        one.load_state_dict(state)


def test_48_a_group_that_does_not_fit_is_refused_with_the_state() -> None:
    a, b = parameters(), parameters()
    one, two = optim.SGD(a, lr=1e-2), optim.SGD(b, lr=1e-2, momentum=0.9)
    for params, optimizer in ((a, one), (b, two)):
        give(params, 0)
        optimizer.step()
    with pytest.raises(ValueError, match="whether there is momentum must stay as it is"):
        two.load_state_dict(one.state_dict())
    assert two.param_groups[0]["momentum"] == 0.9 and len(two.state[b[0]]) == 2


def test_48_16_bit_state_keeps_its_precision() -> None:
    a, b = parameters(torch.bfloat16), parameters(torch.bfloat16)
    one, two = optim.AdamW(a), optim.AdamW(b)
    give(a, 0)
    one.step()
    two.load_state_dict(one.state_dict())
    for p, q in zip(a, b):
        for name, value in one.state[p].items():
            assert torch.equal(two.state[q][name], value) and two.state[q][name].dtype == value.dtype


def test_48_a_state_that_does_not_fit_is_refused() -> None:
    a = parameters()
    one = optim.AdamW(a)
    give(a, 0)
    one.step()
    state = one.state_dict()
    state["state"][0] = {**state["state"][0], "exp_avg": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=r"state 'exp_avg' of parameter 0 has shape \(3, 3\), must be \(33, 17\)"):
        optim.AdamW(parameters()).load_state_dict(state)
    with pytest.raises(ValueError, match="parameter 0 has no state 'exp_avg'"):
        optim.SGD(parameters(), momentum=0.9).load_state_dict(one.state_dict())


def test_44_a_gradient_that_is_not_finite_changes_nothing() -> None:
    params = parameters()
    optimizer = optim.AdamW(params, check_finite=True)
    give(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    moment = optimizer.state[params[0]]["exp_avg"].clone()
    give(params, 1)
    params[4].grad[2, 1, 1] = float("nan")
    with pytest.raises(libdc.Error, match=r"grads\[4\]") as caught:
        optimizer.step()
    assert caught.value.status == libdc.Status.E_NOT_FINITE
    assert all(torch.equal(p, q) for p, q in zip(params, before))
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], moment)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Shampoo, optim.SOAP])
def test_betas_are_two_numbers(kind: Any) -> None:
    for betas in (0.9, (0.9,), (0.9, 0.99, 0.999), ("a", "b"), None):
        with pytest.raises(ValueError, match="betas = .*, must be two numbers"):
            kind(parameters(), betas=betas)


def test_what_libdc_cannot_update_is_refused_by_number() -> None:
    with pytest.raises(ValueError, match="parameter 1 is torch.float64"):
        optim.AdamW([torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))])
    with pytest.raises(ValueError, match="parameter 0 is torch.complex64"):
        optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))])
    fine, other = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = optim.SGD([fine], lr=1.0)
    with pytest.raises(ValueError, match="parameter 2 is torch.float64"):  # and nothing of the group is added
        optimizer.add_param_group({"params": [other, torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))]})
    fine.grad, other.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert (fine.item(), other.item(), len(optimizer.param_groups)) == (-1, 0, 1)
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = optim.SGD(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="gradient of parameter 0 is torch.sparse_coo.*no sparse updates"):
        optimizer.step()


# ---- sharded models ----


def train(comm: Any, stage: int, kind: str = "AdamW", steps: int = 6) -> Tuple[List[float], str, Any]:
    net = make()
    dct.shard(net, stage, comm=comm)
    options: Dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(optim, kind)(trainable(net), lr=1e-2, **options)
    losses = []
    for step in range(steps):
        loss = net(*data(step, comm.rank))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:  # states that any number of ranks can read
            whole = dct.full_optimizer_state_dict(net, optimizer)
            optimizer = getattr(optim, kind)(trainable(net), lr=1e-2, **options)
            dct.load_full_optimizer_state_dict(net, optimizer, whole)
        if step == 3:  # the parts as they are
            state = optimizer.state_dict()
            optimizer.load_state_dict(copy.deepcopy(state))
    return losses, bits(dct.full_state_dict(net)), dct.full_optimizer_state_dict(net, optimizer)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_same_bits_at_every_stage(kind: str, world: int) -> None:
    expected = libdc.run.threads(world, lambda comm: train(comm, 0, kind), timeout=60)
    for stage in (1, 2, 3):
        got = libdc.run.threads(world, lambda comm: train(comm, stage, kind), timeout=60)
        for (losses, weights, state), (losses0, weights0, state0) in zip(got, expected):
            assert losses == losses0 and weights == weights0
            for name, values in state["state"].items():
                for key, value in values.items():
                    assert torch.equal(value, state0["state"][name][key]), (name, key)


def test_sharded_as_plain() -> None:
    net = make()
    optimizer = torch.optim.AdamW(trainable(net), lr=1e-2)
    for step in range(6):
        (sum(net(*data(step, rank)) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    def rank(comm: Any) -> Any:
        model = make()
        dct.shard(model, 3, comm=comm)
        ours = optim.AdamW(trainable(model), lr=1e-2)
        for step in range(6):
            model(*data(step, comm.rank)).backward()
            ours.step()
            ours.zero_grad()
        return dct.full_state_dict(model)

    state = libdc.run.threads(2, rank, timeout=60)[0]
    for name, value in net.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=2e-4, atol=2e-4)


def test_a_lazy_negative_gradient() -> None:
    """Its memory has the other sign."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.tensor([2j]).conj().imag
    assert param.grad.is_neg() and param.grad.item() == -2
    optim.SGD([param], lr=1.0).step()
    assert param.item() == 2
