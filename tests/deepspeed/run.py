#!/usr/bin/env python3
"""Runs that are too long for `make test`: run.py [NAME…] trains by every stage, backend, model and communicator, and
writes bench/results/deepspeed-DATE.md. NAME: only the runs whose name begins so; `report`: the results in
build/deepspeed/results, where a run that has its result is not repeated; `bench`: bench.py alone."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple

from launch import BENCH, BUILD, NEWEST, SEED, install, largest_difference, operators, run
import bench  # isort: skip, launch knows where what it needs is

RESULTS = BUILD / "results"
BACKENDS, COMMUNICATORS = ("eager", "inductor"), ("libdc", "torch")
ROUNDING = 2e-5  # what 50 steps make of float32's rounding in losses of 7 to 4


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
    for stage in (1, 2, 3):
        for backend in BACKENDS:
            yield row(SEED, f"seed-{stage}-{backend}", {"model": "gpt", "stage": stage}, backend=backend,
                      communicator="libdc")


def row(version: str, name: str, options: Dict[str, Any], **ours: Any) -> Row:
    return Row(name, base_name(version, options), version, {**options, **ours}, options)


def base_name(version: str, options: Dict[str, Any]) -> str:
    return "-".join(["base", version, *map(str, options.values())])


def result(version: str, name: str, options: Dict[str, Any]) -> Dict[str, Any]:
    """Of this run, or of an earlier one."""
    out = RESULTS / f"{name}.json"
    if not out.exists():
        run(version, out.with_suffix(".part"), **options)
        out.with_suffix(".part").rename(out)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


# The report


def table(found: List[Row]) -> Iterator[str]:
    yield ("| run | DeepSpeed | parameters | losses, first and last | largest difference: all steps | first 10 | "
           "same bits | same bits as ZeRO-1's |")
    yield "|---|---|---|---|---|---|---|---|"
    for one in found:
        ours, base, first = load(one.name), load(one.base), base_name(one.version, {**one.base_options, "stage": 1})
        losses = ours["ranks"][0]["losses"]
        early = max(abs(a - b) for left, right in zip(ours["ranks"], base["ranks"])
                    for a, b in zip(left["losses"][:10], right["losses"][:10]))
        yield (f"| {one.name} | {one.version} | {ours['parameters'] / 1e6:.2f} M | {losses[0]:.6f} {losses[-1]:.6f} | "
               f"{largest_difference(ours, base):.1e} | {early:.1e} | {same_bits(ours, base)} | "
               f"{same_bits(ours, load(first)) if known(first) else ''} |")


def same_bits(ours: Dict[str, Any], base: Dict[str, Any]) -> str:
    """In how many of rank 0's steps."""
    losses, others = ours["ranks"][0]["losses"], base["ranks"][0]["losses"]
    return f"{sum(a == b for a, b in zip(losses, others))} of {len(losses)}"


def graphs(found: List[Row]) -> Iterator[str]:
    yield ("| run | reduce_grad | end_backward | allgather_param | prefetch_params_fused | persistent | "
           "gathers a step, step 4 and last |")
    yield "|---|---|---|---|---|---|---|"
    for one in found:
        ours = load(one.name)
        steps = ours["ranks"][0]["gathers"]
        counts = [" ".join(map(str, operators(ours, name)))
                  for name in ("reduce_grad", "end_backward", "allgather_param", "prefetch_params_fused")]
        yield (f"| {one.name} | {' | '.join(counts)} | {ours['ranks'][0]['persistent']} | {steps[3] - steps[2]}, "
               f"{steps[-1] - steps[-2]} |")


def load(name: str) -> Dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())  # type: ignore[no-any-return]


def known(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def report() -> int:
    """Writes it; the number of runs that are wrong."""
    found = [one for one in rows() if known(one.name) and known(one.base)]
    path = BENCH / "results" / f"deepspeed-{time.strftime('%Y-%m-%d')}.md"
    path.write_text("\n".join([
        "# DeepSpeed's DeepCompile on libdc, two ranks on a CPU", "",
        f"`make test-deepspeed`; {len(found)} of {len(list(rows()))} runs. A run's losses are compared with those of "
        "DeepSpeed's own eager ZeRO of the same version, stage and model, on all ranks, and rank 0's bits with its "
        "ZeRO-1's too. Names: model, stage, backend, communicator; 50 steps, unless said otherwise.", "",
        *table(found), "",
        "Operators of each graph, in the order of compilation: forward and backward before step 5, then after.", "",
        *graphs([one for one in found if one.options["stage"] == 3]), "",
    ]))  # fmt: skip
    wrong = [one.name for one in found if largest_difference(load(one.name), load(one.base)) > ROUNDING]
    print(f"{path}\n{len(found) - len(wrong)} passed, {len(wrong)} failed{': ' * bool(wrong)}{', '.join(wrong)}")
    return len(wrong)


def main() -> int:
    RESULTS.mkdir(parents=True, exist_ok=True)
    names = sys.argv[1:]
    install(NEWEST)  # seed.py takes from it
    for one in rows():
        if not names or any(one.name.startswith(name) for name in names):
            result(one.version, one.base, one.base_options)
            ours = result(one.version, one.name, one.options)
            print(f"{one.name:<24}{largest_difference(ours, load(one.base)):.1e}", flush=True)
    if not names or "bench" in names:
        bench.measure()
    return 1 if names != ["bench"] and report() else 0


if __name__ == "__main__":
    sys.exit(main())
