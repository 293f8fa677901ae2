"""libdc.optim.KFAC(fisher="sampled") with a torch.amp.GradScaler: the scale is taken out of the factors, or the step
is refused. Point 46 of the second-order conformance list."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from kfac_models import BARE, close, data, factors, mlp
from libdc.optim import KFAC, sampled_cross_entropy
from torch import Tensor


def test_a_scaler_must_be_told() -> None:
    """Else its scale was in the factors, twice, without a word."""
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = KFAC(model, fisher="sampled", grad_scaler=scaler, **BARE)
    x, y = data()
    logits = model(x)
    loss = sampled_cross_entropy(logits, torch.Generator().manual_seed(6))
    head = torch.autograd.grad(loss, logits, retain_graph=True)[0] * len(x)
    for wrong in (loss, 2 * loss, loss / 1024):
        with pytest.raises(RuntimeError, match=r"KFAC.accumulate: .* give it grad_scaler.scale\(loss\) itself"):
            optimizer.accumulate(wrong, retain_graph=True)
    optimizer.accumulate(scaler.scale(loss), retain_graph=True)
    scaler.scale(F.cross_entropy(logits, y)).backward()
    scaler.step(optimizer)
    close(factors(optimizer, model[4])[1], head.T @ head / len(x))
    optimizer = KFAC(model, **BARE)
    scaler.update()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(RuntimeError, match="KFAC: a GradScaler makes the step, .* give it as grad_scaler="):
        scaler.step(optimizer)
    optimizer = KFAC(model, fisher="sampled", **BARE)
    for scale in (scaler.scale, lambda loss: loss):  # in the second turn all is right without grad_scaler
        logits = model(x)
        optimizer.accumulate(scale(sampled_cross_entropy(logits)), retain_graph=True)
        scaler.scale(F.cross_entropy(logits, y)).backward()
        if scale == scaler.scale:
            with pytest.raises(RuntimeError, match="KFAC: a GradScaler makes the step, .* give it as grad_scaler="):
                scaler.step(optimizer)
            scaler.update()
            optimizer = KFAC(model, fisher="sampled", **BARE)
    scaler.step(optimizer)


def test_a_scaler_must_be_told_after_unscale_too() -> None:
    """Then the step does not tell the scale, and a factor of the loss that is not loss_scale counts as one."""
    def factor(given: Callable[[torch.amp.GradScaler, Tensor], Tensor], loss_scale: float) -> Tensor:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = KFAC(model, fisher="sampled", **BARE)
        optimizer.loss_scale = loss_scale
        x, y = data()
        logits = model(x)
        loss = sampled_cross_entropy(logits, torch.Generator().manual_seed(6))
        optimizer.accumulate(given(scaler, loss), retain_graph=True)
        scaler.scale(F.cross_entropy(logits, y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        return factors(optimizer, model[4])[1]

    for scaled in (lambda scaler, loss: scaler.scale(loss), lambda scaler, loss: scaler.scale(loss) / 4,
                   lambda scaler, loss: 0.25 * scaler.scale(loss), lambda scaler, loss: scaler.get_scale() * loss):
        with pytest.raises(RuntimeError, match="KFAC: a GradScaler makes the step, .* give it as grad_scaler="):
            factor(scaled, 0.25)
    right = factor(lambda scaler, loss: loss, 1.0)
    close(factor(lambda scaler, loss: 0.25 * loss, 0.25), right)
    close(factor(lambda scaler, loss: loss / 4, 0.25), right)
