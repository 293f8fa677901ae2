"""Small models with everything that is awkward to shard, their data, and a training loop that tells its bits."""

from __future__ import annotations

import copy
import hashlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import libdc.torch as dct
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Odd(nn.Module):
    """Tied and frozen weights, a scalar, parameters smaller than the world, lengths that no number of ranks divides."""

    def __init__(self, vocab: int = 37, width: int = 13, layers: int = 2, checkpointed: bool = False,
                 broken: bool = False) -> None:
        super().__init__()
        self.checkpointed, self.broken = checkpointed, broken
        self.emb = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.emb(x)
        for k, block in enumerate(self.blocks):
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
            if self.broken and k == 0:
                torch._dynamo.graph_break()
        h = h + self.frozen(h) * self.scale  # LayerNorm would cancel the factor of a product alone
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Plain(nn.Module):
    """Untied, without biases: every weight is needed in forward and again in backward."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


_made: Dict[Any, nn.Module] = {}


def make(kind: Callable[..., nn.Module] = Odd, **arguments: Any) -> nn.Module:
    """A model with the same weights every time, also from threads, which share PyTorch's generator."""
    key = kind, tuple(sorted(arguments.items()))
    if key not in _made:
        generator = torch.Generator().manual_seed(5)
        model = kind(**arguments)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        _made[key] = model
    return copy.deepcopy(_made[key])


def data(step: int, rank: int, batch: int = 3, length: int = 5, vocab: int = 37) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randint(0, vocab, (2, batch, length), generator=generator)
    return x.clone(), y.clone()


def trainable(model: nn.Module) -> List[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(model: nn.Module, **arguments: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), lr=1e-2, **arguments)


class Run(NamedTuple):
    losses: List[float]
    weights: str  # their bits
    stats: Any


def bits(state: Dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].to_local() if hasattr(state[name], "to_local") else state[name].detach()
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(comm: Any, stage: int, steps: int = 20, accumulate: int = 1, clip: Optional[float] = None,
          backend: Optional[str] = None, model: Optional[Dict[str, Any]] = None, quiet: bool = False,
          **options: Any) -> Run:
    """Trains this rank's part of the odd model. quiet: all but the last micro-batch under no_sync()."""
    net = make(**(model or {}))
    dct.shard(net, stage, comm=comm, **options)
    optimizer = adamw(net)
    call = net if backend is None else torch.compile(net, backend=backend)
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            x, y = data(step * accumulate + micro, comm.rank)
            if quiet and micro + 1 < accumulate:
                with dct.no_sync(net):
                    loss = call(x, y) / accumulate
                    loss.backward()
            else:
                loss = call(x, y) / accumulate
                loss.backward()
            losses.append(loss.item())
        if clip is not None:
            losses.append(float(dct.clip_grad_norm_(net, clip)))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, bits(dct.full_state_dict(net)), dct.stats(net))


def reference(world: int, steps: int, accumulate: int = 1) -> Tuple[List[float], Dict[str, torch.Tensor]]:
    """Plain PyTorch on the batches of all ranks: losses, meaned over ranks, and the weights after."""
    net = make()
    optimizer = adamw(net)
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            total = sum(net(*data(step * accumulate + micro, rank)) for rank in range(world)) / world / accumulate
            total.backward()
            losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, net.state_dict()
