#!/usr/bin/env python3
"""Published trainings beside the planner's forecasts: python bench/plan/published.py > docs/planner-published.md

Each machine's share of the peak (product_percent) is fitted to one published row; the others are forecasts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from libdc import plan as planner
from libdc.plan.hugging_face import from_config

RUNS = Path(__file__).with_name("published.json")


class Run(NamedTuple):
    """A published row. recompute: the share of the layers; speed: tokens a second and rank."""

    group: str
    model: str
    ranks: int
    micro_batch: int
    tokens: int
    recompute: float
    replicas: int
    speed: float
    memory_gib: Optional[float]
    fits: bool  # the machine's percent is fitted to this row
    accumulate: int
    why: str
    tensor: int  # ranks among which each layer's matrices are split; it, and the pipeline, are taken as given
    pipeline: int  # ranks that have a part of the layers each
    tflops: float  # published, of a rank, where the speed is not


class Forecast(NamedTuple):
    speed: float
    memory_gib: float


def forecast(run: Run, configs: Dict[str, Any], machine: planner.Machine) -> Forecast:
    """Of layers some of which recompute: between the plans of none and of all, as time and kept memory are sums."""
    if run.tensor * run.pipeline > 1:
        return split_forecast(run, configs, machine)
    model = from_config(configs[run.model], run.model, run.tokens, 2)
    plans = [planner.run(model, machine, planner.Options(ranks=run.ranks, micro_batch=run.micro_batch,
                                                         recompute=recompute, replicas=run.replicas,
                                                         accumulate=run.accumulate, optimizer=run.ranks > 1,
                                                         dtype=next(iter(machine.flops))))
             for recompute in (False, True)]
    seconds, peaks = [plan.step_ns / 1e9 for plan in plans], [plan.peak.total / 2**30 for plan in plans]
    share = run.recompute
    step = seconds[0] + share * (seconds[1] - seconds[0])
    return Forecast(plans[0].tokens / run.ranks / step, peaks[0] + share * (peaks[1] - peaks[0]))


def part_of(model: planner.Model, tensor: int, pipeline: int) -> planner.Model:
    """One rank's part of a model whose layers and matrices are split: a stage in the middle, without the ends."""
    blocks = model.layers[1:-1]
    count = -(-len(blocks) // pipeline)
    layers = [block._replace(flops=block.flops // tensor, shapes=tuple(
        (shape[0] // tensor, *shape[1:]) if len(shape) > 1 else shape for shape in block.shapes))
        for block in blocks[:count]]
    return planner.Model(model.name, tuple(layers), model.tokens)


def speed_of_flops(run: Run, configs: Dict[str, Any]) -> float:
    """Tokens a second and rank, by the planner's operations of a token."""
    model = from_config(configs[run.model], run.model, run.tokens, 2)
    return run.tflops * 1e12 * model.tokens / (3 * model.flops)


def split_forecast(run: Run, configs: Dict[str, Any], machine: planner.Machine) -> Forecast:
    """The data-parallel part alone: ranks with the same part of the model, no two of them in a node. Gradients of
    micro-batches add up locally, so that one of them has all of a step's communication."""
    model = part_of(from_config(configs[run.model], run.model, run.tokens, 2), run.tensor, run.pipeline)
    ranks = run.ranks // (run.tensor * run.pipeline)
    last, other = (planner.run(model, machine._replace(ranks_per_node=1), planner.Options(
        ranks=ranks, stage=1, micro_batch=run.micro_batch, optimizer=optimizer)) for optimizer in (True, False))
    step_ns = last.step_ns + (run.accumulate - 1) * other.compute_ns
    return Forecast(last.tokens * run.accumulate / run.ranks / (step_ns / 1e9), 0.0)


def fitted(runs: List[Run], configs: Dict[str, Any], machine: planner.Machine) -> planner.Machine:
    """The share of the peak, in whole percents, with which the chosen row is closest."""
    chosen = next(run for run in runs if run.fits)

    def speed(percent: int) -> float:
        return forecast(chosen, configs, machine._replace(product_percent=percent)).speed

    low, high = 1, 100
    while high - low > 1:  # more percents are never slower
        middle = (low + high) // 2
        low, high = (middle, high) if speed(middle) <= chosen.speed else (low, middle)
    return machine._replace(product_percent=min((low, high), key=lambda percent: abs(speed(percent) - chosen.speed)))


def difference(planned: float, published: float) -> str:
    return f"{100 * (planned / published - 1):+.0f} %"


def main() -> None:
    table = json.loads(RUNS.read_text())
    print(table["head"])
    for name, group in table["groups"].items():
        runs = [Run(**{**table["defaults"], "group": name, **row}) for row in group["rows"]]
        runs = [run if run.speed else run._replace(speed=speed_of_flops(run, table["configs"])) for run in runs]
        machine = planner.load(group["machine"])._replace(**group["replace"])
        machine = fitted(runs, table["configs"], machine)
        print(f"\n## {name}\n\nSource: {group['source']}\n\n{group['note']}\nFitted: products at "
              f"{machine.product_percent} % of the peak.\n")
        print("| model | ranks | samples a rank | published tokens/s a rank | forecast | | published GiB | forecast | |"
              "\n|---|---|---|---|---|---|---|---|---|")
        for run in runs:
            planned = forecast(run, table["configs"], machine)
            memory = ("", "", "") if run.memory_gib is None else (
                f"{run.memory_gib:.1f}", f"{planned.memory_gib:.1f}", difference(planned.memory_gib, run.memory_gib))
            told = "fitted" if run.fits else difference(planned.speed, run.speed)
            print(f"| {run.model} | {run.ranks:,} | {run.micro_batch * run.accumulate} | {run.speed:,.0f} "
                  f"| {planned.speed:,.0f} | {told} | {' | '.join(memory)} |")
        for run in runs:
            if run.why:
                print(f"\n{run.model} on {run.ranks}: {run.why}")
    print(f"\n## Not forecast\n\n{table['tail']}")


if __name__ == "__main__":
    main()
