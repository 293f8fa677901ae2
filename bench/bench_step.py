#!/usr/bin/env python3
"""The phases of a training step of small layers, PyTorch alone and sharded: bench_step.py [LAYERS [ROUNDS]].
Microseconds of processor time a layer, of one rank and one thread, each the least of some steps that the models take in
turns."""
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
PHASES = ("forward", "backward", "optimizer", "zero_grad", "all")


def step_of(layers: int, stage: int) -> Callable[[Dict[str, float]], None]:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    if stage >= 0:
        dct.shard(model, stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, WIDTH)

    def step(least: Dict[str, float]) -> None:
        times = [time.process_time()]
        loss = model(x).sum()
        times.append(time.process_time())
        loss.backward()
        times.append(time.process_time())
        optimizer.step()
        times.append(time.process_time())
        optimizer.zero_grad()
        times.append(time.process_time())
        spent = [after - before for before, after in zip(times, times[1:])]
        for phase, cost in zip(PHASES, (*spent, times[-1] - times[0])):
            least[phase] = min(least.get(phase, cost), cost)

    return step


def main() -> None:
    layers, rounds = (int(argument) for argument in (*sys.argv[1:], *("100", "150")[len(sys.argv) - 1 :]))
    torch.set_num_threads(1)
    dct.init()
    steps = {stage: step_of(layers, stage) for stage in (-1, 0, 1, 3)}
    least: Dict[int, Dict[str, float]] = {stage: {} for stage in steps}
    for _ in range(rounds):
        for stage, step in steps.items():
            step(least[stage])
    print(f"| µs a layer, {layers} layers | " + " | ".join(PHASES) + " |\n" + "|---" * (len(PHASES) + 1) + "|")
    for stage, found in least.items():
        costs = [f"{1e6 * found[phase] / layers:.1f} ({1e6 * (found[phase] - least[-1][phase]) / layers:+.1f})"
                 for phase in PHASES]
        print(f"| {'PyTorch alone' if stage < 0 else f'stage {stage}'} | " + " | ".join(costs) + " |")


if __name__ == "__main__":
    main()
