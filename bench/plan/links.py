#!/usr/bin/env python3
"""Times of real steps over links of a limited rate beside the planner, which knows two ranks alone:

    python bench/plan/links.py [--rounds 3] [--seen FILE] [--save]

A machine is a network namespace, and a bridge joins them; `tc tbf` limits what each sends. It needs root, iproute2 and
the kernel's module sch_tbf.

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
import numpy as np
from libdc import plan as planner
from libdc.plan.measure import measure, measure_level
from machine import save
from times import Case, Training, forecast, page_of

WIDTH, TOKENS, STEPS, PORT, ADDRESS = 512, 16, 2, 29875, "10.9.0.1"
RATES, STAGES = (20, 50, 100), (0, 1, 3)
SHAPES = (3, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)  # machines, and the ranks of each
MACHINES = max(machines for machines, _ in SHAPES)
CONTROL = "cubic"  # Linux's own default
SEGMENTS = 3000  # bytes that TCP hands to a link at once, as it does on a network whose round trip takes 0.5 ms or more
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
    with libdc.Comm.tcp(f"{ADDRESS}:{PORT}", "links", number, machines * each, timeout=300,
                        secret="a secret of the links", node=f"n{number // each}") as comm:
        result: Any = measure_level("network", "wall", comm, PART) if what == "measure" else [
            train(comm, stage) for stage in STAGES]
        if number == 0:
            Path(out).write_text(json.dumps(result))
        comm.barrier()


def run_ranks(what: str, machines: int, each: int, folder: str) -> Any:
    out = os.path.join(folder, "out.json")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    running = [subprocess.Popen(["ip", "netns", "exec", f"n{i // each}", sys.executable, __file__, "--rank", out, what,
                                 str(i), str(machines), str(each)], stdin=subprocess.DEVNULL, env=environment)
               for i in range(machines * each)]
    if any([process.wait() for process in running]):
        raise SystemExit(f"links: {what} on {machines} machines of {each} ranks failed")
    return json.loads(Path(out).read_text())


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL)


def connect() -> None:
    """Namespaces n0, n1, … at a bridge. A round trip over it takes microseconds, so TCP would hand a link 64 KiB at
    once. Of eight machines each would have a queue of 0.9 MB then, in which acknowledgements of others wait too. The
    last connections of a collective would stand idle, as on no network of such rates."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge0", "type", "bridge")
    ip("link", "set", "bridge0", "up")
    for i in range(MACHINES):
        ip("netns", "add", f"n{i}")
        ip("link", "add", f"port{i}", "type", "veth", "peer", "name", "veth0", "netns", f"n{i}")
        ip("link", "set", f"port{i}", "master", "bridge0", "up")
        ip("-n", f"n{i}", "address", "add", f"10.9.0.{i + 1}/24", "dev", "veth0")
        ip("-n", f"n{i}", "link", "set", "veth0", "gso_max_size", f"{SEGMENTS}", "up")
        ip("-n", f"n{i}", "link", "set", "lo", "up")
        subprocess.run(["ip", "netns", "exec", f"n{i}", "sysctl", "-qw", "net.ipv4.tcp_tso_rtt_log=0"], check=True)
        ip("-n", f"n{i}", "route", "replace", "10.9.0.0/24", "dev", "veth0", "proto", "kernel", "scope", "link",
           "src", f"10.9.0.{i + 1}", "congctl", CONTROL)  # a namespace's sysctl refuses all but the machine's default


def limit(rate: int) -> None:
    """Of Mbit/s."""
    for i in range(MACHINES):
        subprocess.run(["tc", "-n", f"n{i}", "qdisc", "replace", "dev", "veth0", "root", "tbf", "rate", f"{rate}mbit",
                        "burst", "4kb", "latency", "400ms"], check=True)


def machine_of(folder: str) -> Any:
    path = os.path.join(folder, "machine.json")
    Path(path).write_text(json.dumps({**measure(path, "processor"), **run_ranks("measure", 2, 1, folder)}))
    return planner.load(path)


def one_round(folder: str) -> List[Row]:
    rows: List[Row] = []
    for rate in RATES:
        limit(rate)
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
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(*arguments.rank[:2], *map(int, arguments.rank[2:]))
        return 0
    if not arguments.inside:
        return subprocess.run(["unshare", "-n", "-m", sys.executable, *sys.argv, "--inside"]).returncode
    seen = Path(arguments.seen) if arguments.seen else None
    rows = [Row(*row) for row in json.loads(seen.read_text())] if seen and seen.exists() else []
    connect()
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
