"""Which gradients the backward of a compiled sharded model adds to `.grad`: those that eager mode would."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, List, Optional

import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from compared import compare, grads_of
from sharded import one_thread  # noqa: F401


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


BACKENDS = pytest.mark.parametrize("backend", [None, "libdc", "aot_eager", "eager"])


@BACKENDS
def test_backwards_for_some_inputs(backend: Optional[str]) -> None:
    """Compiled graphs added all gradients, whatever the backward was for."""

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        x = torch.ones(2, 4, requires_grad=True)
        found: List[Any] = [*torch.autograd.grad(call(x).square().sum(), x), *grads_of(model)]
        for _ in range(2):
            call(x).square().sum().backward()
            found += grads_of(model)
            found += [*torch.autograd.grad(call(x).square().sum(), x), *grads_of(model)]
            x.grad = None
            call(x).square().sum().backward(inputs=[x])
            found += [x.grad, *grads_of(model)]
            call(x).square().sum().backward(inputs=[model[1].weight])
            found += grads_of(model)
            model[0].bias.grad = None
            call(x).square().sum().backward(inputs=[x, model[0].bias, model[1].weight])
            found += [x.grad, *grads_of(model)]
        return found

    compare(work, backend)


@BACKENDS
def test_autograd_grad_by_parameters(backend: Optional[str]) -> None:
    """It would return None."""

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        loss = call(torch.ones(2, 4)).square().sum()
        if hasattr(model, "_dc"):
            with pytest.raises(RuntimeError, match="autograd.grad: 1.weight among inputs .* call loss.backward"):
                torch.autograd.grad(loss, model[1].weight, allow_unused=True)
        loss.backward()
        return grads_of(model)

    compare(work, backend)


@BACKENDS
def test_freezing_between_forward_and_backward(backend: Optional[str]) -> None:
    """As in PyTorch, a parameter that is frozen by then gets no gradient, and keeps the one that it has."""

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        x, found = torch.ones(2, 4), []
        for frozen in ([model[1].bias], [model[1].bias, model[0].weight], list(model.parameters())):
            loss = call(x).square().sum()
            for p in frozen:
                p.requires_grad_(False)
            loss.backward()
            found += grads_of(model)
            model.requires_grad_(True)
        return found

    compare(work, backend)


def test_after_a_backward_that_raised() -> None:
    """autograd.grad() of a compiled model lets the library drop gradients, until the next forward at the latest."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("backward")

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        x = torch.ones(2, 4, requires_grad=True)
        with pytest.raises(KeyError):
            torch.autograd.grad(call(Raises.apply(x)).sum(), x)
        call(x).square().sum().backward()
        return grads_of(model)

    compare(work, "libdc")


@pytest.mark.parametrize("backend", [None, "libdc"])
def test_in_no_sync(backend: Optional[str]) -> None:
    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        x = torch.ones(2, 4, requires_grad=True)
        with dct.no_sync(model) if hasattr(model, "_dc") else contextlib.nullcontext():
            found = [*torch.autograd.grad(call(x).square().sum(), x)]
            call(x).square().sum().backward()
        call(x).square().sum().backward()
        return found + grads_of(model)

    compare(work, backend)


def test_a_forward_outside_of_no_sync() -> None:
    """Its graph averages gradients, which no backward in the block may do."""

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        x = torch.ones(2, 4)
        if hasattr(model, "_dc"):
            loss = call(x).square().sum()
            with dct.no_sync(model), pytest.raises(RuntimeError, match="no_sync: the graph .* averages its gradients"):
                loss.backward()
            assert all(p.grad is None for p in model.parameters())
        call(x).square().sum().backward()
        return grads_of(model)

    compare(work, "libdc")


@pytest.mark.parametrize("backend", [None, "libdc"])
def test_sums_of_no_sync_and_a_backward_of_other_inputs(backend: Optional[str]) -> None:
    """Its graph reduces gradients that nothing wants into the memory where the sums are averaged."""
    def work(model: nn.Module, call: Callable[..., Any], first: bool) -> List[Any]:
        x = torch.ones(2, 4, requires_grad=True)
        if first:
            call(x).sum().backward()
        with dct.no_sync(model) if hasattr(model, "_dc") else contextlib.nullcontext():
            call(x).square().sum().backward()
        call(x).sum().backward(inputs=[list(model.parameters())[-1]])
        return grads_of(model)

    for first in (False, True):
        compare(functools.partial(work, first=first), backend)


@pytest.mark.parametrize("backend", ["libdc", "aot_eager"])
def test_branches_of_cond(backend: str) -> None:
    """Their backward runs without autograd's keys. A parameter of the other branch gets no gradient."""

    class Branches(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "_dc"):
                return self[0](x) if x.sum() > 0 else self[1](x)
            return torch.cond(x.sum() > 0, lambda x: self[0](x), lambda x: self[1](x), (x,))

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        found: List[Any] = []
        for sign in (1.0, -1.0):
            call(torch.full((2, 4), sign)).square().sum().backward()
            found += grads_of(model)
            model.zero_grad()
        return found

    compare(work, backend, make=lambda: Branches(nn.Linear(4, 4), nn.Linear(4, 4)))


@pytest.mark.parametrize("backend", ["libdc", "eager"])
def test_compiled_autograd_is_refused(backend: str) -> None:
    from torch._dynamo import compiled_autograd

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        if call is not model:
            with compiled_autograd._enable(torch.compile(backend="aot_eager")), \
                    pytest.raises(RuntimeError, match="without autograd's engine"):
                call(torch.ones(2, 4)).sum().backward()
        call(torch.ones(2, 4)).square().sum().backward()
        return grads_of(model)

    compare(work, backend)


@pytest.mark.parametrize("backend", [None, "libdc", "aot_eager"])
def test_a_fused_step_between_forward_and_backward(backend: Optional[str]) -> None:
    """It leaves no trace in a tensor's version by itself."""

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        if hasattr(model, "_dc"):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
            call(torch.ones(2, 4)).square().sum().backward()
            loss = call(torch.ones(2, 4)).square().sum()
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                loss.backward()
        return []

    compare(work, backend)


@BACKENDS
@pytest.mark.parametrize("hook", [False, True])
def test_autograd_grad_inside_of_a_backward(backend: Optional[str], hook: bool) -> None:
    """As implicit layers do it: a tensor's hook solves for the gradient by torch.autograd.grad(). It let the library
    drop all gradients of compiled graphs that came later in the backward around it."""

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        cell = model[0] if call is model else torch.compile(model[0], backend=backend)
        z = torch.tanh(cell(torch.ones(2, 4)))
        start = z.detach().requires_grad_()
        again = torch.tanh(cell(start))
        if hook:
            z.register_hook(lambda grad: grad + torch.autograd.grad(again, start, grad, retain_graph=True)[0])
        model[1](z).square().sum().backward()  # model[1]'s gradients come first, so the root is in its backward
        return grads_of(model)

    compare(work, backend)


@BACKENDS
def test_a_backward_with_inputs_inside_of_another(backend: Optional[str]) -> None:
    """The inner one's end made compiled graphs of the outer one add gradients of all parameters."""

    def work(model: nn.Module, call: Callable[..., Any]) -> List[Any]:
        cell = model[0] if call is model else torch.compile(model[0], backend=backend)
        biases = [p for p in model.parameters() if p.dim() == 1]
        inner = model[1](torch.ones(2, 4)).sum()
        hidden = cell(torch.ones(2, 4))
        hidden.register_hook(lambda grad: inner.backward(inputs=biases[1:]))
        hidden.square().sum().backward(inputs=biases[:1])
        return grads_of(model)

    compare(work, backend)
