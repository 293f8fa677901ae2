"""Compiled code reads the weights that a sharded model has now, and nothing that it writes into them is lost."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, List

import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from compared import compare
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
