"""A sharded model without references frees its memory, at once and without the garbage collector."""

from __future__ import annotations

import contextlib
import copy
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any, Callable, Iterator, List

import libdc.optim
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from libdc.torch.sharding.model import roots_of
from sharded import on, one_thread  # noqa: F401
from torch._C._dynamo import eval_frame
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


X = torch.linspace(-1, 1, 8).view(2, 4)


def train(model: nn.Module, call: Callable[..., Any], steps: int = 2) -> List[Any]:
    """Objects that a loop leaves alive besides the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)  # in a cycle with the optimizer
    for _ in range(steps):
        call(X).square().sum().backward()
        dct.clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [optimizer, scheduler]


def plain(model: nn.Module) -> Any:
    return train(model, model)


def only_forward(model: nn.Module) -> Any:
    model(X)
    with torch.no_grad():
        model(X)


def frozen(model: nn.Module) -> Any:
    for param in list(model.parameters())[:2]:
        param.requires_grad_(False)
    return train(model, model)


def checkpointed(model: nn.Module) -> Any:
    return train(model, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=False))


def accumulated(model: nn.Module) -> Any:
    with dct.no_sync(model):
        model(X).sum().backward()
    with dct.gathered(model):
        model[0].weight.sum()
    return train(model, model)


def saved(model: nn.Module) -> Any:
    left = plain(model)
    return left, dct.full_state_dict(model), dct.full_optimizer_state_dict(model, left[0]), model.state_dict()


def compiled(model: nn.Module) -> Any:
    left = train(model, torch.compile(model, backend="libdc"))
    gc.collect()  # what Dynamo leaves of its tracing
    return left


def muon(model: nn.Module) -> Any:
    optimizer = libdc.optim.Muon([model[0].weight, model[3].weight])
    model(X).sum().backward()
    optimizer.step()
    return optimizer


def kfac(model: nn.Module) -> Any:
    optimizer = libdc.optim.KFAC(model)
    model(X).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("use", [plain, only_forward, frozen, checkpointed, accumulated, saved, compiled, muon,
                                 kfac])
def test_a_dropped_model_is_gone(use: Callable[[nn.Module], Any], stage: int) -> None:
    torch._dynamo.reset()

    def rank(comm: Any) -> Any:
        model = dct.shard(make(), stage, comm=comm)
        left = use(model)  # what optimizers and states refer to is not the model
        gone = weakref.ref(roots_of(model)[0]), weakref.ref(roots_of(model)[0].group._context), weakref.ref(model)
        del model
        return [reference() is None for reference in gone], left

    assert on(1, rank)[0][0] == [True, True, True]


@pytest.mark.parametrize("backend", ["", "libdc"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_loss_keeps_what_its_backward_needs(stage: int, backend: str) -> None:
    torch._dynamo.reset()
    want = make()
    want[0].requires_grad_(False)
    want(X.clone().requires_grad_()).square().sum().backward()

    def rank(comm: Any) -> Any:
        model = make()
        model[0].requires_grad_(False)
        dct.shard(model, stage, comm=comm)
        gone, params = weakref.ref(roots_of(model)[0]), list(model.parameters())
        loss = (torch.compile(model, backend=backend) if backend else model)(X).square().sum()
        del model
        gc.collect()  # what Dynamo leaves of its tracing
        there = gone() is not None
        loss.backward()
        del loss
        return there and gone() is None, [param.grad for param in params]

    done, grads = on(1, rank)[0]
    assert done
    for grad, param in zip(grads, want.parameters()):
        assert (grad is None) == (param.grad is None)
        assert grad is None or torch.allclose(grad, param.grad.view(grad.shape))


def test_parameters_without_their_model() -> None:
    def rank(comm: Any) -> None:
        model = dct.shard(make(), 3, comm=comm)
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1)
        model(X).sum().backward()
        del model
        optimizer.step()  # needs no other rank
        with pytest.raises(RuntimeError, match="0.weight: the sharded model .* is gone"):
            dct.clip_grad_norm_(params, 1.0)

    on(1, rank)


def test_many_models_in_turn_and_at_once() -> None:
    def rank(comm: Any) -> None:
        for _ in range(40):
            model = dct.shard(make(), 3, comm=comm)
            muon(model)
        models = [dct.shard(make(), 3, comm=comm) for _ in range(40)]
        for model in models:
            plain(model)

    on(2, rank)


@pytest.mark.parametrize("keeper", ["torch", "libdc", "threading"])
def test_what_lives_to_the_end_ends_in_silence(keeper: str) -> None:
    """Models, gradients and an optimizer's state die while the interpreter takes its modules down."""
    text = f"""
import threading, torch, libdc, libdc.optim, libdc.torch as dct
model = dct.shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)))
optimizer = libdc.optim.SGD(model.parameters(), momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
loss = model(torch.ones(2, 8)).sum()
loss.backward()
optimizer.step()
scheduler.step()
{keeper}.kept = model, optimizer, scheduler, loss, model(torch.ones(2, 8)).sum()
"""
    done = subprocess.run([sys.executable, "-c", text], text=True, capture_output=True, stdin=subprocess.DEVNULL,
                          timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Memory of weights at stage 3


class Keeps(nn.Module):
    """Reads a weight outside of its module, and a variable keeps another beyond the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.layers = nn.Embedding(8, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.kept: List[torch.Tensor] = []

    def forward(self, keep: int) -> torch.Tensor:
        x = self.emb(torch.arange(8))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.kept = [layer.weight for layer in self.layers[:keep]]
        return torch.nn.functional.linear(x, self.emb.weight).square().mean()


@contextlib.contextmanager
def beside_compiled_code(present: bool) -> Iterator[None]:
    """While a thread runs compiled code, Dynamo has replaced the interpreter's function for calls in all threads. Then
    a call holds its arguments twice."""
    ended = threading.Event()
    ready = threading.Event()

    def run() -> None:
        eval_frame.set_eval_frame(False)
        ready.set()
        ended.wait()
        eval_frame.set_eval_frame(None)

    thread = threading.Thread(target=run)
    if present:
        thread.start()
        ready.wait()
    try:
        yield
    finally:
        ended.set()
        if present:
            thread.join()


@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_keep_no_weights_but_variables_do(compiled: bool) -> None:
    def rank(comm: Any) -> None:
        plain = Keeps()
        model = dct.shard(Keeps(), 3, comm=comm)
        for keep in (0, 2):
            losses = []
            for net in (plain, model):
                net.zero_grad()
                loss = net(keep)
                assert (dct.stats(model).gathered_bytes > 0) == (net is model and keep > 0)
                losses.append(sum((weight.exp().sum() for weight in net.kept), loss))
                losses[-1].backward()
                net.kept = []
            assert losses[0] == losses[1]
            for p, q in zip(plain.parameters(), model.parameters()):
                torch.testing.assert_close(q.grad.full_tensor(), p.grad)
            del loss, losses
            assert dct.stats(model).gathered_bytes == 0

    with beside_compiled_code(compiled):
        on(1, rank)


def test_weights_that_a_graph_saves_itself() -> None:
    """Without a gradient outside, and with one inside: no hook saves weights by name there."""

    class Inside(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return super().forward(x) * self.weight

    def rank(comm: Any) -> None:
        torch.manual_seed(0)
        plain = Inside(4, 4)
        model = dct.shard(copy.deepcopy(plain), 3, comm=comm)
        x = torch.ones(4, 4)
        for net in (plain, model):
            with torch.no_grad():
                y = net(x)
            y.exp().sum().backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)

    on(1, rank)
