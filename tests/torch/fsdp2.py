"""Shared by the tests that are PyTorch's of FSDP2: a program on ranks beside one process with all batches."""

from __future__ import annotations

import copy
from typing import Any, Callable, List

import libdc.torch as dct
import torch
import torch.nn as nn
from sharded import on

_ITERATIONS = 3
Step = Callable[[nn.Module, int, int], torch.Tensor]  # of a rank in an iteration, with its backward: the loss


def random(*shape: int, at: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(hash(at) % 1000))


def train(model: nn.Module, step: Step, ranks: List[int]) -> List[torch.Tensor]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for iteration in range(_ITERATIONS):
        losses += [step(model, iteration, rank).detach() for rank in ranks]
        if len(ranks) > 1:
            for param in model.parameters():
                if param.grad is not None:
                    param.grad /= len(ranks)
        optimizer.step()
        optimizer.zero_grad(set_to_none=iteration % 2 == 0)
    return losses


def check(model: nn.Module, step: Step, **options: Any) -> None:
    for world in (1, 2, 3):
        alone = copy.deepcopy(model)
        losses = torch.stack(train(alone, step, list(range(world))))
        expected = alone.state_dict()
        for stage in (0, 1, 3):
            models = [copy.deepcopy(model) for _ in range(world)]

            def rank(comm: Any) -> Any:
                mine = dct.shard(models[comm.rank], stage, comm=comm, group_size=100, **options)
                return train(mine, step, [comm.rank]), dct.full_state_dict(mine)

            ranks = on(world, rank)
            found = torch.stack([loss for row in zip(*(losses for losses, _ in ranks)) for loss in row])
            torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
            for name, value in ranks[-1][1].items():
                torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss
