"""Uses of a parameter that go past its module's attribute."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Dict, Optional

import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from libdc.torch.sharding.part import plain_tensor
from sharded import on, one_thread  # noqa: F401
from torch.utils.checkpoint import checkpoint


class Direct(nn.Module):
    """Reads its weights by a dictionary, one of them by its attribute too, and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.c = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = dict(self.named_parameters())
        return (self.a(x) @ weights["a.weight"] @ weights["b.weight"]).square().mean()


def test_direct_uses_of_whole_parameters_are_averaged() -> None:
    """At stage 0, also over micro-batches, in no_sync(), for weights that were frozen, and where nothing else is."""
    plain = copy.deepcopy(made := Direct())
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    for x in inputs:
        (plain(x) / 2).backward()

    def rank(comm: Any) -> None:
        model = copy.deepcopy(made)
        model.b.requires_grad_(False)
        dct.shard(model, 0, comm=comm)
        model.b.requires_grad_(True)
        seen = []
        model.b.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for i in range(4):
            with dct.no_sync(model) if i == 1 else contextlib.nullcontext():
                model(inputs[2 * i + comm.rank]).backward()
        for name, p in plain.named_parameters():
            torch.testing.assert_close(model.get_submodule(name[0]).weight.grad if p.grad is not None else None, p.grad)
        assert len(seen) == 3 and torch.equal(seen[-1], model.b.weight.grad)  # none in no_sync()
        model.zero_grad()
        ((comm.rank + 1.0) * model.b._parameters["weight"].sum()).backward()
        before = model.b.weight.grad
        (alone,) = torch.autograd.grad(model.b._parameters["weight"].sum(), model.b._parameters["weight"])
        assert torch.equal(alone, torch.ones(4, 4)) and model.b.weight.grad is before
        assert torch.equal(before, torch.full((4, 4), 1.5)) and model.a.weight.grad is None

    on(2, rank)


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("backward")


def test_a_failed_autograd_grad_leaves_gradients_alone() -> None:
    """At stage 0. A gradient that was put aside came back into the next step, after zero_grad()."""
    model = dct.shard(Direct(), 0)
    weight = model.b._parameters["weight"]
    weight.sum().backward()
    before = weight.grad
    x = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(KeyError):
        torch.autograd.grad((Raises.apply(2 * x) @ weight).sum(), [weight, x])
    assert weight.grad is before and torch.equal(before, torch.ones(4, 4))
    model.zero_grad()
    model(torch.ones(3, 4))
    (3 * weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 3.0))


def test_autograd_adds_nothing_to_what_is_reduced_into() -> None:
    """At stages 1 to 3 both would add to `.grad` at one time, and elements lost one of the two."""

    def rank(comm: Any, stage: int) -> None:
        model = dct.shard(nn.Linear(4, 3, bias=False), stage, comm=comm)
        weight, versions = model.weight, []

        class Probe(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                versions.append(weight.grad._version)
                return grad

        for to_none in (True, False):
            model.zero_grad(to_none)
            model(torch.ones(1, 4)).sum().backward()
            last = Probe.apply(torch.ones((), requires_grad=True))  # what is made first has its backward last
            penalty = (8 * weight).sum()
            versions[:] = [weight.grad._version]
            (model(torch.ones(1, 4)).sum() + penalty + last).backward()
            assert len(set(versions)) == 1
            assert torch.equal(weight.grad.full_tensor(), torch.full((3, 4), 10.0))

    for stage in (1, 2, 3):
        on(2, lambda comm: rank(comm, stage))


def test_freezing_before_a_backward_keeps_gradients() -> None:
    """At stage 0 `.grad` was put aside for a gradient that PyTorch does not make then."""
    model = dct.shard(Direct(), 0)
    weight = model.b._parameters["weight"]
    weight.sum().backward()
    before, loss = weight.grad, model(torch.ones(3, 4)) + weight.sum()
    model.b.requires_grad_(False)
    loss.backward()
    assert weight.grad is before and torch.equal(before, torch.ones(4, 4)) and model.a.weight.grad is not None


def test_autograd_grad_by_parameters() -> None:
    """It reaches direct uses alone: a forward's graph has whole weights in the parameters' place."""

    def rank(comm: Any, stage: int) -> None:
        model = dct.shard(Direct(), stage, comm=comm)
        params = dict(model.named_parameters())
        penalty = sum(p.square().sum() for name, p in params.items() if name != "c.bias")
        found = torch.autograd.grad(penalty, list(params.values()), allow_unused=True)
        for (name, p), grad in zip(params.items(), found):
            assert grad is None if name == "c.bias" else torch.equal(plain_tensor(grad), plain_tensor(2 * p))
        loss = model.a(torch.ones(2, 4)).sum()
        for options in {}, {"allow_unused": True}, {"materialize_grads": True}:
            for each in loss, loss + params["a.weight"].sum():
                with pytest.raises(RuntimeError, match="autograd.grad: a.weight among inputs .* call loss.backward"):
                    torch.autograd.grad(each, list(params.values()), **options)
        assert torch.autograd.grad(loss, [params["b.weight"]], allow_unused=True) == (None,)
        with dct.gathered(model):
            (grad,) = torch.autograd.grad(model.b.weight.sum(), model.b.weight)
            assert torch.equal(grad, torch.ones(4, 4))
        loss.backward()
        assert float(params["a.weight"].grad.sum()) == 32 and params["b.weight"].grad is None

    for stage in (0, 1, 3):
        on(2, lambda comm: rank(comm, stage))


def test_gradients_of_autograd_grad_know_the_whole() -> None:
    """They were plain tensors, whose norms were this rank's alone."""

    def rank(comm: Any, stage: int) -> None:
        model = dct.shard(nn.Linear(4, 3, bias=False), stage, comm=comm)
        weight = model._parameters["weight"]
        grad, = torch.autograd.grad((3 * weight).sum(), weight)
        assert grad.shape == (3, 4) and float(grad.norm()) == pytest.approx(3 * 12 ** 0.5)

    for stage in (0, 1, 3):
        on(2, lambda comm: rank(comm, stage))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_weights_that_are_read_under_no_grad(reentrant: Optional[bool]) -> None:
    """A parameter is the same leaf wherever it is read: what was read under no_grad() and used outside of it got no
    gradient, without a word."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x) if reentrant is None else checkpoint(self.scaled, x, use_reentrant=reentrant)

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                weight, scale = self.weight, self.weight.abs().amax()
            rounded = weight + ((weight / scale).round() * scale - weight).detach()  # straight-through, as in QAT
            return x @ rounded.t() + self.bias

    made = nn.Sequential(Scaled(4, 4), Scaled(4, 4))

    def rank(comm: Any, stage: int) -> Dict[str, torch.Tensor]:
        model = copy.deepcopy(made)
        if stage >= 0:
            dct.shard(model, stage, comm=comm)
        model(torch.ones(2, 4, requires_grad=True)).square().sum().backward()
        return {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
                for name, p in model.named_parameters() if p.grad is not None}

    expected = on(1, lambda comm: rank(comm, -1))[0]
    for stage in (0, 1, 3):
        for found in on(2, lambda comm: rank(comm, stage)):
            assert found.keys() == expected.keys()
            for name in expected:
                torch.testing.assert_close(found[name], expected[name])


def test_an_encoder_in_a_model_called_by_itself() -> None:
    """Its fast path, whose result is zero where padding is, is for weights without a class of their own."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    plain = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Linear(4, 2)).eval()
    x, padding = torch.randn(2, 5, 4), torch.arange(5).expand(2, 5) > 2

    def rank(comm: Any) -> None:
        for stage in range(4):
            model = dct.shard(copy.deepcopy(plain), stage, comm=comm)
            with torch.no_grad():
                got, wanted = (net[0](x, src_key_padding_mask=padding) for net in (model, plain))
            torch.testing.assert_close(got, wanted)
            assert got[:, 3:].count_nonzero() == 0
            model(x).sum().backward()

    on(2, rank)
