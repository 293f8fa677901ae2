"""Hooks of parameters and of modules, and forwards that write into weights."""

from __future__ import annotations

import contextlib
import copy
import time
from typing import Any, Callable, Dict, List

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from models import Plain, bits, data, make, trainable
from sharded import on, one_thread  # noqa: F401


def test_hooks_of_gradients() -> None:
    """Those that autograd could only call with nothing are refused; the others come when the gradient is complete."""

    def rank(comm: Any, stage: int) -> None:
        model, other = make(), make()
        seen: Dict[str, Any] = {}
        early = model.norm.weight.register_post_accumulate_grad_hook(
            lambda p: seen.update(early=p.grad.clone()))
        dct.shard(model, stage, comm=comm)
        model.norm.bias.register_post_accumulate_grad_hook(lambda p: seen.update(late=p.grad.clone()))
        with pytest.raises(RuntimeError, match="register_hook: norm.weight belongs to a sharded model"):
            model.norm.weight.register_hook(lambda grad: grad)
        for step in range(2):
            seen.clear()
            model(*data(step, comm.rank)).backward()
            assert torch.equal(seen["early"], model.norm.weight.grad)
            assert torch.equal(seen["late"], model.norm.bias.grad)
            model.zero_grad()
        early.remove()
        seen.clear()
        with dct.no_sync(model):
            model(*data(0, comm.rank)).backward()
        assert not seen  # there is no gradient yet
        model(*data(0, comm.rank)).backward()
        assert set(seen) == {"late"}
        other.norm.weight.register_hook(lambda grad: grad)
        with pytest.raises(ValueError, match="norm.weight has a hook of register_hook()"):
            dct.shard(other, stage, comm=comm)

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_an_optimizer_in_each_parameters_hook() -> None:
    """The step is in the backward, and the gradient is gone after it."""

    def rank(comm: Any, stage: int, hooked: bool) -> str:
        model = make()
        dct.shard(model, stage, comm=comm)
        each = {p: torch.optim.AdamW([p], lr=1e-2) for p in trainable(model)}

        def step(p: nn.Parameter) -> None:
            each[p].step()
            each[p].zero_grad()

        if hooked:
            for p in each:
                p.register_post_accumulate_grad_hook(step)
        for k in range(3):
            model(*data(k, comm.rank)).backward()
            for p in () if hooked else each:
                step(p)
            assert all(p.grad is None for p in each)
        return bits(dct.full_state_dict(model))

    expected = libdc.run.threads(2, rank, 0, False, timeout=60)
    for stage in (0, 1, 3):
        assert libdc.run.threads(2, rank, stage, True, timeout=60) == expected


def test_forward_hooks_see_whole_weights() -> None:
    def rank(comm: Any, stage: int) -> None:
        model = make(Plain)
        seen = []
        model.register_forward_pre_hook(lambda module, args: seen.append(module.layers[0].weight.shape))
        model.inner = nn.Sequential(model.layers[0], nn.Tanh())  # has no parameters of its own
        model.inner.register_forward_pre_hook(lambda module, args: seen.append(module[0].weight.shape))
        dct.shard(model, stage, comm=comm)
        model.register_forward_hook(lambda module, args, output: seen.append(module.layers[1].weight.shape))
        handle = model.layers[2].register_forward_pre_hook(lambda module, args: seen.append(module.weight.shape))
        model(torch.ones(2, 16)).backward()
        model.layers[2](torch.ones(2, 16))  # from outside
        model.inner(torch.ones(2, 16))
        assert seen == [(16, 16)] * 5
        handle.remove()
        model.layers[2](torch.ones(2, 16))
        assert len(seen) == 5 and (stage < 3 or dct.stats(model).gathered_bytes == 0)

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_a_forward_that_writes_into_a_weight_is_told() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    def rank(comm: Any) -> None:
        for stage in (1, 3):
            model = nn.Sequential(Clamps(4, 4))
            dct.shard(model, stage, comm=comm)
            with pytest.raises(RuntimeError, match="0.weight: a forward has written into the weight"):
                model(torch.ones(1, 4))
            with torch.inference_mode():
                model(torch.ones(1, 4))  # has no versions to tell by

    on(2, rank)


class Parent(nn.Module):
    """Reads the weights of a child, whose forward does not run then, and writes into one of them if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.list = nn.Linear(4, 4), nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.write = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.fc.weight
        if self.write == "before":
            with torch.no_grad():
                self.fc.weight.clamp_(-0.1, 0.1)
        x = self.fc(x) * self.list[0] + nn.functional.linear(x, weight)
        if self.write == "after":
            with torch.no_grad():
                weight.mul_(0)
        return x


@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("reshards", [None, False])
def test_a_forward_that_writes_into_anothers_weight_is_told(grads: bool, reshards: Any) -> None:
    def rank(comm: Any) -> None:
        for stage in (1, 2, 3):
            model = nn.Sequential(Parent(), Parent())
            dct.shard(model, stage, comm=comm, policy={"**": dct.Policy(reshard_after_forward=reshards)})
            for model[0].write in ("before", "after"):
                with torch.set_grad_enabled(grads), \
                        pytest.raises(RuntimeError, match="0.fc.weight: a forward has written into the weight"):
                    model(torch.ones(1, 4))
                with torch.inference_mode():
                    model(torch.ones(1, 4))
            model[0].write = ""
            with torch.set_grad_enabled(grads):
                model(torch.ones(1, 4))
            assert stage < 3 or reshards is False or dct.stats(model).gathered_bytes == 0

    on(2, rank)


class Outer(nn.Module):
    """Its forward does something with a weight, and then uses it."""

    def __init__(self, what: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.layer, self.weight, self.what = nn.Linear(3, 2), nn.Parameter(torch.ones(3)), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.what(self)
        return self.layer(x * self.weight)


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_gathered_weights_are_refused(name: str) -> None:
    """They would miss the weight's other uses and later steps."""
    def rank(comm: Any, stage: int) -> None:
        for weight_of in (lambda outer: outer.layer.weight, lambda outer: outer.weight):
            model = dct.shard(Outer(lambda outer: getattr(weight_of(outer), name)(print)), stage, comm=comm)
            with pytest.raises(RuntimeError, match=f"{name}: .*whole weight"):
                model(torch.ones(1, 3))
            seen: List[Any] = []
            model.what = lambda outer: outer.weight.view_as(outer.weight).register_hook(seen.append)
            model(torch.ones(1, 3)).sum().backward()
            assert model.layer.weight.grad is not None and not seen  # nothing used that view

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


class Uncertain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.log_var = nn.Parameter(torch.tensor(0.3))


def test_hooks_of_gradients_that_autograd_makes_itself() -> None:
    """At stages 1 to 3 they were not called where the forward had not used the parameter: an optimizer in the hook
    never stepped it."""

    made = Uncertain()

    def rank(comm: Any, stage: int) -> float:
        model = dct.shard(copy.deepcopy(made), stage, comm=comm)
        called: List[str] = []
        for name, p in model.named_parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(p: Any, name: str = name, optimizer: Any = optimizer) -> None:
                called.append(name)
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        for k in range(3):
            with dct.no_sync(model) if k == 0 else contextlib.nullcontext():
                loss = model(torch.ones(2, 4)).square().mean()
                (torch.exp(-model.log_var) * loss + model.log_var).backward()
        (3 * model.log_var + 0 * torch.ones(())).backward()  # without a forward
        assert sorted(called) == ["bias", "bias"] + ["log_var"] * 3 + ["weight", "weight"]
        assert model.log_var.grad is None
        return float(model.log_var.full_tensor())

    expected = on(2, lambda comm: rank(comm, 0))
    for stage in (1, 2, 3):
        assert on(2, lambda comm: rank(comm, stage)) == pytest.approx(expected)


class SlowlyDerived(nn.Linear):
    def __init_subclass__(cls) -> None:
        time.sleep(0.01)  # lets the other threads come here too


def test_ranks_that_are_threads_share_the_class_of_a_module() -> None:
    """With a class each, all but one rank's hooks saw the parts of weights."""

    def rank(comm: Any) -> Any:
        model = dct.shard(SlowlyDerived(2, 2, bias=False), 3, comm=comm)
        seen: List[Any] = []
        model.register_forward_hook(lambda module, args, result: seen.append(type(module.weight)))
        model(torch.ones(1, 2))
        assert seen == [torch.Tensor]
        return type(model)

    assert len(set(on(4, rank))) == 1
