"""Searches for the settings with which a step is fastest. It plans each combination ("shape") of stage, hybrid
sharding's replicas, recomputation and offload that fits. Then it plans the fastest ones with other buckets and prefetch
depths."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Iterator, List, NamedTuple, Optional

from .machine import Machine
from .model import Model
from .options import Options
from .step import Plan, largest_micro_batch, run

_REFINED = 6  # the number of shapes to plan further


class Found(NamedTuple):
    plan: Plan
    why: str

    @property
    def ns_per_token(self) -> float:
        return _ns_per_token(self.plan)


def _ns_per_token(plan: Plan) -> float:
    return plan.step_ns / plan.tokens


def _with_samples(model: Model, machine: Machine, options: Options, most: int) -> Optional[Plan]:
    """A plan with as many samples a rank as fit, up to most; None if not even one fits."""
    plan = run(model, machine, dataclasses.replace(options, micro_batch=1))
    fits = min(largest_micro_batch(plan), most)
    if fits == 0:
        return None
    return plan if fits == 1 else run(model, machine, dataclasses.replace(options, micro_batch=fits))


def _shapes(machine: Machine, base: Options) -> Iterator[Options]:
    """The shapes to plan. Stage 2 is left out, since it makes the calls of stage 1, and so are replicas of one rank,
    which are stage 0."""
    replicas = [n for n in range(1, base.ranks) if base.ranks % n == 0] or [1]
    offloads = (False, True) if machine.host_memory_bytes > 0 else (False,)
    for recompute in (False, True):
        yield dataclasses.replace(base, stage=0, recompute=recompute, offload=False, replicas=1)
        for stage, offload, count in itertools.product((1, 3), offloads, replicas):
            yield dataclasses.replace(base, stage=stage, recompute=recompute, offload=offload, replicas=count)


def _planned(model: Model, machine: Machine, shape: Options) -> Optional[Plan]:
    """The shape's plan with a prefetch of one layer, or of none if one does not fit."""
    for prefetch in (1, 0):
        plan = _with_samples(model, machine, dataclasses.replace(shape, prefetch=prefetch), shape.micro_batch)
        if plan is not None or shape.stage == 0:
            return plan
    return None


def _refined(model: Model, machine: Machine, plan: Plan, base: Options) -> Plan:
    """The shape's fastest plan over prefetch and bucket; of equally fast ones the one with least memory."""
    ahead = (0, 1, 2) if plan.options.stage > 0 else (plan.options.prefetch,)
    plans = [plan]
    for prefetch, bucket in itertools.product(ahead, (base.bucket, base.bucket * 4)):
        options = dataclasses.replace(plan.options, prefetch=prefetch, bucket=bucket)
        other = _with_samples(model, machine, options, base.micro_batch)
        plans += [other] if other is not None else []
    return min(plans, key=lambda each: (_ns_per_token(each), each.peak.total))


def _why(plan: Plan) -> str:
    """A text with the shares of waiting and of free memory."""
    exposed = 100 * plan.exposed_ns / plan.step_ns if plan.step_ns else 0.0
    free = 100 * (1 - plan.peak.total / plan.machine.memory_bytes)
    text = f"{exposed:.0f} % of the step waits for communication or offload" if plan.options.offload else (
        f"{exposed:.0f} % of the step waits for communication")
    text += f", {free:.0f} % of the memory is free"
    if plan.options.replicas > 1:
        text += f", weights are gathered among {plan.options.shards} ranks"
    if plan.options.recompute:
        text += ", a quarter of the work is recomputation"
    return text + (f", {plan.host_bytes / 2**30:.1f} GiB are in host memory" if plan.options.offload else "")


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
    """The best shapes by time a token, each with its best bucket and prefetch. base gives the ranks, the type, the
    largest micro-batch and the smaller bucket."""
    def order(plan: Plan) -> "tuple[float, int]":
        return _ns_per_token(plan), plan.peak.total

    plans = [plan for shape in _shapes(machine, base) for plan in [_planned(model, machine, shape)] if plan is not None]
    best = [_refined(model, machine, plan, base) for plan in sorted(plans, key=order)[:_REFINED]]
    return [Found(plan, _why(plan)) for plan in sorted(best, key=order)[:count]]
