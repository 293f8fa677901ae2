#!/usr/bin/env python3
"""How many steps optimizers need until the autoencoder of examples/optimizers knows its digits.

    python bench/optim/gates.py                    all: 5 seeds, the grids of the baselines; writes bench/results
    python bench/optim/gates.py --seeds 1 --known  one seed and the settings of examples/optimizers/rules.py

The baselines get the best of a grid each, by the median over the seeds of the steps to the target; Muon, Shampoo, SOAP
and K-FAC have smaller ones. The batches of a seed are the same for all. The gates: Muon, with AdamW for parameters that
are no hidden matrices, and Shampoo (roots every 10 steps) take at most 0.6 times AdamW's steps. SOAP (bases every 10)
takes at most 0.8 times AdamW's, and K-FAC at most 0.5 times SGD's. Two ranks under ZeRO-3, which share matrices, blocks
and layers out, have the losses of one rank, bit for bit. Exit status 1 if one does not hold.
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any, Dict, List, Optional, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [os.path.join(ROOT, "bench"), os.path.join(ROOT, "examples", "optimizers")]

import libdc.torch as dct  # noqa: E402
import machine  # noqa: E402
import torch  # noqa: E402
from digits import Autoencoder, pictures  # noqa: E402
from rules import DIGITS, Rule, digits_step  # noqa: E402

BATCH, EVERY, MOST, TARGET = 256, 5, 1200, 8 / 256
GATES = (("muon", "adamw", 0.6), ("shampoo", "adamw", 0.6), ("soap", "adamw", 0.8), ("kfac", "sgd", 0.5))
GRIDS: Dict[str, Dict[str, List[Any]]] = {
    "sgd": {"lr": [2.0, 4.0, 3.0, 1.0], "nesterov": [True, False]},
    "adamw": {"lr": [1e-2, 6e-3, 2e-2, 3e-3], "betas": [(0.9, 0.99), (0.9, 0.999)]},
    "muon": {"lr": [5e-2, 3e-2, 2e-2, 7e-2]},
    "shampoo": {"lr": [1e-2, 6e-3, 2e-2]},
    "soap": {"lr": [1e-2, 6e-3, 2e-2]},
    "kfac": {"nesterov": [True, False], "inverse": ["eigen", "factored"], "damping": [0.01, 0.03]},
}
CURVE = 20  # steps that ranks are compared over


def batches(data: torch.Tensor, seed: int) -> Any:
    rng = torch.Generator().manual_seed(seed)
    while True:
        yield data[torch.randint(len(data), (BATCH,), generator=rng)]


def steps_to_target(rule: Rule, seed: int, data: torch.Tensor, most: int) -> Optional[int]:
    """Steps until the loss on all pictures is at most the target; None: not in `most`, or it diverged."""
    model = Autoencoder(seed)
    optimizer, rng = rule.optimizer(model), torch.Generator().manual_seed(seed)
    for step, x in zip(range(1, most + 1), batches(data, seed)):
        digits_step(model, optimizer, x, rng)
        if step % EVERY == 0:
            with torch.no_grad():
                loss = torch.nn.functional.mse_loss(model(data), data).item()
            if not loss < 1:
                return None
            if loss <= TARGET:
                return step
    return None


def median(found: List[Optional[int]], most: int) -> float:
    return statistics.median(most + 1 if steps is None else steps for steps in found)


def settings(name: str, known: bool) -> List[Dict[str, Any]]:
    if known:
        return [{}]
    grid = GRIDS[name]
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def tuned(name: str, seeds: int, known: bool, data: torch.Tensor) -> Dict[str, Any]:
    """The grid's rows, and the best. A run ends at the best median so far, a setting once it cannot win any more."""
    rows: List[Dict[str, Any]] = []
    most = MOST
    for options in settings(name, known):
        rule, found = DIGITS[name].having(**options), []
        for seed in range(seeds):
            found.append(steps_to_target(rule, seed, data, most))
            if sum(steps is None for steps in found) > seeds // 2:
                break
        complete = sum(steps is None for steps in found) <= seeds // 2
        rows.append({"options": options, "steps": found, "median": median(found, MOST) if complete else None})
        if complete and rows[-1]["median"] < most:
            most = int(rows[-1]["median"])
        print(f"{name:<8} {options}: {found}" + (f", median {rows[-1]['median']:g}" if complete else ", given up"),
              flush=True)
    chosen = min((row for row in rows if row["median"] is not None), key=lambda row: row["median"], default=None)
    return {"grid": rows, "best": chosen}


def curve(name: str, options: Dict[str, Any], seed: int, group: Any) -> List[str]:
    """The losses of some steps as hexadecimal numbers. All ranks see the whole batch, so that the mean of their
    gradients is the gradient."""
    data, model = pictures(), Autoencoder(seed)
    if group is not None:
        dct.shard(model, stage=3)
    optimizer, rng = DIGITS[name].having(**options).optimizer(model), torch.Generator().manual_seed(seed)
    return [digits_step(model, optimizer, x, rng).hex() for _, x in zip(range(CURVE), batches(data, seed))]


def two_ranks(name: str, options: Dict[str, Any], seed: int) -> List[str]:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        subprocess.run([sys.executable, "-m", "libdc.run", "-n", "2", os.path.abspath(__file__), "--curve", name,
                        "--options", json.dumps(options), "--seed", str(seed), "--out", out.name], check=True)
        return list(json.load(out))


def check_ranks(name: str, options: Dict[str, Any], seeds: int) -> bool:
    same = all(curve(name, options, seed, None) == two_ranks(name, options, seed) for seed in range(seeds))
    print(f"{name}: the losses of {CURVE} steps on 2 ranks are "
          + ("those of 1 rank, bit for bit" if same else "OTHERS"), flush=True)
    return same


def report(about: Dict[str, Any], results: Dict[str, Any], verdicts: List[Tuple[str, bool]], seeds: int) -> str:
    lines = [f"# Steps to the digits autoencoder's target, {about['date'][:10]}", "",
             ", ".join(f"{key} {value}" for key, value in about.items()), "",
             f"Mean squared error of {TARGET:g} on all pictures, batches of {BATCH}, {seeds} seeds, {MOST} steps at "
             "most; the best of each grid. A run ends (None) where it diverges or takes longer than the best setting "
             "so far, a setting with most of its runs.", "",
             "| optimizer | best setting | steps of each seed | median |", "|---|---|---|---|"]
    for name, found in results.items():
        best = found["best"] or {"options": {}, "steps": [], "median": float("nan")}
        setting = best["options"] or "as in rules.py"
        lines.append(f"| {DIGITS[name].name} | {setting} | {best['steps']} | {best['median']:g} |")
    lines += ["", "| the grids | steps of each seed | median |", "|---|---|---|"]
    for name, found in results.items():
        lines += [f"| {DIGITS[name].name} {row['options']} | {row['steps']} | {row['median'] or 'given up'} |"
                  for row in found["grid"]]
    lines += ["", *(f"- {text}: {'holds' if good else 'DOES NOT HOLD'}" for text, good in verdicts), ""]
    return "\n".join(lines)


def check_gates(a: argparse.Namespace) -> int:
    data = pictures()
    names = [name for name in GRIDS if not a.only or name in a.only]
    results = {name: tuned(name, a.seeds, a.known, data) for name in names}
    verdicts = []
    for second, first, share in GATES:
        if second in results and first in results:
            steps = {name: (results[name]["best"] or {"median": float("inf")})["median"] for name in (second, first)}
            text = (f"{DIGITS[second].name} {steps[second]:g} steps, at most {share} times {DIGITS[first].name}'s "
                    f"{steps[first]:g}")
            verdicts.append((text, steps[second] <= min(share * steps[first], MOST)))  # not if neither came there
            options = (results[second]["best"] or {"options": {}})["options"]
            verdicts.append((f"{DIGITS[second].name}: 2 ranks have the losses of one, bit for bit",
                             check_ranks(second, options, a.seeds)))
    for text, good in verdicts:
        print(("holds: " if good else "DOES NOT HOLD: ") + text, flush=True)
    if not a.known:
        about = machine.describe()
        base = os.path.join(ROOT, "bench", "results", f"optim-{about['date'][:10]}")
        with open(base + ".md", "w") as f:
            f.write(report(about, results, verdicts, a.seeds))
        with open(base + ".json", "w") as f:
            json.dump({"results": results, "verdicts": verdicts}, f, indent=1)
    return 0 if verdicts and all(good for _, good in verdicts) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--known", action="store_true", help="no grids: the settings of rules.py")
    parser.add_argument("--only", nargs="+", choices=sorted(GRIDS), help="these optimizers")
    parser.add_argument("--curve", choices=sorted(GRIDS), help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.curve:
        group = dct.init()
        losses = curve(a.curve, a.options, a.seed, group)
        if group.rank == 0:
            with open(a.out, "w") as f:
                json.dump(losses, f)
        return 0
    return check_gates(a)


if __name__ == "__main__":
    sys.exit(main())
