r"""Trains, on two ranks and by DeepCompile on libdc, a model that DeepSpeed's own passes cannot: a convolution,
BatchNorm, two parameters that share one gradient, and frozen parameters. Its weights are those of a plain model that
sees the batches of both ranks.

    PYTHONPATH=build/deepspeed/0.19.8:build/deepspeed/packages DS_ACCELERATOR=cpu \
    .venv/bin/python -m libdc.run -n 2 -m libdc.torch.deepspeed tests/deepspeed/gradients.py STAGE:BACKEND…"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import deepspeed
import deepspeed.comm as dist
from launch import leave

STEPS, RATE = 3, 0.1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)
        self.frozen = nn.Linear(30, 16).requires_grad_(False)
        self.one, self.other = nn.Linear(16, 7, bias=False), nn.Linear(16, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(self.norm(self.convolution(x)).tanh().flatten(1)).tanh()
        return F.linear(y, self.one.weight + self.other.weight).square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def plain(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(model(batch(step, rank)) for rank in range(dist.get_world_size())) / dist.get_world_size()).backward()
        optimizer.step()
    return model


def train(model: nn.Module, stage: int, backend: str) -> Any:
    config = {"train_micro_batch_size_per_gpu": 4, "compile": {"deepcompile": True},
              "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.compile(backend=backend)
    for step in range(STEPS):
        engine.backward(engine(batch(step, dist.get_rank())))
        with torch.no_grad():
            engine.step()
    return engine


def check(stage: int, backend: str) -> None:
    torch.manual_seed(3)
    model = Model()
    expected = plain(copy.deepcopy(model)).state_dict()
    engine = train(model, stage, backend)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        for name, value in model.named_parameters():
            torch.testing.assert_close(value.data, expected[name], msg=lambda text: f"stage {stage}, {name}: {text}")
    engine.destroy()
    torch._dynamo.reset()


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for run in sys.argv[1:]:
        stage, backend = run.split(":")
        check(int(stage), backend)
        if dist.get_rank() == 0:
            print(f"{run} ok", flush=True)
    leave()


if __name__ == "__main__":
    main()
