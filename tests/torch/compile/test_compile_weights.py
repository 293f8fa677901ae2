"""Compiled code reads the weights that a sharded model has now, and nothing that it writes into them is lost."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, List

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from compared import compare, grads_of, two_linears
from libdc.torch.compile import dynamo_backend
from sharded import one_thread  # noqa: F401

BACKENDS = pytest.mark.parametrize("backend", ["libdc", "aot_eager", "eager"])


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@BACKENDS
def test_functional_call(backend: str) -> None:
    """Graphs are for the tensors that a module has while it is called."""

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        x, found = torch.ones(2, 4), [call(torch.ones(2, 4))]
        names = [f"_orig_mod.{name}" if call is not model else name for name, _ in model.named_parameters()]
        given = {name: torch.full(p.shape, 0.1, requires_grad=True) for name, p in zip(names, model.parameters())}
        for some in (given, dict(list(given.items())[:1])):
            loss = torch.func.functional_call(call, some, (x,)).square().sum()
            found += [loss, *torch.autograd.grad(loss, list(some.values()))]
            found.append(call(x))
        return [value.detach() for value in found]

    compare(work, backend)


def test_functional_call_inside_of_a_compiled_function() -> None:
    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        given = {name: torch.full(p.shape, 0.1) for name, p in model.named_parameters()}
        compiled = torch.compile(lambda given, x: torch.func.functional_call(model, given, (x,)), backend="libdc")
        return [compiled(given, torch.ones(2, 4)).detach(), call(torch.ones(2, 4)).detach()]

    compare(work, "libdc", stages=[0])


@BACKENDS
@pytest.mark.parametrize("what", ["module", "function", "weight"])
def test_parts_of_a_model(what: str, backend: str) -> None:
    """No compiled code is the model's forward, which would take in written weights."""

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        parts = {"module": model[0], "function": lambda x: model[1](model[0](x)),
                 "weight": lambda x: x @ model[0].weight}
        part = parts[what] if call is model else torch.compile(parts[what], backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, found = torch.ones(2, 4), []
        for step in range(3):
            loss = part(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
            with torch.no_grad():
                model[0].weight.mul_(0.5)
                found.append(part(x))
        model.load_state_dict({name: torch.full(p.shape, 0.2) for name, p in model.named_parameters()})
        found.append(part(x).detach())
        with dct.gathered(model) if hasattr(model, "_dc") else contextlib.nullcontext(), torch.no_grad():
            model[0].weight.fill_(2.0)
            found.append(part(x))
        return found

    compare(work, backend)
    compare(work, backend, stages=[2, 3], policy={"": dct.Policy(reshard_after_forward=False)})


@BACKENDS
@pytest.mark.parametrize("how", ["in place", "view", "tracked", "outside"])
def test_writes_are_refused(how: str, backend: str) -> None:
    """They would be lost, in a forward and elsewhere in a compiled function. At stage 0 they are not."""

    class Writes(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if how == "tracked":
                self.write(self[0].weight)
            elif how != "outside":
                with torch.no_grad():
                    self.write(self[0].weight)
            return self[0](x).mul_(2.0)

        def write(self, weight: torch.Tensor) -> None:
            with torch.no_grad():
                weight.t()[0].fill_(7.0) if how == "view" else weight.fill_(7.0)

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            if how == "outside":
                with torch.no_grad():
                    model.write(model[0].weight)
            return y

        refused = hasattr(model, "_dc") and model.__dict__["_dc"].root.group.stage > 0
        message = "0.weight: a compiled function has written into the weight"
        with pytest.raises(RuntimeError, match=message) if refused else contextlib.nullcontext():
            (function if call is model else torch.compile(function, backend=backend))(torch.ones(2, 4))
        return [torch.tensor(True) if refused else model[0].weight.detach()[0, 0] == 7.0]

    compare(work, backend, make=lambda: Writes(nn.Linear(4, 4)))


class Recurrent(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](self[1](self[0](x[None])[0])[0])


@BACKENDS
def test_recurrent_layers(backend: str) -> None:
    """Dynamo leaves them to the interpreter. There it compiled libdc's own functions, which it cannot."""

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, found = torch.ones(2, 4), []
        for _ in range(3):
            loss = call(x).square().sum()
            loss.backward()
            found += [loss.detach(), *grads_of(model)]
            optimizer.step()
            optimizer.zero_grad()
        return found

    compare(work, backend, make=lambda: Recurrent(nn.LSTM(4, 5, 2), nn.GRU(5, 4, bidirectional=True), nn.Linear(8, 3)))


def test_parameters_in_a_compiled_function_are_refused() -> None:
    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean() + sum(p.square().sum() for p in model.parameters())

        if call is not model:
            with pytest.raises(RuntimeError, match="outside of the compiled function"):
                torch.compile(loss, backend="libdc")(torch.ones(2, 4))
        return []

    compare(work, "libdc", stages=[1, 3])


def test_the_key_of_inductors_cache() -> None:
    """A process whose options differ does not get another one's order of gathers."""
    schedule, keys = dynamo_backend._make_schedule_pass(None), []

    def rank(comm: Any, **options: Any) -> None:
        model = two_linears()
        dct.shard(model, 3, comm=comm, **options)
        keys.append(schedule.uuid())
        assert schedule.uuid() == keys[-1]

    for options in ({"prefetch": 1}, {"prefetch": 2}, {"group_size": 1}, {"policy": {"1": dct.Policy(group=True)}}):
        libdc.run.threads(1, functools.partial(rank, **options), timeout=120)
    assert len({str(key[1]).split("Options")[-1] for key in keys}) == 4


def test_compiled_functions_read_gradients_and_step() -> None:
    """At stage 0 a parameter's `.grad` is a property, which Dynamo must not compile by itself."""
    def rank(comm: Any) -> None:
        torch.manual_seed(0)
        model = dct.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 0, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.ones(2, 4)).square().sum().backward()
        norm = torch.compile(lambda: sum(p.grad.norm() for p in model.parameters()), backend="eager")
        assert norm() == sum(p.grad.norm() for p in model.parameters())
        expected = [p.detach() - 0.5 * p.grad for p in model.parameters()]
        torch.compile(lambda: optimizer.step(), backend="eager")()
        torch.testing.assert_close([p.detach() for p in model.parameters()], expected)

    libdc.run.threads(1, rank, timeout=120)
