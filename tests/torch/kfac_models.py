"""Shared by the tests of libdc.optim.KFAC: a model, its data, and the factors it should have."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from libdc.optim import KFAC
from torch import Tensor

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
