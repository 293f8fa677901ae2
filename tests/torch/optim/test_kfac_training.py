"""libdc.optim.KFAC in training: what it skips, samples, saves and refuses, under autocast, checkpointing and the
compiler, and on two ranks. Point 46 of the second-order conformance list."""

from __future__ import annotations

import copy
import math
import pickle
import re
import warnings
from typing import List

import libdc
import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn.functional as F
from kfac_models import BARE, close, data, factors, mlp, train
from libdc.optim import KFAC, sampled_cross_entropy, sampled_mse_loss
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def test_skipped_frozen_and_evaluated() -> None:
    model = mlp()
    model[2].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer = KFAC(model, skip=[r"^4$"], **BARE)
    assert optimizer.layers == ["0", "2"]
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert "factor_a" in optimizer.state[model[0].weight]
    assert model[2].weight not in optimizer.state and "factor_a" not in optimizer.state[model[4].weight]
    old = factors(optimizer, model[0])
    model.eval()
    F.cross_entropy(model(x + 1), y).backward()
    with torch.no_grad():
        model.train()
        model(x + 2)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(old, factors(optimizer, model[0])))
    assert KFAC(mlp(), skip=["Linear"]).layers == []


def test_patterns_that_are_none_are_refused() -> None:
    """The letters of one string would skip nearly every layer."""
    with pytest.raises(TypeError, match=r"KFAC: skip = 'head', must be a list of patterns: \['head'\]"):
        KFAC(mlp(), skip="head")
    with pytest.raises(ValueError, match=r"KFAC: skip = \['\['\] has a pattern that re.compile\(\) refuses"):
        KFAC(mlp(), skip=["["])


def test_no_graph_is_kept() -> None:
    """Nothing of a batch outlives its backward, nor a forward that none follows."""
    import gc
    import weakref

    model = mlp()
    optimizer = KFAC(model)
    for backward in (True, False):
        x, y = data()
        x = x + 0  # of its own
        gone = weakref.ref(x)
        loss = F.cross_entropy(model(x), y)
        if backward:
            loss.backward()
        del x, loss
        gc.collect()
        assert gone() is None
    assert isinstance(optimizer, KFAC)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    F.cross_entropy(model(data()[0]), data()[1]).backward()  # hooks without an optimizer do nothing


def test_sampled_labels() -> None:
    """One forward serves both: the factors get the sampled loss's gradients, the parameters the true one's."""
    model = mlp()
    optimizer = KFAC(model, fisher="sampled", **BARE)
    x, y = data()
    logits = model(x)
    generator = torch.Generator().manual_seed(6)
    loss = sampled_cross_entropy(logits, generator)
    head = torch.autograd.grad(loss, logits, retain_graph=True)[0] * len(x)
    optimizer.accumulate(loss, retain_graph=True)
    assert all(p.grad is None for p in model.parameters())
    F.cross_entropy(logits, y).backward()
    optimizer.step()
    close(factors(optimizer, model[4])[1], head.T @ head / len(x))
    with pytest.raises(RuntimeError, match="sampled"):
        KFAC(mlp()).accumulate(loss)


def test_what_is_sampled() -> None:
    """Over many draws, the covariance of the gradients is the Hessian by the outputs, since both are exponential
    families with natural parameters."""
    torch.manual_seed(7)
    logits = torch.randn(1, 3).expand(200000, 3).clone().requires_grad_()
    g = torch.autograd.grad(sampled_cross_entropy(logits), logits)[0] * len(logits)
    p = logits[0].detach().softmax(-1)
    close(g.T @ g / len(g), torch.diag(p) - torch.outer(p, p), 1e-2)
    output = torch.zeros(200000, 2, requires_grad=True)
    g = torch.autograd.grad(sampled_mse_loss(output), output)[0] * len(output)
    close(g.T @ g / len(g), torch.eye(2), 2e-2)  # of (x^2 + y^2) / 2: 2 / 2


def test_checkpointing() -> None:
    results = []
    for kind in (None, False, True):
        model = mlp()
        optimizer = KFAC(model, lr=0.01, damping=0.1)
        for step in range(3):
            x, y = data(seed=step)
            x.requires_grad_()
            out = model(x) if kind is None else model[4](checkpoint(model[:4], x, use_reentrant=kind))
            F.cross_entropy(out, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other):
            close(ours, theirs, 1e-5)


def test_autocast() -> None:
    model = mlp()
    optimizer = KFAC(model, **BARE)
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)
    loss.backward()
    optimizer.step()
    a = factors(optimizer, model[0])[0]
    close(a[:6, :6], x.T @ x / len(x))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_compiled() -> None:
    """Hooks break the graph at each layer; what they see is the same."""
    results = []
    for compiled in (False, True):
        model = mlp()
        optimizer = KFAC(model, lr=0.01, damping=0.1)
        train(torch.compile(model, backend="eager") if compiled else model, optimizer)
        results.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


def test_saved_states() -> None:
    one, two = mlp(), mlp()
    a = KFAC(one, lr=0.01, factor_frequency=2, refresh_frequency=3)
    train(one, a, 4)
    b = KFAC(two, lr=0.01, factor_frequency=2, refresh_frequency=3)
    two.load_state_dict(one.state_dict())
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    train(one, a, 5)
    train(two, b, 5)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters()))
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(a)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(a)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("momentum, other", [(0.9, 0.0), (0.0, 0.9)])
def test_a_state_brings_its_momentum(momentum: float, other: float, ranks: int) -> None:
    """As with torch.optim, into an optimizer without a state. One with a state keeps what it has."""
    models = [[mlp() for _ in range(3)] for _ in range(ranks)]

    def rank(comm: libdc.Comm) -> None:
        one, two, three = models[comm.rank]
        a, b, c = (KFAC(model, lr=0.01, momentum=m, comm=comm)
                   for model, m in ((one, momentum), (two, other), (three, other)))
        train(one, a)
        two.load_state_dict(one.state_dict())
        b.load_state_dict(copy.deepcopy(a.state_dict()))
        assert b.param_groups[0]["momentum"] == momentum
        for _ in range(2):
            train(one, a)
            train(two, b)
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters()))
        train(three, c)
        with pytest.raises(ValueError, match="momentum_buffer"):
            c.load_state_dict(a.state_dict())

    libdc.run.threads(ranks, rank, timeout=60)


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_a_loaded_state_has_no_part_of_a_step_that_was_left(fisher: str) -> None:
    results = []
    for left in (False, True):
        model = mlp()
        optimizer = KFAC(model, lr=0.01, refresh_frequency=1, fisher=fisher)
        x, y = data()
        for step in range(3):
            if step == 2:
                state = copy.deepcopy(optimizer.state_dict())
                if left:
                    loss = F.cross_entropy(model(100 * x), y)
                    if fisher == "sampled":
                        optimizer.accumulate(loss)
                        F.cross_entropy(model(100 * x), y)
                    else:
                        loss.backward()
                    optimizer.zero_grad()
                optimizer.load_state_dict(state)
            if fisher == "sampled":
                optimizer.accumulate(F.cross_entropy(model(x), y))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results))


def test_bad_arguments() -> None:
    for options in ({"fisher": "true"}, {"loss_terms": "tokens"}, {"approximation": "both"}, {"reduction": "none"},
                    {"inverse": "lu"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            KFAC(mlp(), **options)  # type: ignore[arg-type]
    for numbers in ({"damping": -1.0}, {"kl_clip": -2.0}, {"factor_frequency": -1}, {"decay": 1.0},
                    {"damping": 0.0}, {"kl_clip": -1.0}, {"decay": -1.0}, {"momentum": -1.0},
                    {"tolerated_failures": -1}, {"refresh_frequency": 0}):
        with pytest.raises(ValueError, match=next(iter(numbers))):
            KFAC(mlp(), **numbers)  # type: ignore[arg-type]
    model = mlp()
    with pytest.raises(TypeError, match="model is a generator, must be a torch.nn.Module"):
        KFAC(model.parameters())  # type: ignore[arg-type]
    optimizer = KFAC(model)
    x = torch.randn(4, 6)
    loss = model(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="in place"):
        loss.backward()
    assert isinstance(optimizer, KFAC)


def two_ranks(stage: int, share: bool) -> List[Tensor]:
    models = [mlp() for _ in range(2)]  # one generator serves all threads

    def rank(comm: libdc.Comm) -> List[Tensor]:
        model = models[comm.rank]
        if stage >= 0:
            dct.shard(model, stage, comm=comm)
        optimizer = KFAC(model, lr=0.01, damping=0.1, refresh_frequency=2, comm=comm if stage < 0 else None)
        for step in range(4):
            x, y = data(seed=step)
            half = slice(comm.rank * 6, comm.rank * 6 + 6) if share else slice(0, 12)
            F.cross_entropy(model(x[half]), y[half]).backward()
            if stage < 0:
                for p in model.parameters():  # as DistributedDataParallel does
                    comm.all_reduce(p.grad)
                    p.grad /= comm.size
            optimizer.step()
            optimizer.zero_grad()
        if stage < 0:
            return [p.detach().clone() for p in model.parameters()]
        return list(dct.full_state_dict(model).values())

    return libdc.run.threads(2, rank)[1]


@pytest.mark.parametrize("stage", [-1, 0, 1, 2, 3])
def test_two_ranks(stage: int) -> None:
    """Sharded at every stage, or whole with averaged gradients: one rank's bits where each has the whole batch, and but
    for rounding where it has its share."""
    model = mlp()
    optimizer = KFAC(model, lr=0.01, damping=0.1, refresh_frequency=2)
    train(model, optimizer, 4)
    wanted = [p.detach() for p in model.parameters()]
    for ours, theirs in zip(two_ranks(stage, False), wanted):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(two_ranks(stage, True), wanted):
        close(ours, theirs, 1e-4)


def test_factors_of_layers_of_which_the_bias_alone_is_trained_are_saved() -> None:
    """They are the weight's state, which is frozen and has no gradient."""
    models = [mlp(), mlp()]
    for model in models:
        for i in (0, 2):
            model[i].weight.requires_grad_(False)
    one, two = models
    options = dict(lr=0.01, factor_frequency=2, refresh_frequency=3)
    a, b = KFAC(one, **options), KFAC(two, **options)
    train(one, a, 3)
    assert a.state[one[0].weight]["factor_a"].any()
    two.load_state_dict(one.state_dict())
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    train(one, a, 4)
    train(two, b, 4)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters()))


def test_a_state_that_is_loaded_into_its_own_optimizer_keeps_frozen_weights_factors() -> None:
    """docs/kfac.md names load_state_dict(state_dict()) as the way to drop batches, and nothing else."""
    results = []
    for loads in (False, True):
        model = mlp()
        model[0].weight.requires_grad_(False)
        optimizer = KFAC(model, lr=0.01, factor_frequency=3, refresh_frequency=3)
        train(model, optimizer, 1)
        if loads:
            optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, 2)  # steps 2 and 3, which update no factors
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results))


def test_a_loaded_state_has_no_batch_of_a_step_that_a_scaler_left_out() -> None:
    results = []
    for overflow in (False, True):
        model = mlp()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = KFAC(model, lr=0.01, refresh_frequency=1, grad_scaler=scaler)
        x, y = data()
        for step in range(3):
            if step == 2:
                state = copy.deepcopy(optimizer.state_dict())
                if overflow:
                    scaler.scale(F.cross_entropy(model(100 * x), y)).backward()
                    model[0].weight.grad[0, 0] = math.inf
                    scaler.step(optimizer)  # left out; the library keeps the batch
                    scaler.update(1024.0)
                    optimizer.zero_grad()
                optimizer.load_state_dict(state)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results))


@pytest.mark.parametrize("fisher, why", [("empirical", "forwards of the module itself in training mode"),
                                         ("sampled", "accumulate\\(\\) gives them")])  # fmt: skip
def test_a_layer_without_batches_warns_once(fisher: str, why: str) -> None:
    """MultiheadAttention reads its out_proj's weight without a call of the module."""
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    optimizer, x = KFAC(model, skip=["linear"], fisher=fisher), torch.randn(2, 3, 4)
    assert optimizer.layers == ["self_attn.out_proj"]
    told = []
    for _ in range(2):
        model(x).square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told.append([str(warning.message) for warning in caught])
    assert len(told[0]) == 1 and not told[1]
    assert re.match(f"KFAC: self_attn.out_proj has had no batches .*{why}", told[0][0])
