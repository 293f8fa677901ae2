"""Sums of no_sync() when what follows is not the plain loop."""

from __future__ import annotations

from typing import Any, Callable, Dict

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from sharded import one_thread, same  # noqa: F401


class Raising(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ValueError("in a backward")


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))


def times_one_batch(count: int) -> Dict[str, torch.Tensor]:
    model = two_layers()
    model(torch.ones(1, 2)).sum().backward()
    return {name: count * p.grad for name, p in model.named_parameters()}  # type: ignore[operator]


def after_no_sync(stage: int, size: int, between: Callable[[Any], Any]) -> Dict[str, torch.Tensor]:
    """Gradients of a batch in no_sync() and one outside."""
    models = [two_layers() for _ in range(size)]

    def rank(comm: Any) -> Any:
        model = dct.shard(models[comm.rank], stage, comm=comm)
        with dct.no_sync(model):
            model(torch.ones(1, 2)).sum().backward()
        between(model)
        model(torch.ones(1, 2)).sum().backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        return {name: grad.full_tensor() if stage else grad.clone() for name, grad in found.items()}

    return libdc.run.threads(size, rank, timeout=60)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_that_raises_leaves_the_sums_of_no_sync(stage: int) -> None:
    def skip_a_batch(model: Any) -> None:
        with pytest.raises(ValueError, match="in a backward"):
            model[1](Raising.apply(model[0](torch.ones(1, 2)))).sum().backward()

    for size in (1, 2):
        assert same(after_no_sync(stage, size, skip_a_batch), times_one_batch(2))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_set_to_none_drop_the_sums_of_no_sync(stage: int) -> None:
    def set_to_none(model: Any) -> None:
        for param in model.parameters():
            param.grad = None

    def raise_and_zero(model: Any) -> None:
        with pytest.raises(ValueError, match="in a backward"):
            model[1](Raising.apply(model[0](torch.ones(1, 2)))).sum().backward()
        model.zero_grad()

    for drop in (set_to_none, raise_and_zero):
        assert same(after_no_sync(stage, 2, drop), times_one_batch(1))
