#!/usr/bin/env python3
"""Costs that grow with a PyTorch model: growth_torch.py ROW SIZE... prints one number a size. Microseconds of processor
time of one rank and one thread, the best of some repetitions, in which the sizes take turns. Python's garbage collector
is off meanwhile: its passes go by all objects of the program, those of the other sizes too."""
from __future__ import annotations

import gc
import os
import sys
import time
from typing import Callable, Dict, Iterator, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"
import torch  # noqa: E402
from torch import nn  # noqa: E402

import libdc.torch as dct  # noqa: E402

WIDTH = 32


ROUNDS = 10


class Work(NamedTuple):
    """One size of a row, made ready: all ranks call it as often."""

    call: Callable[[], object]
    times: int  # in a round


def best_us(work: Work) -> Iterator[float]:
    """The best of a round's calls, for each round."""
    while True:
        best = float("inf")
        for _ in range(work.times):
            begin = time.process_time()
            work.call()
            best = min(best, time.process_time() - begin)
        yield best * 1e6


def groups(count: int) -> Work:
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
    return Work(lambda: dct.load_full_optimizer_state_dict(model, optimizer, state), 1)


def models(count: int) -> Work:
    """A hundred forwards of one model beside others."""
    all_models = [nn.Linear(4, 4) for _ in range(count)]
    for model in all_models:
        dct.shard(model, stage=3)
    x = torch.randn(2, 4)

    def forwards() -> None:
        with torch.no_grad():
            for _ in range(100):
                all_models[-1](x)

    return Work(forwards, 1)


def step_of(count: int, stage: int) -> Work:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])
    if stage >= 0:
        dct.shard(model, stage=stage)
    return step_work(model, 12_000)


def step_of_fsdp2(count: int) -> Work:
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
    return step_work(model, 3000)


def step_work(model: nn.Sequential, layers: int) -> Work:
    """Steps that have so many layers in all rounds together."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return Work(step, max(1, layers // len(model) // ROUNDS))


ROWS: Dict[str, Callable[[int], Work]] = {
    "groups": groups, "models": models, "step_plain": lambda n: step_of(n, -1), "step_stage1": lambda n: step_of(n, 1),
    "step_stage3": lambda n: step_of(n, 3), "step_fsdp2": step_of_fsdp2}


def main() -> None:
    torch.set_num_threads(1)
    dct.init()
    works = [best_us(ROWS[sys.argv[1]](int(size))) for size in sys.argv[2:]]
    gc.collect()
    gc.disable()
    rounds = [[next(work) for work in works] for _ in range(ROUNDS)]
    if os.environ.get("RANK", "0") == "0":
        for costs in zip(*rounds):
            print(f"{min(costs):.6g}", flush=True)


if __name__ == "__main__":
    main()
