"""torch.amp.GradScaler with the optimizers of libdc.optim, and on sharded models with PyTorch's."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import libdc
import libdc.torch as dct
import pytest
import torch
from libdc import optim
from libdc.torch.sharding.part import plain_tensor
from sharded import on, one_thread  # noqa: F401
from torch import nn

SCALE = 1024.0


def weights(model: nn.Module) -> List[nn.Parameter]:
    return [param for name, param in model.named_parameters() if name.endswith("weight")]


KINDS: Dict[str, Callable[[nn.Module, Any], torch.optim.Optimizer]] = {
    "AdamW": lambda model, scaler: optim.AdamW(model.parameters(), lr=1e-2),
    "SGD": lambda model, scaler: optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "Muon": lambda model, scaler: optim.Muon(weights(model), lr=1e-2),
    "Shampoo": lambda model, scaler: optim.Shampoo(model.parameters(), lr=1e-2, eps_rel=1e-3),
    "SOAP": lambda model, scaler: optim.SOAP(model.parameters(), lr=1e-2),
    "KFAC": lambda model, scaler: optim.KFAC(model, lr=1e-2, damping=0.1, grad_scaler=scaler),
    "torch": lambda model, scaler: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


def net(comm: Any, stage: int) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return dct.shard(model, stage, comm=comm)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(6, 7, generator=generator), torch.randn(6, 1, generator=generator)
    return nn.functional.mse_loss(model(x), y)


def train(comm: Any, stage: int, kind: str, scaled: bool, bad: Optional[int] = None, clip: Optional[float] = None,
          steps: int = 4) -> Tuple[List[float], List[float], Any]:
    """Losses, scales and the optimizer. Step `bad` has an infinity in one rank's part of the gradients; without a
    scaler it is left out."""
    model = net(comm, stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    optimizer = KINDS[kind](model, scaler if scaled else None)
    losses, scales = [], []
    for step in range(steps):
        if step == bad and not scaled:
            continue
        loss = loss_of(model, step, comm.rank)
        scaler.scale(loss).backward()
        if step == bad and (stage == 0 or comm.rank == comm.size - 1):
            plain_tensor(weights(model)[0].grad).view(-1)[0] = math.inf  # at stage 0 every rank has the mean
        if clip is not None:
            scaler.unscale_(optimizer)
            dct.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_without_a_scale(kind: str) -> None:
    def rank(comm: Any, stage: int) -> Tuple[List[float], List[float]]:
        return train(comm, stage, kind, False)[0], train(comm, stage, kind, True)[0]

    for world in (1, 2, 3):
        for stage in range(4):
            for plain, scaled in on(world, lambda comm: rank(comm, stage)):
                assert scaled == pytest.approx(plain, rel=1e-5), (world, stage)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_an_infinity_on_one_rank_is_everybodys(kind: str, clip: Optional[float]) -> None:
    """KFAC has seen the batch, so its later losses are others."""
    def rank(comm: Any, stage: int) -> Any:
        plain = train(comm, stage, kind, False, bad=1, clip=clip)[0]
        losses, scales, optimizer = train(comm, stage, kind, True, bad=1, clip=clip)
        assert kind == "torch" or optimizer.skipped_steps == 1
        return plain, losses[:1] + losses[2:], scales

    for world in (1, 2, 3):
        for stage in range(4):
            for plain, losses, scales in on(world, lambda comm: rank(comm, stage)):
                assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2], (world, stage)
                assert losses == pytest.approx(plain, rel=1e-5) or kind == "KFAC", (world, stage)


def test_a_scaler_goes_on_with_its_state() -> None:
    def rank(comm: Any) -> None:
        found = []
        for saved in (False, True):
            model = net(comm, 3)
            optimizer = optim.AdamW(model.parameters(), lr=1e-2)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
            scales = []
            for step in range(7):
                if step == 2 and saved:
                    state, scaler = scaler.state_dict(), torch.amp.GradScaler("cpu")
                    scaler.load_state_dict(state)
                scaler.scale(loss_of(model, step, comm.rank)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
            found.append(scales)
        assert found[0] == found[1] == [8, 8, 16, 16, 16, 32, 32]

    on(2, rank)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_gradients_of_16_bits(kind: Any) -> None:
    """Which GradScaler.unscale_() refuses; a step takes them as they are."""
    generator = torch.Generator().manual_seed(3)
    start, grad = torch.randn(2, 50, generator=generator).half()
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizers = [kind([param], lr=0.1) for param in params]
    for found in (False, True):
        for param, scale in zip(params, (1, 64)):
            param.grad = grad * scale
        scaler.scale(torch.zeros(()))
        if found:
            params[1].grad[7] = math.nan
        else:
            optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
    assert torch.equal(*params) and not torch.equal(params[0].detach(), start)
    assert optimizers[1].skipped_steps == 1 and optimizers[1].state[params[1]]["step"] == 1


def test_attributes_of_the_optimizer() -> None:
    """Values that GradScaler sets can be set by hand, as PyTorch's fused optimizers take it."""
    param = nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([param], lr=1.0)
    param.grad = torch.ones(3)
    optimizer.grad_scale = torch.tensor([4.0], dtype=torch.float64)
    optimizer.step()
    assert param.tolist() == [-0.25] * 3
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert param.tolist() == [-0.25] * 3 and optimizer.skipped_steps == 1
    del optimizer.found_inf
    optimizer.grad_scale = torch.ones(2)
    with pytest.raises(ValueError, match="must have one element, not 2"):
        optimizer.step()
    assert not hasattr(optimizer, "grad_scale")  # nor does GradScaler's remain
    optimizer.step()
    assert param.tolist() == [-1.25] * 3


def test_a_disabled_scaler_and_one_of_a_plain_model() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def found_inf(scaler: Any, optimizer: torch.optim.Optimizer) -> List[float]:
    return [float(found) for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_fused_optimizers_skip_what_overflows_on_all_ranks(kind: str) -> None:
    """They compare found_inf with 1: two ranks' sum was no overflow to them. Nor was that of two models."""

    def rank(comm: Any, stage: int) -> None:
        models = [net(comm, stage) for _ in range(2)]
        params = [param for model in models for param in model.parameters()]
        optimizer = getattr(torch.optim, kind)(params, lr=0.1, fused=True)
        before = [plain_tensor(param).clone() for param in params]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for bad in (range(comm.size), [comm.size - 1]):
            for model in models:
                scaler.scale(loss_of(model, 0, comm.rank)).backward()
            if stage == 0 or comm.rank in bad:
                plain_tensor(weights(models[0])[0].grad).view(-1)[0] = math.inf
            scaler.unscale_(optimizer)
            assert found_inf(scaler, optimizer) == [1.0]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert all(torch.equal(plain_tensor(param), value) for param, value in zip(params, before))
        assert scaler.get_scale() == 2.0

    for world in (1, 2, 3):
        for stage in range(4):
            on(world, lambda comm: rank(comm, stage))


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return super().forward(x).sum() + (self.gain * factor).sum()


def test_an_infinity_in_an_ignored_parameter_is_everybodys() -> None:
    """Its gradient is not averaged, so at stage 0 too one rank alone can have it."""

    def rank(comm: Any, stage: int) -> Any:
        model = dct.shard(Scaled(), stage, comm=comm, policy={"gain": dct.Policy(ignored=True)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        before = model.weight.full_tensor()
        scaler.scale(model(torch.ones(2, 4), math.inf if comm.rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight.full_tensor(), before) and float(model.gain.detach()) == 1.0
        return scaler.get_scale()

    for stage in range(4):
        assert on(2, lambda comm: rank(comm, stage)) == [4.0, 4.0], stage


@pytest.mark.parametrize("own_update", [False, True])
def test_an_infinity_in_an_optimizer_of_ignored_parameters_alone(own_update: bool) -> None:
    """It has no parameter that names the ranks. own_update: at a time when the scaler has met no other optimizer."""
    def rank(comm: Any, stage: int) -> Any:
        model = dct.shard(Scaled(), stage, comm=comm, policy={"gain": dct.Policy(ignored=True)})
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(2, 4), math.inf if comm.rank else 1.0)).backward()
        for optimizer in [torch.optim.SGD(params, lr=0.1) for params in ([model.gain], [model.weight, model.bias])]:
            scaler.step(optimizer)
            if own_update:
                scaler.update()
        if not own_update:
            scaler.update()
        assert float(model.gain.detach()) == 1.0
        return scaler.get_scale()

    for stage in range(4):
        assert on(2, lambda comm: rank(comm, stage)) == [4.0, 4.0], stage


def test_an_infinity_in_a_plain_module_lowers_the_scale_of_all() -> None:
    """In the same step as the sharded model's, before it and after it, and in a later step without that."""
    def rank(comm: Any, stage: int) -> List[float]:
        plain, model = nn.Linear(4, 1), dct.shard(nn.Linear(4, 1), stage, comm=comm)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, model)]
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=32.0), []
        for order in ((0, 1), (1, 0), (0,), (1,)):
            x = torch.full((2, 4), math.inf if comm.rank and 0 in order else 1.0)
            scaler.scale(plain(x).sum() + model(torch.ones(2, 4)).sum()).backward()
            for number in order:
                scaler.step(optimizers[number])
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    for stage in range(4):
        assert on(2, lambda comm: rank(comm, stage)) == [[16.0, 8.0, 4.0, 4.0]] * 2, stage


def test_an_infinity_in_a_model_of_some_ranks_lowers_the_scale_of_all() -> None:
    """The first model is rank 2's and 3's alone, and the second all ranks'."""
    def rank(comm: Any) -> float:
        part = comm.split(comm.rank // 2)
        models = [net(part, 3), net(comm, 3)]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for model in models:
            scaler.scale(loss_of(model, 0, comm.rank)).backward()
        if comm.rank == 3:
            plain_tensor(weights(models[0])[0].grad).view(-1)[0] = math.inf
        for optimizer in [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]:
            scaler.step(optimizer)
        scaler.update()
        return float(scaler.get_scale())

    assert on(4, rank) == [4.0] * 4


@pytest.mark.parametrize("kind", ["AdamW", "torch"])
def test_a_nan_does_not_stay(kind: str) -> None:
    """Clipping by the norm multiplies all of a part by NaN, its padding too; and 0 / 0 is one there."""
    def rank(comm: Any, stage: int) -> List[float]:
        model, scales = net(comm, stage), []
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        optimizer = KINDS[kind](model, scaler)
        for step in range(5):
            loss = loss_of(model, step, comm.rank)
            scaler.scale(loss * math.nan if step == 1 else loss).backward()
            for param in model.parameters():
                assert step == 1 or param.grad.to_local().isfinite().all() if stage else True
                param.grad.mul_(param).div_(param)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    for stage in range(4):
        for scales in on(2, lambda comm: rank(comm, stage)):
            assert scales == [SCALE, *[SCALE / 2] * 4], stage


def test_a_step_that_raises_leaves_no_scale_behind() -> None:
    """GradScaler.step() takes `grad_scale` off an optimizer only after a step that ends well, and multiplies the next
    scale by what it finds there."""
    moved = []
    for refused in (False, True):
        param = torch.nn.Parameter(torch.ones(4, 4))
        optimizer = optim.Shampoo([param], lr=0.1, graft="sgd")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if refused:
            scaler.scale(torch.ones(()))
            param.grad = torch.full((4, 4), 1e25)  # finite, but not below 2^50
            with pytest.raises(libdc.Error, match="2\\^50"):
                scaler.step(optimizer)
            assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        param.grad = None
        scaler.scale((param * torch.linspace(-1, 1, 16).view(4, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(param.detach().clone())
    assert torch.equal(moved[0], moved[1])
