#!/usr/bin/env python3
"""What is too long for `make test`: run.py [NAME…] trains by every stage, backend, model and communicator, and writes
bench/results/deepspeed-DATE.md. NAME: only the runs whose name begins so, or `report`, which writes what there is in
build/deepspeed/results; a run that has its result there is not repeated."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

from launch import BUILD, HERE, NEWEST, SEED, largest_difference, operators, run

sys.path.insert(0, str(HERE.parent.parent / "bench"))
RESULTS = BUILD / "results"
BACKENDS, COMMUNICATORS = ("eager", "inductor"), ("libdc", "torch")
ROUNDING = 2e-5  # what 50 steps make of float32's rounding in losses of 6 to 4
BENCH_ROUNDS, BENCH_STEPS, BENCH_SKIPPED = 3, 30, 8


class Row(NamedTuple):
    """One run, and the one without libdc that it is compared with."""

    name: str
    base: str
    version: str
    options: Dict[str, Any]
    base_options: Dict[str, Any]


def rows() -> Iterator[Row]:
    for model in ("gpt", "bert"):
        for stage in (1, 2, 3):
            options = {"model": model, "stage": stage}
            for backend in BACKENDS:
                for communicator in COMMUNICATORS:
                    yield row(NEWEST, f"{model}-{stage}-{backend}-{communicator}", options, backend=backend,
                              communicator=communicator)
    for stage in (1, 2, 3):
        options = {"model": "gpt", "stage": stage, "steps": 10, "accumulate": 2}
        yield row(NEWEST, f"accumulate-{stage}", options, backend="eager", communicator="libdc")
    for backend in BACKENDS:
        options = {"model": "gpt", "stage": 3}
        yield row(NEWEST, f"broken-{backend}", options, backend=backend, communicator="libdc", broken=True)
    for stage in (1, 2):
        for backend in BACKENDS:
            yield row(SEED, f"seed-{stage}-{backend}", {"model": "gpt", "stage": stage}, backend=backend,
                      communicator="libdc")


def row(version: str, name: str, options: Dict[str, Any], **ours: Any) -> Row:
    base = "-".join(["base", version, *map(str, options.values())])
    return Row(name, base, version, {**options, **ours}, options)


def result(version: str, name: str, options: Dict[str, Any]) -> Dict[str, Any]:
    """Of this run, or of an earlier one."""
    out = RESULTS / f"{name}.json"
    if not out.exists():
        run(version, out.with_suffix(".part"), **options)
        out.with_suffix(".part").rename(out)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def measure() -> None:
    """ZeRO-3 with and without libdc in turns, so that a busy moment of the machine meets all of them."""
    for turn in range(BENCH_ROUNDS):
        for name, options in bench_kinds():
            result(NEWEST, f"bench-{name}-{turn}", {"steps": BENCH_STEPS, "stage": 3, "width": 384, "batch": 8, **options})


def bench_kinds() -> List[Tuple[str, Dict[str, Any]]]:
    kinds: List[Tuple[str, Dict[str, Any]]] = [("zero3", {})]
    for backend in BACKENDS:
        kinds += [(f"{backend}-{c}", {"backend": backend, "communicator": c}) for c in COMMUNICATORS]
    return kinds


# The report


def table(found: List[Row]) -> Iterator[str]:
    yield "| run | DeepSpeed | parameters | losses, first and last | largest difference: all steps | first 10 | same bits |"
    yield "|---|---|---|---|---|---|---|"
    for one in found:
        ours, base = load(one.name), load(one.base)
        losses, others = ours["ranks"][0]["losses"], base["ranks"][0]["losses"]
        early = max(abs(a - b) for left, right in zip(ours["ranks"], base["ranks"])
                    for a, b in zip(left["losses"][:10], right["losses"][:10]))
        same = sum(a == b for a, b in zip(losses, others))
        yield (f"| {one.name} | {one.version} | {ours['parameters'] / 1e6:.2f} M | {losses[0]:.6f} {losses[-1]:.6f} | "
               f"{largest_difference(ours, base):.1e} | {early:.1e} | {same} of {len(losses)} |")


def graphs(found: List[Row]) -> Iterator[str]:
    yield "| run | reduce_grad | end_backward | allgather_param | prefetch_params_fused | persistent | gathers a step, step 4 and last |"
    yield "|---|---|---|---|---|---|---|"
    for one in found:
        ours = load(one.name)
        steps = ours["ranks"][0]["gathers"]
        counts = [" ".join(map(str, operators(ours, name)))
                  for name in ("reduce_grad", "end_backward", "allgather_param", "prefetch_params_fused")]
        yield (f"| {one.name} | {' | '.join(counts)} | {ours['ranks'][0]['persistent']} | {steps[3] - steps[2]}, "
               f"{steps[-1] - steps[-2]} |")


def bench_table() -> Iterator[str]:
    yield "| | step, median ms | fastest ms | peak memory of a rank in steady steps, MB | with compilation, MB |"
    yield "|---|---|---|---|---|"
    for name, _ in bench_kinds():
        turns = [load(f"bench-{name}-{turn}") for turn in range(BENCH_ROUNDS) if known(f"bench-{name}-{turn}")]
        if turns:
            seconds = [s for turn in turns for s in turn["ranks"][0]["seconds"][BENCH_SKIPPED:]]
            steady = statistics.median(r["steady_peak"] for turn in turns for r in turn["ranks"]) / 1e6
            peak = statistics.median(r["peak"] for turn in turns for r in turn["ranks"]) / 1e6
            yield (f"| {name} | {statistics.median(seconds) * 1e3:.1f} | {min(seconds) * 1e3:.1f} | {steady:.0f} | "
                   f"{peak:.0f} |")


def load(name: str) -> Dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())  # type: ignore[no-any-return]


def known(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def report() -> int:
    """Writes it; the number of runs that are wrong."""
    found = [one for one in rows() if known(one.name) and known(one.base)]
    path = HERE.parent.parent / "bench" / "results" / f"deepspeed-{time.strftime('%Y-%m-%d')}.md"
    text = ["# DeepSpeed's DeepCompile on libdc, two ranks on a CPU", "",
            f"`make test-deepspeed`; {len(found)} of {len(list(rows()))} runs. A run's losses are compared with those of "
            "DeepSpeed's own eager ZeRO of the same version, stage and model, on all ranks. Names: model, stage, backend, "
            "communicator; 50 steps where nothing else is said.", "", *table(found), "",
            "What stands in each graph, in the order of compilation (forward and backward before step 5, then after):", "",
            *graphs([one for one in found if one.options["stage"] == 3]), "",
            "ZeRO-3 with and without libdc, in turns; the GPT 384 wide, batch 8, one thread a rank:", "", *bench_table(), ""]
    path.write_text("\n".join(text))
    wrong = [one.name for one in found if largest_difference(load(one.name), load(one.base)) > ROUNDING]
    print(f"{path}\n{len(found) - len(wrong)} passed, {len(wrong)} failed{': ' * bool(wrong)}{', '.join(wrong)}")
    return len(wrong)


def main() -> int:
    RESULTS.mkdir(parents=True, exist_ok=True)
    names = sys.argv[1:]
    for one in rows():
        if not names or any(one.name.startswith(name) for name in names):
            result(one.version, one.base, one.base_options)
            ours = result(one.version, one.name, one.options)
            print(f"{one.name:<24}{largest_difference(ours, load(one.base)):.1e}", flush=True)
    if not names or "bench" in names:
        measure()
    return 1 if report() else 0


if __name__ == "__main__":
    sys.exit(main())
