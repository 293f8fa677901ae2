"""TransformerLayer on batches without samples or tokens, beside PyTorch's own layer."""

from __future__ import annotations

from typing import Tuple

import pytest
import torch
from libdc.torch import TransformerLayer
from libdc.transformer import LayerConfig
from torch import nn


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 9), (2, 0), (0, 0)])
def test_02_without_tokens(shape: Tuple[int, int], training: bool) -> None:
    """As PyTorch's layer: an output without elements, and gradients of zeros."""
    ours = TransformerLayer(LayerConfig(64, 4, 96, attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1)).train(training)
    theirs = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).train(training)
    for layer, more in ((ours, (torch.zeros(shape),)), (ours, ()), (theirs, ())):
        x = torch.zeros(*shape, 64, requires_grad=True)
        y = layer(x, *more)
        assert y.shape == (*shape, 64)
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
    packed = ours(torch.zeros(0, 64, requires_grad=True), cu_seqlens=torch.tensor([0, 0, 0]))
    packed.sum().backward()
    assert packed.shape == (0, 64)
