"""Derivatives that the module does not have: an error, or none, but never zeros."""

from __future__ import annotations

from typing import Any, Callable

import libdc.torch as dct
import pytest
import torch
from libdc.transformer import LayerConfig
from torch.autograd import forward_ad

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def with_dual_input(layer: Any) -> Any:
    with forward_ad.dual_level():
        return layer(forward_ad.make_dual(X, torch.ones_like(X)))


def with_dual_weight(layer: Any) -> Any:
    weight = layer.attn_ow.detach()
    with forward_ad.dual_level():
        return torch.func.functional_call(layer, {"attn_ow": forward_ad.make_dual(weight, weight)}, (X,))


@pytest.mark.parametrize("call", [
    lambda layer: torch.func.jvp(layer, (X,), (X,)), lambda layer: torch.func.jacfwd(layer)(X),
    with_dual_input, with_dual_weight, lambda layer: with_dual_input(torch.compile(layer, backend="aot_eager"))])
@pytest.mark.parametrize("trained", [True, False])
def test_forward_mode_is_refused(call: Callable[[Any], Any], trained: bool) -> None:
    layer = dct.TransformerLayer(LayerConfig(16, 2)).requires_grad_(trained)
    with pytest.raises(RuntimeError, match="TransformerLayer has no forward-mode derivative"):
        call(layer)


def test_inputs_without_tangents_are_computed() -> None:
    torch._dynamo.reset()  # PyTorch 2.15 still skips a function whose call has raised in another test
    layer = dct.TransformerLayer(LayerConfig(16, 2))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    output = layer(X)
    assert torch.equal(compiled(X), output)
    with forward_ad.dual_level():
        assert torch.equal(layer(X), output)


def test_a_mask_gets_no_gradient() -> None:
    layer, mask = dct.TransformerLayer(LayerConfig(16, 2)), torch.zeros(2, 5, requires_grad=True)
    layer(X, mask).sum().backward()
    assert mask.grad is None and layer.attn_ow.grad is not None
