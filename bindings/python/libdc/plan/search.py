"""The settings with which a step is fastest: every combination that fits is planned."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Iterator, List, NamedTuple

from .machine import Machine
from .model import Model
from .step import Options, Plan, largest_micro_batch, run


class Found(NamedTuple):
    plan: Plan
    why: str

    @property
    def ns_per_token(self) -> float:
        return self.plan.step_ns / self.plan.tokens


def _candidates(model: Model, machine: Machine, base: Options) -> Iterator[Plan]:
    buckets = sorted({base.bucket, base.bucket * 4})
    for stage, recompute, prefetch, bucket in itertools.product(range(4), (False, True), (0, 1, 2), buckets):
        if stage == 0 and prefetch > 0 or stage == 2:
            continue  # nothing is gathered; and stage 1 has stage 2's calls
        options = dataclasses.replace(base, stage=stage, recompute=recompute, prefetch=prefetch, bucket=bucket,
                                      micro_batch=1)
        plan = run(model, machine, options)
        most = min(largest_micro_batch(plan), base.micro_batch)
        if most > 0:
            yield plan if most == 1 else run(model, machine, dataclasses.replace(options, micro_batch=most))


def _why(plan: Plan) -> str:
    """The share of waiting, and of free memory."""
    exposed = 100 * plan.exposed_ns / plan.step_ns if plan.step_ns else 0.0
    free = 100 * (1 - plan.peak.total / plan.machine.memory_bytes)
    recomputed = ", a quarter of the work is recomputation" if plan.options.recompute else ""
    return f"{exposed:.0f} % of the step waits for communication, {free:.0f} % of the memory is free{recomputed}"


def advise(plan: Plan) -> str:
    """The first thing to change."""
    if not plan.fits:
        return "more ranks, recomputation or a higher stage, since the step does not fit"
    if plan.exposed_ns * 5 > plan.step_ns:
        return "more samples a step and rank (a larger micro-batch, or accumulation), since communication is exposed"
    if plan.options.recompute:
        return "memory: without recomputation a step has a quarter less work"
    return "the products: most of the step is compute"


def search(model: Model, machine: Machine, base: Options, count: int = 5) -> List[Found]:
    """The best ones by time a token. base has the ranks, the type, the largest micro-batch and the smaller bucket."""
    plans = sorted(_candidates(model, machine, base), key=lambda plan: (plan.step_ns / plan.tokens, plan.peak.total))
    return [Found(plan, _why(plan)) for plan in plans[:count]]
