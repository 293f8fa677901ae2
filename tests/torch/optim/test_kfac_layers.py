"""Which modules libdc.optim.KFAC takes for layers. Point 46 of the second-order conformance list."""

from __future__ import annotations

import warnings
from typing import Any, Optional

import libdc
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from libdc.optim import KFAC
from torch import Tensor


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input)


class Standardized(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Any) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


class Plain(nn.Linear):
    """Only its first weights differ."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)


@pytest.mark.parametrize("stage", [None, 3])
def test_layers_with_a_forward_of_their_own_are_sgds(stage: Optional[int]) -> None:
    """Their factors were those of other inputs, or of other weights, without a word."""
    torch.manual_seed(3)
    model = nn.Sequential(Standardized(1, 4, 3), nn.Flatten(), Doubled(4, 4), Plain(4, 4), nn.Linear(4, 4))
    patched = model[4].forward
    model[4].forward = lambda x: patched(2 * x)
    start = [p.detach().clone() for p in model.parameters()]
    if stage is not None:
        dct.shard(model, stage, comm=libdc.Comm.single())
    with pytest.warns(UserWarning) as caught:
        optimizer = KFAC(model, lr=0.1, momentum=0.0)
    told = [str(warning.message) for warning in caught]
    assert [text.split(" with a forward of its own")[0] for text in told] == [
        "KFAC: 0 is a Standardized", "KFAC: 2 is a Doubled", "KFAC: 4 is a Linear"]
    assert optimizer.layers == ["3"]
    model(torch.randn(5, 1, 3, 3)).square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for i, (p, before, grad) in enumerate(zip(model.parameters(), start, grads)):
        assert torch.equal(p.view(before.shape), before - 0.1 * grad.view(before.shape)) == (i not in (4, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(model, skip=["Doubled", "Standardized", "^4$"])
