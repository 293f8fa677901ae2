"""The needs of capturing a sharded model's step into a CUDA graph, as far as no card is needed. The capture itself
is in test_card.py, and in tests/cudasim/adapter/test_adapter.c."""

from __future__ import annotations

from typing import Any

import libdc.torch as dct
import pytest
import torch
from libdc.torch import devices
from libdc.torch.sharding import clip_grad
from libdc.torch.sharding.model import roots_of
from models import data, make, trainable
from sharded import on, one_thread  # noqa: F401


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_launches_changed_are_seen(stage: int) -> None:
    """Launches leave no trace on the host, so after a captured step each forward gathers anew."""
    def rank(comm: Any) -> None:
        model = dct.shard(make(), stage, comm=comm)
        captured = roots_of(model)[0]
        with torch.no_grad():
            before = model(*data(0, 0)).item()
            captured.group.captured = True
            for param in trainable(model):
                param.data.mul_(0.5)  # behind the version's back, as a launch does
            after = model(*data(0, 0)).item()
            whole = make()
            for param in trainable(whole):
                param.mul_(0.5)
            assert after == whole(*data(0, 0)).item() != before

    on(2, rank)


def test_a_step_in_a_capture_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(comm: Any) -> None:
        model = dct.shard(make(), 3, comm=comm)
        optimizer = torch.optim.SGD(trainable(model), lr=0.1)
        for captured in (False, True):
            monkeypatch.setattr(devices, "captures", lambda where: captured)
            model(*data(0, 0)).backward()
            optimizer.step()
            assert roots_of(model)[0].group.captured is captured

    on(1, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_clipping_by_a_factor_that_the_host_does_not_know(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 7), (33,), ())]
    factor = torch.tensor(0.123456789, dtype=torch.float64)
    clipped = [grad.clone() for grad in grads]
    clip_grad.multiply_on_device(clipped, factor.float())
    for before, after in zip(grads, clipped):
        assert torch.equal(after, (before.float() * float(factor)).to(dtype))
    if dtype == torch.float32:
        clip_grad.multiply(grads, factor)
        assert all(torch.equal(a, b) for a, b in zip(grads, clipped))
