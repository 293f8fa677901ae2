#!/usr/bin/env python3
"""Times of real steps over links of a limited rate beside the planner, which knows two ranks alone:

    python bench/plan/links.py [--rounds 3] [--seen FILE] [--save]

A machine is a network namespace, and a bridge joins them; `tc tbf` limits what each sends (bench/network.py). It needs
root, iproute2 and the kernel's module sch_tbf.

For each rate, a round first measures two ranks alone. Products, copies and shared memory are measured by processor
time, and over the link an all-gather of few and of many bytes by the clock. Then machines of one rank train over TCP,
and machines of 2 and 4 ranks in two levels. A step's time is the clock's, since links are far slower than all else. A
row is the median of the rounds' quotients; --seen adds rounds to those of earlier runs."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, List, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import libdc
import network
import numpy as np
from libdc import plan as planner
from libdc.plan.measure import measure, measure_level
from machine import save
from times import Case, Training, forecast, page_of

WIDTH, TOKENS, STEPS, PORT = 512, 16, 2, 29875
RATES, STAGES = (20, 50, 100), (0, 1, 3)
SHAPES = (3, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)  # machines, and the ranks of each
MACHINES = max(machines for machines, _ in SHAPES)
PART = 4 << 20  # bytes that measure a link's rate: about what a step sends, since fewer end before TCP is at its best


class Row(NamedTuple):
    """A case of a round. Seconds, the link's measured Mbit/s, the share of segments sent again, the machine's load."""

    rate: int
    stage: int
    machines: int
    each: int
    planned: float
    real: float
    link: float
    again: float
    load: float


def segments() -> Any:
    """TCP's of this machine: sent first, and again."""
    names, values = [line.split()[1:] for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:"]
    counts = dict(zip(names, map(int, values)))
    return np.array([counts["OutSegs"], counts["RetransSegs"]])


def train(comm: Any, stage: int) -> Tuple[float, float]:
    """Seconds of a step, the mean of the ranks; and the share of segments that were sent again in it."""
    training = Training(comm, Case(stage, TOKENS, "tcp", comm.size), WIDTH)
    training.step()
    comm.barrier()
    begin, before = time.perf_counter(), segments()
    for _ in range(STEPS):
        training.step()
    seconds = (time.perf_counter() - begin) / STEPS
    own = np.array([seconds, *(segments() - before)])
    every = np.zeros(3 * comm.size)
    comm.all_gather(own, every)
    training.context.cleanup()
    mean, first, again = every.reshape(comm.size, 3).mean(0)
    return mean, again / first


def rank(out: str, what: str, number: int, machines: int, each: int) -> None:
    with libdc.Comm.tcp(f"{network.address(0)}:{PORT}", "links", number, machines * each, timeout=300,
                        secret="a secret of the links", node=f"n{number // each}") as comm:
        result: Any = measure_level("network", "wall", comm, PART) if what == "measure" else [
            train(comm, stage) for stage in STAGES]
        if number == 0:
            Path(out).write_text(json.dumps(result))
        comm.barrier()


def run_ranks(what: str, machines: int, each: int, folder: str) -> Any:
    out = os.path.join(folder, "out.json")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    running = [subprocess.Popen([*network.of_machine(i // each), sys.executable, __file__, "--rank", out, what,
                                 str(i), str(machines), str(each)], stdin=subprocess.DEVNULL, env=environment)
               for i in range(machines * each)]
    if any([process.wait() for process in running]):
        raise SystemExit(f"links: {what} on {machines} machines of {each} ranks failed")
    return json.loads(Path(out).read_text())


def machine_of(folder: str) -> Any:
    path = os.path.join(folder, "machine.json")
    Path(path).write_text(json.dumps({**measure(path, "processor"), **run_ranks("measure", 2, 1, folder)}))
    return planner.load(path)


def one_round(folder: str) -> List[Row]:
    rows: List[Row] = []
    for rate in RATES:
        network.limit(MACHINES, rate)
        machine = machine_of(folder)
        link = machine.network_bytes_per_second * 8 / 1e6
        for machines, each in SHAPES:
            for stage, (real, again) in zip(STAGES, run_ranks("train", machines, each, folder)):
                case = Case(stage, TOKENS, "tcp" if each == 1 else "two levels", machines * each)
                share = machine._replace(ranks_per_node=each,
                                         network_bytes_per_second=machine.network_bytes_per_second // each)
                planned = forecast(case, share, WIDTH)
                rows.append(Row(rate, stage, machines, each, planned, real, link, again, os.getloadavg()[0]))
    return rows


def table(rows: List[Row]) -> List[str]:
    """Lines of Markdown, each case's medians."""
    lines = ["| limit Mbit/s | measured Mbit/s | stage | machines | ranks of each | forecast ms | measured ms "
             "| forecast / measured | sent again |", "|---|---|---|---|---|---|---|---|---|"]
    within, cases = 0, sorted({row[:4] for row in rows}, key=lambda case: (case[0], case[3], *case[1:3]))
    for case in cases:
        seen = [row for row in rows if row[:4] == case]
        planned, real, link, again = (statistics.median(column) for column in list(zip(*seen))[4:8])
        ratio = statistics.median(row.planned / row.real for row in seen)
        within += abs(ratio - 1) <= 0.15
        rate, stage, machines, each = case
        lines.append(f"| {rate} | {link:.2f} | {stage} | {machines} | {each} | {planned * 1e3:.0f} | {real * 1e3:.0f} "
                     f"| {ratio:.2f} | {again:.1%} |")
    loads = [row.load for row in rows]
    return [*lines, f"\n{within} of {len(cases)} rows are within 15 %, of {len(rows) // len(cases)} rounds. The load "
            f"was {min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} cores."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seen", help="a JSON of rounds, which is read if it is there, and written")
    parser.add_argument("--save", action="store_true", help="a page in bench/results")
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(*arguments.rank[:2], *map(int, arguments.rank[2:]))
        return 0
    network.enter()
    seen = Path(arguments.seen) if arguments.seen else None
    rows = [Row(*row) for row in json.loads(seen.read_text())] if seen and seen.exists() else []
    network.connect(MACHINES)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            rows += one_round(folder)
            if seen:
                seen.write_text(json.dumps(rows))
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    lines = table(rows)
    print("\n".join(lines))
    if arguments.save:
        save("planner-links", page_of("Forecast times over limited links",
                                      f"bench/plan/links.py --rounds {arguments.rounds} --save", __doc__, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
