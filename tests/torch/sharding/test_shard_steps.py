"""Users' calls between forward, backward and step besides the plain loop."""

from __future__ import annotations

import copy
import time
from typing import Any, Dict

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from models import Odd, Plain, adamw, bits, data, make, trainable
from sharded import alone, grads, on, one_thread, same, sharded  # noqa: F401


def test_no_grad_and_inference_mode() -> None:
    def work(model: Odd) -> None:
        expected = make()(*data(0, 0))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                loss = model(*data(0, 0))
            assert torch.equal(loss, expected) and not loss.requires_grad
            assert dct.stats(model).gathered_bytes == 0
        loss = model(*data(0, 0))
        loss.backward()
        assert torch.equal(loss, expected)

    alone(work)


def test_two_forwards_one_backward() -> None:
    def rank(comm: Any, stage: int) -> Any:
        model = sharded(comm, stage)
        (model(*data(0, comm.rank)) + model(*data(1, comm.rank))).backward()
        together = grads(model)
        model.zero_grad()
        model(*data(1, comm.rank)).backward()  # the order in which autograd runs the sum
        model(*data(0, comm.rank)).backward()
        apart = grads(model)
        for name in together:
            torch.testing.assert_close(together[name], apart[name], rtol=1e-4, atol=1e-6)
        return bits(together)

    for stage in (0, 1, 3):
        assert len(set(libdc.run.threads(1, rank, stage, timeout=60))) == 1


def test_retain_graph_and_zero_grad_in_place() -> None:
    def work(model: Odd) -> None:
        loss = model(*data(0, 0))
        loss.backward(retain_graph=True)
        once = grads(model)
        loss.backward()
        for name, grad in grads(model).items():  # not the same bits: tied weights have two parts
            torch.testing.assert_close(grad, 2 * once[name])
        for p in trainable(model):
            p.grad.zero_()
        model(*data(0, 0)).backward()
        assert same(grads(model), once)
        model.zero_grad(set_to_none=True)
        model(*data(0, 0)).backward()
        assert same(grads(model), once)
        for p in trainable(model):  # tensors of the user's own
            p.grad = p.grad * 3
        model(*data(0, 0)).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, 4 * once[name])

    for stage in (0, 1, 3):
        alone(work, stage=stage)


def test_parameters_without_a_gradient_keep_theirs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            return getattr(self, which)(x).sum()

    def rank(comm: Any) -> None:
        model = Two()
        dct.shard(model, 3, comm=comm)
        x = torch.ones(2, 3)
        model(x, "a").backward()
        assert model.b.weight.grad is None
        kept = model.a.weight.grad.clone()
        model(x, "b").backward()
        assert torch.equal(model.a.weight.grad, kept) and model.b.weight.grad is not None
        model(x, "a").backward()
        assert torch.equal(model.a.weight.grad, 2 * kept)

    on(2, rank)


def test_penalties_over_parameters_count() -> None:
    """Gradients that autograd adds itself join those that libdc averages."""

    def penalty(model: nn.Module) -> torch.Tensor:
        return sum(p.square().sum() for p in trainable(model))  # type: ignore[return-value]

    plain = make()
    for step in range(2):
        (plain(*data(step, 0)) + penalty(plain)).backward()

    def work(model: Odd) -> None:
        for step in range(2):
            (model(*data(step, 0)) + penalty(model)).backward()
        for p, q in zip(trainable(model), trainable(plain)):
            torch.testing.assert_close(p.grad.view(q.shape), q.grad, rtol=1e-5, atol=1e-6)

    for stage in (0, 1, 3):
        alone(work, stage=stage)


def test_one_rank_s_overflow_is_seen_by_all() -> None:
    def rank(comm: Any) -> None:
        for stage in (0, 1, 3):
            model = nn.Linear(3, 3)
            dct.shard(model, stage, comm=comm, check_finite=True, reduce_dtype=torch.float16)
            for factor in (1.0, 1e6, 1.0):
                x = torch.ones(2, 3) * (factor if comm.rank == 1 else 1)
                model(x).sum().backward()
                assert dct.grads_finite(model) is (factor == 1)
                model.zero_grad()
            with dct.no_sync(model):
                model(torch.full((1, 3), float("inf") if comm.rank == 0 else 1.0)).sum().backward()
            model(torch.ones(1, 3)).sum().backward()
            assert not dct.grads_finite(model)

    on(2, rank)


def test_backward_with_inputs_and_second_order() -> None:
    def work(model: Plain) -> None:
        x = torch.randn(4, 16, requires_grad=True)
        model(x).backward(inputs=[model.layers[1].weight])
        assert model.layers[1].weight.grad is not None and model.layers[0].weight.grad is None
        model.zero_grad()
        plain = make(Plain)
        for net in (plain, model):  # a gradient penalty
            grad, = torch.autograd.grad(net(x), x, create_graph=True)
            grad.square().sum().backward()
        for p, q in zip(plain.parameters(), model.parameters()):
            torch.testing.assert_close(q.grad.view(p.shape), p.grad, rtol=1e-4, atol=1e-9)
        with pytest.raises(RuntimeError, match="layers.*create_graph=True. would make .grad without a graph"):
            model(x).square().sum().backward(create_graph=True)
        model.zero_grad()
        model(x).square().sum().backward()  # the error has left nothing behind

    def rank(comm: Any) -> None:
        model = make(Plain)
        dct.shard(model, 3, comm=comm)
        work(model)

    on(1, rank)


def test_abandoned_and_raising() -> None:
    """Forwards without a backward, and exceptions in either, leave nothing behind."""

    class Touchy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, angry: bool) -> torch.Tensor:
            ctx.angry = angry
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            if ctx.angry:
                raise ArithmeticError("backward")
            return grad, None

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make(Plain)

        def forward(self, x: torch.Tensor, mood: str) -> torch.Tensor:
            for k, layer in enumerate(self.net.layers):
                x = Touchy.apply(layer(x), mood == "backward" and k == 1)
                if mood == "forward" and k == 2:
                    raise ArithmeticError("forward")
            return x.square().sum()

    def rank(comm: Any) -> None:
        model = Moody()
        dct.shard(model, 3, comm=comm, group_size=1, prefetch=2)
        x = torch.ones(2, 16)

        def step(mood: str) -> Dict[str, torch.Tensor]:
            model.zero_grad()
            loss = model(x, mood)
            if mood != "abandon":
                loss.backward()
            return grads(model)

        expected = step("")
        step("")
        for mood in ("abandon", "forward", "backward", "forward", "abandon", "backward", "backward"):
            if mood == "abandon":
                step(mood)
            else:
                with pytest.raises(ArithmeticError, match=mood):
                    step(mood)
            # A prefetch in vain is freed once it has arrived.
            deadline = time.monotonic() + 600
            while mood != "backward" and dct.stats(model).gathered_bytes and time.monotonic() < deadline:
                time.sleep(0.001)
            assert mood == "backward" or dct.stats(model).gathered_bytes == 0
            assert same(step(""), expected), mood
            assert dct.stats(model).gathered_bytes == 0

    on(2, rank)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_backward_that_raises_before_the_backward_of_an_earlier_graph(stage: int) -> None:
    """No forward comes between them, which would drop what the first has begun."""

    def raises(grad: torch.Tensor) -> None:
        raise ArithmeticError("backward")

    def rank(comm: Any) -> None:
        model = make(Plain)
        dct.shard(model, stage, comm=comm, prefetch=2)
        x = torch.full((2, 16), comm.rank + 1.0)
        model(x).sum().backward()
        expected = grads(model)
        model.zero_grad()
        first = model(x).sum()
        middle = model.layers[0](x)
        middle.register_hook(raises)
        with pytest.raises(ArithmeticError):
            (model.layers[1](middle).sum() + model(x).sum()).backward()
        first.backward()
        assert same(grads(model), expected)

    on(2, rank)


def test_changed_order() -> None:
    """Another path through the model than the last time: every rank leaves the known order together."""

    class Paths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make(Plain, layers=6)

        def forward(self, x: torch.Tensor, path: Any) -> torch.Tensor:
            for k in path:
                x = torch.tanh(self.net.layers[k](x))
            return x.square().sum()

    def rank(comm: Any, stage: int, prefetch: int) -> Any:
        model = Paths()
        dct.shard(model, stage, comm=comm, group_size=1, prefetch=prefetch)
        optimizer = adamw(model)
        losses = []
        for path in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 4, 5], [0, 1], [0, 1, 2, 3, 4, 5], [3, 3, 3], [0, 1, 2, 3], [2],
                     [0, 1, 2, 3], [0, 1, 2, 3]):
            loss = model(torch.ones(2, 16) * (1 + comm.rank), path)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            assert stage < 3 or dct.stats(model).gathered_bytes == 0
        return losses, bits(dct.full_state_dict(model))

    expected = libdc.run.threads(2, rank, 0, 0, timeout=60)
    for stage, prefetch in ((1, 2), (3, 0), (3, 1), (3, 4)):
        assert libdc.run.threads(2, rank, stage, prefetch, timeout=60) == expected


def test_stepping_between_forward_and_backward() -> None:
    def work(model: Odd) -> None:
        optimizer = adamw(model, fused=True)
        model(*data(0, 0)).backward()
        loss = model(*data(1, 0))
        optimizer.step()
        with pytest.raises(RuntimeError, match="changed between forward and backward|modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
        model(*data(1, 0)).backward()

    for stage in (0, 1, 3):
        alone(work, stage=stage)


def test_two_models() -> None:
    """Each has its own graph; one backward goes through both."""

    def rank(comm: Any, stage: int) -> Any:
        a, b = make(Plain), make(Plain, layers=2)
        dct.shard(a, stage, comm=comm)
        dct.shard(b, stage, comm=comm)
        x = torch.ones(2, 16) * (comm.rank + 1)
        for net in (a, b):
            net(x).backward()
        apart = [grads(a), grads(b)]
        a.zero_grad(), b.zero_grad()
        (a(x) + b(x)).backward()
        assert same(grads(a), apart[0]) and same(grads(b), apart[1])
        return bits({k: v for k, v in dct.full_state_dict(a).items()})

    for stage in (0, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_reentrant_checkpoint_and_functions() -> None:
    class Net(nn.Module):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.net, self.way = make(Plain), way
            self.own = nn.Parameter(torch.full((16,), 0.5))

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.net.layers[0](x) * self.own)  # reads a parameter without a forward of its owner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.way == "plain":
                x = self.part(x)
            else:
                x = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=self.way == "reentrant")
            for layer in self.net.layers[1:]:
                x = torch.tanh(layer(x))
            return x.square().sum()

    def rank(comm: Any, way: str, stage: int) -> Any:
        model = Net(way)
        dct.shard(model, stage, comm=comm)
        found = []
        for k in range(3):
            model(torch.ones(2, 16, requires_grad=True) * (comm.rank + 1 + k)).backward()
            found.append(grads(model))
            if k == 1:
                model.zero_grad()
        return [{name: bits({"": g}) for name, g in grad.items()} for grad in found]

    for stage in (0, 3):
        expected = libdc.run.threads(2, rank, "plain", stage, timeout=60)
        assert libdc.run.threads(2, rank, "not", stage, timeout=60) == expected
        assert libdc.run.threads(2, rank, "reentrant", stage, timeout=60) == expected


def test_modules_that_read_others_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.lstm = nn.LSTM(8, 8, batch_first=True)
            self.list = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.attention(x, x, x)[0]
            x = self.lstm(x)[0] * self.list[0] + self.list[1]
            return self.linear(x).square().sum()

    torch.manual_seed(0)
    plain = Net()
    plain(torch.ones(2, 3, 8)).backward()
    expected = grads(plain)

    def rank(comm: Any) -> None:
        model = copy.deepcopy(plain)
        model.zero_grad()
        dct.shard(model, 3, comm=comm)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 3, 8)).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.view(dct.full_shape(p)), expected[name], rtol=1e-4, atol=1e-6)

    on(1, rank)
