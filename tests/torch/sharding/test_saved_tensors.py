"""A backward takes the values that autograd saved in a sharded model's forward."""

from __future__ import annotations

from typing import Any

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from models import Plain, bits, make
from sharded import grads, one_thread  # noqa: F401


class Changed(nn.Module):
    """Changes what a backward needs, while `changes`."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.changes = make(Plain), True

    def forward(self, x: torch.Tensor, out: bool) -> torch.Tensor:
        hidden = torch.sigmoid(self.net.layers[0](x))
        used = hidden.square() if out else self.net.layers[1](hidden)
        if self.changes:
            hidden.add_(1)
        return used.sum()


@pytest.mark.parametrize("out", [True, False], ids=["an output", "an input"])
def test_changing_what_a_backward_needs(out: bool) -> None:
    """PyTorch compares versions of saved tensors, unless hooks save them."""

    def rank(comm: Any, stage: int) -> Any:
        x, model = torch.ones(2, 16), Changed()
        dct.shard(model, stage, comm=comm)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x, out).backward()
        assert dct.stats(model).gathered_bytes == 0 or stage < 3
        model.zero_grad()
        model.changes = False
        model(x, out).backward()
        return bits({name: grad for name, grad in grads(model).items() if grad is not None})

    expected = libdc.run.threads(1, rank, 0, timeout=60)
    for stage in (1, 3):
        assert libdc.run.threads(1, rank, stage, timeout=60) == expected
