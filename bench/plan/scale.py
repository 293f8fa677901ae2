#!/usr/bin/env python3
"""How sharded training scales, by libdc sim: python bench/plan/scale.py > docs/scale.md"""

from __future__ import annotations

from typing import Any, Dict, List

from libdc import plan as planner
from libdc.plan.hugging_face import from_config
from libdc.plan.simulate import PLANNED_RANKS, Faults, breaks_first, simulate

TOKENS, MACHINE = 8192, "h100"
RANKS = tuple(2**i for i in range(3, 17))
SIZES = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64), "405B": (16384, 53248, 126, 128)}

HEAD = """# Scale

Made by `bench/plan/scale.py`, and a test compares this page with its output. All of it is a model (`libdc sim`).
Efficiency is the tokens a second and rank, over those of a rank that never waits. "Lost most to" is what breaks first.

Assumed, beside what [the planner's page](planner.md) lists:

- Llama 3 of 8, 70 and 405 billion parameters; {machine}.
- Stage 3 in bfloat16, one sample of {tokens:,} tokens a rank and step, recomputation, one layer gathered ahead.
- Products at {percent} % of the peak. Faster ones wait for more: compare the columns, not the days.
- A rank fails each {mtbf:,.0f} hours, a checkpoint takes {checkpoint:.0f} s, a restart {restart:.0f} s.
- A rank's time for a step has a deviation of {deviation:g} of its mean.
- The network gives each rank its full rate at any distance. No rank's link is slow.
- The batch grows with the ranks: 65,536 ranks take {batch:,} tokens a step. Whether that many train well is not asked.
"""


def config(size: str) -> Dict[str, Any]:
    hidden, wide, layers, heads = SIZES[size]
    return {"model_type": "llama", "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256}


def memory_bytes(plan: planner.Plan, ranks: int) -> float:
    """At the peak: states of the largest plan fall with the ranks, the rest stays."""
    states = sum(plan.peak.bytes[name] for name in ("weights", "gradients", "optimizer"))
    return plan.peak.total - states * (1 - plan.options.ranks / ranks)


def rows(size: str, machine: planner.Machine, faults: Faults) -> List[str]:
    model = from_config(config(size), size, TOKENS, 2)
    lines = ["| ranks | GiB a rank | step s | communication | slowest rank | checkpoint every s | time that counts "
             "| efficiency | lost most to |", "|---|---|---|---|---|---|---|---|---|"]
    plans: Dict[int, planner.Plan] = {}
    for ranks in RANKS:
        planned = min(ranks, PLANNED_RANKS)
        if planned not in plans:
            plans[planned] = planner.run(model, machine, planner.Options(ranks=planned, recompute=True))
        plan = plans[planned]
        memory = memory_bytes(plan, ranks)
        if memory > machine.memory_bytes:
            lines.append(f"| {ranks:,} | {memory / 2**30:.0f} | does not fit | | | | | | |")
            continue
        scale = simulate(plan, ranks, faults)
        lines.append(f"| {ranks:,} | {memory / 2**30:.0f} | {scale.step_ns / 1e9:.2f} "
                     f"| {100 * (1 - plan.compute_ns / scale.step_ns):.0f} % | +{100 * (scale.straggling - 1):.1f} % "
                     f"| {scale.interval_s:,.0f} | {100 * scale.goodput:.1f} % | {100 * scale.efficiency:.0f} % "
                     f"| {breaks_first(scale, plan)} |")
    return lines


def main() -> None:
    machine, faults = planner.load(MACHINE), Faults()
    print(HEAD.format(machine=machine.name, tokens=TOKENS, percent=machine.product_percent, mtbf=faults.mtbf_hours,
                      checkpoint=faults.checkpoint_s, restart=faults.restart_s, deviation=faults.deviation,
                      batch=65536 * TOKENS))
    for size in SIZES:
        print(f"## {size}\n")
        print("\n".join(rows(size, machine, faults)) + "\n")
    print("`libdc sim config.json --machine h100 --tokens 8192 --recompute` gives the same for a model of yours.")


if __name__ == "__main__":
    main()
