"""The layer under torch.autocast, behind modules that give it autocast's type and in front of their losses."""

from __future__ import annotations

import copy
from typing import List

import pytest
import torch
from libdc.torch import TransformerLayer
from libdc.transformer import LayerConfig
from torch import Tensor, nn


def gradients(model: nn.Module, x: Tensor, mask: Tensor) -> List[Tensor]:
    out = model[1](model[0](x), mask)
    out.float().square().mean().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(dtype: torch.dtype, compiled: bool) -> None:
    """As a layer whose weights have that type, but for the gradients, which have the parameters'."""
    torch.manual_seed(0)
    config = LayerConfig(16, 2, attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0)
    model = nn.Sequential(nn.Linear(16, 16), TransformerLayer(config))
    cast = copy.deepcopy(model).to(dtype)
    x, mask = torch.randn(2, 5, 16), torch.zeros(2, 1, 1, 5, dtype=torch.float16)
    call = torch.compile(gradients, backend="eager") if compiled else gradients
    with torch.autocast("cpu", dtype):
        given = call(model, x, mask)
    want = gradients(cast, x.to(dtype), mask.float())
    assert given[0].dtype is dtype and all(grad.dtype is torch.float32 for grad in given[1:])
    for one, other in zip(given, want):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0)


def test_what_autocast_leaves_alone() -> None:
    layer = TransformerLayer(LayerConfig(16, 2))
    x = torch.randn(1, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert layer(x).dtype is torch.float32
        with pytest.raises(TypeError, match="hidden_states are torch.float64"):
            layer(x.double())
