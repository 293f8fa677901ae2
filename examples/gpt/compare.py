"""Runs the same steps in stages 0, 1, 2 and 3. The stages take turns at each step, so that changes of the machine's
speed affect all alike."""
from __future__ import annotations

import argparse
import statistics
from typing import Any, Dict, List

from data import Text
from options import model_config
from progress import Progress, size
from trainer import Trainer, formula

STAGES = (0, 1, 2, 3)


def _table(head: List[str], rows: List[List[str]]) -> str:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(r, widths)) for r in [head, *rows]]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def compare(a: argparse.Namespace, group: Any, show: Progress) -> bool:
    """Prints the table. Returns whether the losses of every step have equal bits in all stages."""
    config = model_config(a)
    text = Text.load(config.seq, a.seed)
    trainers = {stage: Trainer(a, config, group, stage) for stage in STAGES}
    rows: Dict[int, List[Dict[str, Any]]] = {stage: [] for stage in STAGES}
    for step in range(a.steps):
        for stage in STAGES:
            rows[stage].append(trainers[stage].step(text, step))
        losses = [rows[stage][-1]["loss"] for stage in STAGES]
        show.print(f"step {step + 1:>4}/{a.steps}  loss {losses[3]:.6f}  "
                 + ("the same bits in all stages" if len(set(losses)) == 1 else f"NOT equal: {losses}"))
    whole = sum(trainers[0].sizes.values())
    unit = whole * (group.size - 1) / group.size
    lines = []
    for stage in STAGES:
        steady = rows[stage][min(2, a.steps - 1):]
        moved = (steady[-1]["gather_wire_bytes"] + steady[-1]["reduce_wire_bytes"]) / 4
        held = trainers[stage].held()
        same = all(r["loss"] == z["loss"] for r, z in zip(rows[stage], rows[0]))
        lines.append([str(stage), f"{rows[stage][0]['loss']:.6f}", f"{rows[stage][-1]['loss']:.6f}",
                      "yes" if same else "NO", f"{statistics.median(r['seconds'] for r in steady) * 1e3:.0f}",
                      size(moved * 4), f"{moved / unit:.4f} ({formula(stage, a.accumulate)})" if unit else "",
                      size(held["weights"] + held["gradients"] + held["optimizer"]), size(held["gathered"]),
                      size(rows[stage][-1]["gathered_peak_bytes"])])
    show.print()
    show.print(_table(["stage", "first loss", "last loss", "bits of stage 0", "ms a step", "wire a step",
                     "units* (formula)", "held a rank**", "gathered, kept", "at peak"], lines))
    show.print(f"*  of parameters * (ranks - 1) / ranks = {unit:,.0f} elements    "
               "** weights, gradients, optimizer state")
    equal = all(line[3] == "yes" for line in lines)
    show.print(f"\n{whole:,} parameters, {group.size} ranks, {a.steps} steps: the losses of all stages "
             + ("have the same bits at every step." if equal else "DIFFER."))
    return equal
