"""libdc.optim.KFAC: what its hooks give the library is the layers' inputs and output gradients, whatever the model does
with them; K-FAC's own mathematics is tests/optim/kfac/test_kfac*.c. Point 46 of the second-order conformance list."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any, Callable, Dict, List, Tuple

import libdc.run
import libdc.torch
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from kfac_models import BARE, close, data, expected, factors, mlp, train
from libdc.optim import KFAC
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def test_factors_of_linear_layers() -> None:
    model = mlp()
    x, y = data()
    wanted = [expected(model[i], lambda: F.cross_entropy(model(x), y), lambda x: x, len(x)) for i in (0, 2, 4)]
    model.zero_grad()
    optimizer = KFAC(model, **BARE)
    assert optimizer.layers == ["0", "2", "4"]
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(x), y).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for i, (a, g) in zip((0, 2, 4), wanted):
        ours = factors(optimizer, model[i])
        close(ours[0], a)
        close(ours[1], g)
    a, g = wanted[0]  # and the step is what they say
    gradient = torch.cat([grads[0], grads[1][:, None]], 1).double()
    direction = torch.linalg.solve(torch.kron(g, a) + 1e-3 * torch.eye(len(a) * len(g)), gradient.flatten())
    direction = direction.view(len(g), -1)
    close((before[0] - model[0].weight.detach()) / 1e-3, direction[:, :-1], 1e-2)
    close((before[4] - model[3].weight.detach()) / 1e-3, grads[4], 1e-2)  # a norm: SGD's


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("make, shape", [
    (lambda: nn.Conv1d(3, 4, 3, padding="same"), (5, 3, 7)),
    (lambda: nn.Conv1d(3, 4, 4, padding="same", bias=False), (5, 3, 7)),
    (lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (4, 3, 7, 6)),
    (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), (4, 2, 5, 5)),
    (lambda: nn.Conv3d(2, 3, 2, stride=2, bias=False), (3, 2, 4, 4, 5)),
    (lambda: nn.Conv2d(2, 3, 1), (4, 2, 3, 3)),
])
def test_factors_of_convolutions(make: Callable[[], Any], shape: Tuple[int, ...]) -> None:
    torch.manual_seed(3)
    conv = make()
    model = nn.Sequential(conv, nn.Tanh())
    x = torch.randn(shape)

    def unfold(x: Tensor) -> Tensor:
        """Patches by a convolution with the identity."""
        k = math.prod(conv.kernel_size) * conv.in_channels
        eye = torch.eye(k, dtype=x.dtype).view(k, conv.in_channels, *conv.kernel_size)
        probe = type(conv)(conv.in_channels, k, conv.kernel_size, conv.stride, conv.padding, conv.dilation, bias=False,
                           padding_mode=conv.padding_mode).double()
        probe.weight.data = eye
        return probe(x).detach().flatten(2).transpose(1, 2).reshape(-1, k)

    a, g = expected(conv, lambda: model(x).square().sum(), unfold, 1)
    model.zero_grad()
    optimizer = KFAC(model, reduction="sum", **BARE)
    model(x).square().sum().backward()
    optimizer.step()
    ours = factors(optimizer, conv)
    close(ours[0], a)
    close(ours[1], g)


def test_copies_of_a_model_are_not_its_layers() -> None:
    """A teacher, say, or an averaged model."""
    wanted = []
    for copied in (False, True):
        model = mlp()
        x, y = data()
        optimizer = KFAC(model, **BARE)
        if copied:
            averaged = torch.optim.swa_utils.AveragedModel(model)
            for other in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), averaged):
                F.cross_entropy(other(100 * x), y).backward()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        wanted.append([factor for i in (0, 2, 4) for factor in factors(optimizer, model[i])])
    assert all(torch.equal(a, b) for a, b in zip(*wanted))
    own = KFAC(other, **BARE)  # and a copy may have its own
    F.cross_entropy(other(x), y).backward()
    own.step()
    assert len(own.layers) == 3 and factors(own, other.module[0])[0].any()


def test_positions() -> None:
    """Tokens with a loss each, or one for all of them; averaged first, or not; and inputs without a batch."""
    torch.manual_seed(4)
    layer = nn.Linear(4, 3)
    x = torch.randn(5, 6, 4)
    for terms, approximation in (("positions", "expand"), ("samples", "expand"), ("samples", "reduce")):
        model = copy.deepcopy(layer)
        optimizer = KFAC(model, loss_terms=terms, approximation=approximation, **BARE)
        out = model(x)
        out.retain_grad()
        out.square().sum(-1).mean(None if terms == "positions" else (0, 1)).backward()
        optimizer.step()
        flat = torch.cat([x, torch.ones(5, 6, 1)], 2)
        g = out.grad * (30 if terms == "positions" else 5)
        vectors = (flat.mean(1), g.sum(1)) if approximation == "reduce" else (flat.flatten(0, 1), g.flatten(0, 1))
        ours = factors(optimizer, model)
        close(ours[0], vectors[0].T @ vectors[0] / len(vectors[0]))
        close(ours[1], vectors[1].T @ vectors[1] / (30 if terms == "positions" else 5))
    model = copy.deepcopy(layer)
    optimizer = KFAC(model, **BARE)
    model(x[0, 0]).square().sum().backward()
    optimizer.step()
    close(factors(optimizer, model)[0][:4, :4], torch.outer(x[0, 0], x[0, 0]))


def test_micro_batches_and_loss_scales() -> None:
    """Four micro-batches, an explicit loss scale, or a scaler: the same factors and weights."""
    results = []
    for way in range(3):
        model = mlp()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if way == 2 else None
        optimizer = KFAC(model, lr=0.01, damping=0.1, grad_scaler=scaler)
        optimizer.loss_scale = 0.25 if way == 1 else 1.0
        if scaler is None:
            train(model, optimizer, micro=4 if way == 1 else 1)
        for step in range(3 if scaler is not None else 0):
            x, y = data(seed=step)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other):
            close(ours, theirs, 1e-4)


def test_overflow() -> None:
    """An infinity or NaN is an error; with a scaler, which skips the step, the batch is left out."""
    model = mlp()
    optimizer = KFAC(model)
    x, y = data()
    x[3, 2] = math.inf
    with pytest.raises(libdc.Error, match="NaN or an infinity"):
        F.cross_entropy(model(x), y).backward()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = KFAC(model, grad_scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    model.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


class Shared(nn.Module):
    """One layer used twice, two modules with one weight, a weight that an embedding has too, and an in-place output."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.one, self.two = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
        self.two.weight = self.one.weight
        self.emb = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
        self.relu = nn.ReLU(inplace=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.relu(self.twice(self.emb(ids)))
        x = self.twice(x)
        return self.head(x).sum() + self.one(x).square().sum() + self.two(x + 1).square().sum()


def test_weights_used_twice() -> None:
    """Gradients of both uses are summed over, as the weight's are; and each step counts its own uses."""
    torch.manual_seed(5)
    model = Shared()
    optimizer = KFAC(model, reduction="sum", decay=0.0, **BARE)
    assert optimizer.layers == ["twice", "one"]
    seen: Dict[str, List[Tuple[Tensor, Tensor]]] = {"twice": [], "one": []}
    for module, name in ((model.twice, "twice"), (model.one, "one"), (model.two, "one")):
        def hook(module: nn.Module, args: Tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
            x = args[0].detach().clone()
            output.register_hook(lambda g: seen[name].append((x, g.clone())))
        module.register_forward_hook(hook)
    for step in range(2):
        model(torch.arange(5) + step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, pairs in seen.items():
            assert len(pairs) == 2
            x, g = (torch.cat(tensors) for tensors in zip(*pairs))
            x = torch.cat([x, torch.ones(10, 1)], 1) if name == "twice" else x
            ours = factors(optimizer, getattr(model, name))
            close(ours[0], x.T @ x / 10, 1e-4)
            close(ours[1], g.T @ g / 5, 1e-4)
            pairs.clear()


def test_each_backward_counts_the_uses_that_it_comes_to() -> None:
    """Other forwards whose outputs are alive are not of it."""
    torch.manual_seed(7)
    x, y, layer = torch.randn(6, 4), torch.randn(6, 4), nn.Linear(4, 3)

    def loss_of(x: Tensor) -> Tensor:
        return layer(x).square().mean(0).sum()

    def in_turn() -> None:
        loss_of(x).backward()
        loss_of(y).backward()

    def interleaved() -> None:
        first, second = loss_of(x), loss_of(y)
        second.backward()
        first.backward()

    def alone() -> None:
        loss_of(x).backward()

    def beside_another() -> None:
        kept = layer(y), layer(y)
        loss_of(x).backward()
        assert len(kept) == 2

    def twice() -> None:
        (loss_of(x) + loss_of(y)).backward()

    def twice_again() -> None:
        """The graph stays, and half of it was reached before."""
        first, second = loss_of(x), loss_of(y)
        first.backward(retain_graph=True)
        (first + second).backward()

    def once_and_twice() -> None:
        alone()
        twice()

    found = {}
    for run in (in_turn, interleaved, alone, beside_another, twice, twice_again, once_and_twice):
        optimizer = KFAC(layer, decay=0.0, **{**BARE, "lr": 0.0})
        run()
        optimizer.step()
        found[run] = factors(optimizer, layer)[1]
    for run, same in ((interleaved, in_turn), (beside_another, alone), (twice_again, once_and_twice)):
        close(found[run], found[same], 1e-5)
    assert not torch.allclose(found[twice], found[in_turn])


@pytest.mark.parametrize("outside", [False, True])
def test_several_uses_of_which_one_is_in_a_reentrant_checkpoint_are_refused(outside: bool) -> None:
    """A backward there does not know how many there are. Without the mode they count, and one use is right."""
    model = nn.Linear(3, 3)

    def factor(*uses: bool, reentrant: bool) -> Tensor:
        """uses: whether each is checkpointed."""
        optimizer = KFAC(model, decay=0.0, **{**BARE, "lr": 0.0})
        x = torch.linspace(-1, 1, 15).view(5, 3).requires_grad_()
        for checkpointed in uses:
            x = torch.tanh(checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x))
        x.square().mean(0).sum().backward()
        optimizer.step()
        return factors(optimizer, model)[1]

    close(factor(True, reentrant=True), factor(False, reentrant=True))
    close(factor(True, not outside, reentrant=False), factor(False, False, reentrant=False))
    with pytest.raises(RuntimeError, match="KFAC: one backward comes to several uses of .*take use_reentrant=False"):
        factor(True, not outside, reentrant=True)


def test_a_kept_loss_keeps_no_inputs() -> None:
    """After the step. A backward that comes again is an error, and one that comes late is none."""
    layer = nn.Linear(3, 2)
    optimizer, kept, inputs = KFAC(layer, **BARE), [], []
    late = layer(torch.ones(4, 3)).square().mean()
    for _ in range(3):
        x = torch.randn(4, 3)
        kept.append(layer(x).square().mean())
        kept[-1].backward(retain_graph=len(kept) == 1)
        inputs.append(weakref.ref(x))
        optimizer.step()
        del x
    assert [x() is None for x in inputs] == [False, True, True]  # autograd keeps the first
    late.backward()
    with pytest.raises(RuntimeError, match="KFAC: a backward comes again to a forward of"):
        kept[0].backward()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("first", ["alone", "without"])
def test_a_model_with_replicas_is_refused(first: str, given: bool) -> None:
    """Each replica would have curvatures of its own batches, and so weights of its own. first: a part of the model
    that is sharded without a mesh comes before."""
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(4)]

    def rank(comm: libdc.Comm) -> None:
        model = models[comm.rank]
        if first == "without":
            libdc.torch.shard(model[0], 3, comm=comm.dup())
        libdc.torch.shard(model[1] if first == "without" else model, 3, comm=comm, mesh=(2, 2))
        with pytest.raises(ValueError, match=r"KFAC: the model is sharded with mesh = \(2, 2\)"):
            KFAC(model, comm=comm if given else None)

    libdc.run.threads(4, rank, timeout=60)


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize("change", ["relu", "residual"])
def test_views_that_are_changed_in_place(fisher: str, change: str) -> None:
    """A Linear's output for inputs of three dimensions is a view of a product of two. A change of it in place takes the
    view's node, and the hook on it, out of the graph."""
    found = []
    for in_place in (False, True):
        torch.manual_seed(8)
        first, second, x = nn.Linear(4, 4), nn.Linear(4, 3), torch.randn(5, 7, 4)
        model = nn.ModuleList([first, second])
        optimizer = KFAC(model, fisher=fisher, **BARE)
        hidden = first(x)
        assert hidden._is_view() or torch.__version__ >= "2.15"
        if change == "relu":
            hidden = hidden.relu_() if in_place else hidden.relu()
        elif in_place:
            hidden += x
        else:
            hidden = hidden + x
        loss = second(hidden).square().mean(0).sum()
        if fisher == "sampled":
            optimizer.accumulate(loss, retain_graph=True)
        loss.backward()
        optimizer.step()
        found.append([factor for layer in (first, second) for factor in factors(optimizer, layer)])
    assert all(factor.any() for factor in found[1])
    for ours, theirs in zip(*found):
        close(ours, theirs)


def test_other_hooks_that_return_another_output() -> None:
    """They may have been there before: the factors are the layer's own all the same."""
    found: List[Any] = []
    torch.manual_seed(9)
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    for before in (False, True):
        model = copy.deepcopy(layer)

        def triple(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return 3 * output

        if before:
            model.register_forward_hook(triple)
        optimizer = KFAC(model, **BARE)
        if not before:
            model.register_forward_hook(triple)
        model(x).square().mean(0).sum().backward()
        optimizer.step()
        found.append(factors(optimizer, model)[1])
    close(found[0], found[1])
