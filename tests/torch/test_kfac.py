"""libdc.optim.KFAC: what its hooks give the library is the layers' inputs and output gradients, whatever the model does
with them; K-FAC's own mathematics is tests/optim/test_kfac*.c. Point 46 of the second-order conformance list."""

from __future__ import annotations

import copy
import math
from typing import Any, Callable, Dict, List, Tuple

import libdc
import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from libdc.optim import KFAC, sampled_cross_entropy, sampled_mse_loss
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BARE: Dict[str, Any] = {"momentum": 0.0, "kl_clip": None, "refresh_frequency": 1}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False))


def data(n: int = 12, seed: int = 1) -> Tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)


def factors(optimizer: KFAC, module: Any) -> Tuple[Tensor, Tensor]:
    state = optimizer.state[module._parameters["weight"]]
    return state["factor_a"].clone(), state["factor_g"].clone()


def expected(module: nn.Module, forward: Callable[[], Tensor], inputs: Callable[[Tensor], Tensor],
             scale: float) -> Tuple[Tensor, Tensor]:
    """(A, G) of one layer from its input and output gradient in float64: rows of vectors, and over how many samples."""
    seen: List[Tensor] = []

    def hook(module: nn.Module, args: Tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(args[0].detach())
        output.register_hook(seen.append)

    handle = module.register_forward_hook(hook)
    forward().backward()
    handle.remove()
    x, g = seen[0].double(), seen[1].double() * scale
    n = x.shape[0]
    x, g = inputs(x), (g.flatten(2).transpose(1, 2) if g.dim() > 2 and isinstance(module, nn.modules.conv._ConvNd)
                       else g).reshape(-1, g.shape[1] if isinstance(module, nn.modules.conv._ConvNd) else g.shape[-1])
    if module._parameters.get("bias") is not None:
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    return x.T @ x / len(x), g.T @ g / n


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def train(model: nn.Module, optimizer: KFAC, steps: int = 3, micro: int = 1) -> None:
    for step in range(steps):
        x, y = data(seed=step)
        for part in range(micro):
            n = len(x) // micro
            piece = slice(part * n, (part + 1) * n)
            (F.cross_entropy(model(x[piece]), y[piece]) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()


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
    """What is not finite is an error; with a scaler, which skips the step, the batch is left out."""
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


def test_bad_arguments() -> None:
    for options in ({"fisher": "true"}, {"loss_terms": "tokens"}, {"approximation": "both"}, {"reduction": "none"},
                    {"inverse": "lu"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            KFAC(mlp(), **options)  # type: ignore[arg-type]
    for numbers in ({"damping": -1.0}, {"kl_clip": -2.0}, {"factor_frequency": -1}, {"decay": 1.0}):
        with pytest.raises(libdc.Error, match=next(iter(numbers))):
            KFAC(mlp(), **numbers)  # type: ignore[arg-type]
    model = mlp()
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
