#!/usr/bin/env python3
"""Costs that grow with a PyTorch model: growth_torch.py ROW SIZE... prints one number a size. Microseconds of processor
time of one rank and one thread, the best of some."""
from __future__ import annotations

import os
import sys
import time
from typing import Callable, Dict

os.environ["OMP_NUM_THREADS"] = "1"
import torch  # noqa: E402
from torch import nn  # noqa: E402

import libdc.torch as dct  # noqa: E402

WIDTH = 32


def spent_us(work: Callable[[], object], times: int = 3) -> float:
    best = float("inf")
    for _ in range(times):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best * 1e6


def groups(count: int) -> float:
    """load_full_optimizer_state_dict with a parameter a group, without PyTorch's own load_state_dict(), which looks for
    each value's parameter in all groups."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(count)])
    dct.shard(model, stage=3)
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    state = dct.full_optimizer_state_dict(model, optimizer)
    setattr(optimizer, "load_state_dict", lambda packed: None)
    return spent_us(lambda: dct.load_full_optimizer_state_dict(model, optimizer, state), 2)


def models(count: int) -> float:
    """A hundred forwards of one model beside others."""
    all_models = [nn.Linear(4, 4) for _ in range(count)]
    for model in all_models:
        dct.shard(model, stage=3)
    x = torch.randn(2, 4)

    def forwards() -> None:
        with torch.no_grad():
            for _ in range(100):
                all_models[-1](x)

    return spent_us(forwards, 5)


def step_of(count: int, stage: int) -> float:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])
    if stage >= 0:
        dct.shard(model, stage=stage)
    return spent_by_step(model, 12_000)


def step_of_fsdp2(count: int) -> float:
    """PyTorch's own sharding of weights, a layer a group, over Gloo."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    if not distributed.is_initialized():
        alone = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
        distributed.init_process_group("gloo", **({} if "WORLD_SIZE" in os.environ else alone))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return spent_by_step(model, 3000)


def spent_by_step(model: nn.Sequential, layers: int) -> float:
    """The best of as many steps as have so many layers in all: ranks must take as many."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return spent_us(step, layers // len(model))


ROWS: Dict[str, Callable[[int], float]] = {
    "groups": groups, "models": models, "step_plain": lambda n: step_of(n, -1), "step_stage1": lambda n: step_of(n, 1),
    "step_stage3": lambda n: step_of(n, 3), "step_fsdp2": step_of_fsdp2}


def main() -> None:
    torch.set_num_threads(1)
    dct.init()
    for size in sys.argv[2:]:
        cost = ROWS[sys.argv[1]](int(size))
        if os.environ.get("RANK", "0") == "0":
            print(f"{cost:.6g}", flush=True)


if __name__ == "__main__":
    main()
