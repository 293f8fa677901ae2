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


class Forecast(NamedTuple):
    speed: float
    memory_gib: float


def forecast(run: Run, configs: Dict[str, Any], machine: planner.Machine) -> Forecast:
    """Of layers some of which recompute: between the plans of none and of all, as time and kept memory are sums."""
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
            print(f"| {run.model} | {run.ranks} | {run.micro_batch * run.accumulate} | {run.speed:,.0f} "
                  f"| {planned.speed:,.0f} | {told} | {' | '.join(memory)} |")
        for run in runs:
            if run.why:
                print(f"\n{run.model} on {run.ranks}: {run.why}")
    print(f"\n## Not forecast\n\n{table['tail']}")


if __name__ == "__main__":
    main()
