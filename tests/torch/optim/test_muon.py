"""libdc.optim.Muon: beside torch.optim.Muon, on plain and sharded models, state and refusals. Its mathematics is
tested in tests/optim/blockwise/test_muon.c. Numbers are the points of the second-order conformance list."""

from __future__ import annotations

import copy
from typing import Any, Dict, List

import libdc
import libdc.run
import libdc.torch as dct
import pytest
import torch
from libdc import optim
from torch import nn

SHAPES = [(64, 128), (128, 64), (48, 48), (1, 40), (40, 1)]


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv1d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 5))


def muon(net: nn.Module, **options: Any) -> optim.Muon:
    """On a sharded model all parameters are flat: by name."""
    return optim.Muon([param for name, param in net.named_parameters() if name.endswith("weight")], lr=0.05, **options)


def learn(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> List[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(4, 3, 8, generator=generator), torch.randn(4, 5, generator=generator)
        net.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def twenty_steps(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype)) for shape in SHAPES]
    optimizer = kind(params, lr=0.02, **options)
    for _ in range(20):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        optimizer.step()
    return [param.detach().float() for param in params]


def in_float32(params: Any, lr: float, adjust_lr_fn: Any, nesterov: bool) -> Any:
    """torch.optim.Muon's formula without its bfloat16."""

    class Reference(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            for param in params:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 0.05)
                x = param.grad.lerp(momentum, 0.95) if nesterov else momentum
                turned = x.shape[0] > x.shape[1]
                x = (x.T if turned else x) / x.norm()
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                rows, cols = param.shape
                ratio = max(1, rows / cols) ** 0.5 if adjust_lr_fn is None else 0.2 * max(rows, cols) ** 0.5
                param.data.mul_(1 - lr * 0.1).sub_(x.T if turned else x, alpha=lr * ratio)

    return Reference(params, {})


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_beside_pytorchs(adjust: Any, nesterov: bool) -> None:
    same: Dict[str, Any] = {"adjust_lr_fn": adjust, "nesterov": nesterov}
    exact = twenty_steps(in_float32, **same)
    for got, want in zip(twenty_steps(optim.Muon, polynomial="muon", precision="float32", **same), exact):
        assert (got - want).norm() < 1e-4 * want.norm()
    theirs = twenty_steps(torch.optim.Muon, **same)  # type: ignore[attr-defined]
    for precision in ("float32", "bfloat16"):
        ours = twenty_steps(optim.Muon, polynomial="muon", precision=precision, **same)
        for got, want in zip(ours, theirs):
            assert (got - want).norm() < 2e-2 * want.norm()  # what bfloat16 gives


def test_weights_of_16_bits_have_a_float32_copy() -> None:
    for got, want in zip(twenty_steps(optim.Muon, torch.bfloat16), twenty_steps(optim.Muon)):
        assert (got - want).norm() < 2e-2 * want.norm()


def test_a_fused_parameter_is_several() -> None:
    torch.manual_seed(2)
    fused = nn.Parameter(torch.randn(12, 8))
    parts = [nn.Parameter(part.clone()) for part in fused.detach().chunk(3)]
    one, many = optim.Muon([fused], num_splits=3), optim.Muon(parts)
    for _ in range(3):
        fused.grad = torch.randn(12, 8)
        for part, grad in zip(parts, fused.grad.chunk(3)):
            part.grad = grad.contiguous()
        one.step()
        many.step()
    assert torch.equal(fused.detach(), torch.cat([part.detach() for part in parts]))
    assert {"momentum.0", "momentum.1", "momentum.2"} <= set(one.state[fused])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_47_ranks_have_the_losses_of_one(stage: int) -> None:
    alone = model()
    want = learn(alone, muon(alone), 0, 8)
    assert want[-1] != want[0]

    def rank(comm: libdc.Comm) -> List[float]:
        net = models[comm.rank]
        dct.shard(net, stage=stage, comm=comm)
        return learn(net, muon(net), 0, 8)

    for world in (1, 2, 3):
        models = [model() for _ in range(world)]
        losses = libdc.run.threads(world, rank)
        assert all(got == losses[0] for got in losses)
        if world == 3:  # the mean of three equal gradients is rounded
            assert losses[0] == pytest.approx(want, rel=1e-4)
        else:
            assert losses[0] == want


def test_48_state_dict_goes_on_bit_for_bit() -> None:
    one, two = model(), model()
    ours = muon(one)
    learn(one, ours, 0, 4)
    two.load_state_dict(one.state_dict())
    theirs = muon(two)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert learn(one, ours, 4, 8) == learn(two, theirs, 4, 8)
    assert set(ours.state[next(one.parameters())]) == {"step", "momentum.0"}


@pytest.mark.parametrize("steps", [0, 1, 5])
# second-order: 48
@pytest.mark.parametrize("to_torch", [False, True], ids=["from_torch", "to_torch"])
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "momentum": 0.8}, {"momentum": 0.0}])
def test_48_states_of_torch_and_ours_are_exchanged(options: Dict[str, Any], to_torch: bool, steps: int) -> None:
    def give(param: torch.Tensor, step: int) -> None:
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))

    pairs = [[torch.nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(i))) for i in range(2)]
             for _ in range(2)]
    kinds = [optim.Muon, torch.optim.Muon] if to_torch else [torch.optim.Muon, optim.Muon]
    own = {"polynomial": "muon", "precision": "bfloat16"}
    one, two = (kind(params, **options, lr=0.02, **(own if kind is optim.Muon else {}))
                for kind, params in zip(kinds, pairs))
    for step in range(steps):
        give(pairs[0][1], step)  # the first matrix has had no gradient
        one.step()
    with torch.no_grad():
        for p, q in zip(*pairs):
            q.copy_(p)
    two.load_state_dict(one.torch_state_dict() if to_torch else one.state_dict())
    for step in range(5, 8):
        for params, optimizer in zip(pairs, (one, two)):
            for number, param in enumerate(params):
                give(param, 10 * step + number)
            optimizer.step()
    for p, q in zip(*pairs):  # the direction is rounded to bfloat16; without its momentum a step is another
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3)


# second-order: 48
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_48_a_state_of_torch_for_16_bit_weights_is_loaded(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(dtype))
    theirs, ours = (kind([param], lr=0.02, momentum=0.75) for kind in (torch.optim.Muon, optim.Muon))
    param.grad = torch.ones_like(param)
    ours.step()  # ours has had a state of its own: nothing of it stays
    theirs.step()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    state, mean = ours.state[param], theirs.state[param]["momentum_buffer"]
    torch.testing.assert_close(state["momentum.0"].view(8, 6), 4 * mean.float(), rtol=0, atol=0)
    before = param.detach().clone()
    param.grad.zero_()
    ours.param_groups[0]["lr"] = 0.0
    ours.step()
    assert torch.equal(param.detach(), before)  # the float32 copy is of the weights as they were at the load


def test_43_44_refusals() -> None:
    net = model()
    with pytest.raises(libdc.Error, match="Muon is for matrices; give biases, gains and other vectors to AdamW"):
        optim.Muon(net.parameters())
    for name, value in {"polynomial": "newton", "precision": "float16", "adjust_lr_fn": "none of them"}.items():
        with pytest.raises(ValueError, match=f"Muon: {name} = "):
            muon(net, **{name: value})
    for name, number in {"momentum": 1.0, "eps": -1.0, "ns_steps": 65, "num_splits": -1}.items():
        with pytest.raises(ValueError, match=name[-5:]):
            muon(net, **{name: number})
    with pytest.raises(libdc.Error, match="must be a multiple of options.num_splits = 5"):
        muon(net, num_splits=5)
    optimizer = muon(net)
    learn(net, optimizer, 0, 2)
    before = [param.detach().clone() for param in net.parameters()]
    net[3].weight.grad[0, 0] = float("nan")
    with pytest.raises(libdc.Error, match=r"grads\[1\]"):
        optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(net.parameters(), before))
