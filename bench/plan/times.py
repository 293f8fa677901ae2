#!/usr/bin/env python3
"""Times of real steps beside the planner, which knows this machine from two ranks alone:

    python bench/plan/times.py [--rounds 5] [--save]

A round measures the machine (libdc bench --machine, by processor time), and then trains on 2, 3, 4 and 8 ranks that
are processes. The step's time is the ranks' processor time over the cores, which is its time where all cores are busy
and no other program runs. So other programs of this machine change little. A row is the median of a round's
quotients."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import libdc
import numpy as np
from libdc import plan as planner
from libdc.plan.measure import free_address, measure
from machine import command, describe, save

LAYERS, WIDTH, STEPS, GRAPH = 4, 1024, 12, 1


class Case(NamedTuple):
    stage: int
    tokens: int
    transport: str
    ranks: int


CASES = [Case(*each) for each in itertools.product((0, 1, 3), (64, 256), ("shm", "tcp"), (2, 3, 4, 8))]


class Training:
    """A rank's layers, each a square product, by libdc's calls alone."""

    def __init__(self, comm: Any, case: Case, width: int = WIDTH) -> None:
        self.stage, self.context, self.width = case.stage, libdc.Context(), width
        self.x = np.ones((case.tokens, width), np.float32)
        self.grad = np.empty((width, width), np.float32)
        self.context.init(comm, {}, 1 << 20)
        numel = width * width
        own = -(-numel // comm.size) if case.stage > 0 else numel
        self.weights = [np.full(own, 1e-3, np.float32) for _ in range(LAYERS)]
        self.sums = [np.zeros(own, np.float32) for _ in range(LAYERS)]
        for i in range(LAYERS):
            if case.stage > 0:
                self.context.register_z3_param(i, (width, width), self.weights[i], self.sums[i], case.stage < 3)
            else:
                self.context.register_param(i, (width, width), self.weights[i], self.sums[i])
        register = self.context.register_graph_z3 if case.stage > 0 else self.context.register_graph_z0
        register(GRAPH, list(range(LAYERS)))

    def whole(self, i: int, following: int) -> Any:
        if self.stage == 0:
            return self.weights[i].reshape(self.width, self.width)
        gathered = self.context.allgather_param(None, GRAPH, i)
        if 0 <= following < LAYERS:
            self.context.prefetch_params_fused(GRAPH, [following])
        self.context.wait_allgather(None, GRAPH, i)
        return gathered.numpy()

    def release(self, i: int) -> None:
        if self.stage > 0:
            self.context.release_param(None, GRAPH, i)

    def step(self) -> None:
        context = self.context
        context.start_forward()
        kept = [self.x]
        for i in range(LAYERS):
            kept.append(kept[-1] @ self.whole(i, i + 1))
            self.release(i)
        context.end_forward()
        context.start_backward(True)
        incoming = kept[-1]
        for i in reversed(range(LAYERS)):
            weights = self.whole(i, i - 1)
            np.matmul(kept[i].T, incoming, out=self.grad)
            incoming = incoming @ weights.T
            context.reduce_grad(self.grad, GRAPH, i)
            self.release(i)
        context.end_backward(GRAPH)
        context.params_updated()


def train(comm: Any, case: Case) -> List[float]:
    """Processor seconds of all ranks, and the clock's, of a step."""
    training = Training(comm, case)
    for _ in range(3):
        training.step()
    comm.barrier()
    begin, wall = time.process_time(), time.perf_counter()
    for _ in range(STEPS):
        training.step()
    used = np.array([(time.process_time() - begin) / STEPS, (time.perf_counter() - wall) / STEPS])
    every = np.zeros(2 * comm.size)
    comm.all_gather(used, every)
    processor, seconds = every.reshape(-1, 2).sum(axis=0)
    training.context.cleanup()
    return [float(processor), float(seconds) / comm.size]


def rank(out: str, transport: str, ranks: int) -> None:
    """Trains each case of a group."""
    comm = libdc.init_comm()
    if transport == "tcp":
        comm = libdc.Comm.tcp(os.environ["TIMES_ADDRESS"], "times", comm.rank, comm.size, node="")
    results = [train(comm, case) for case in CASES if (case.transport, case.ranks) == (transport, ranks)]
    if comm.rank == 0:
        Path(out).write_text(json.dumps(results))
    comm.barrier()


def run_ranks(transport: str, ranks: int, folder: str) -> List[List[float]]:
    """Of each of the group's cases: see train()."""
    out = os.path.join(folder, "times.json")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TIMES_ADDRESS": free_address()}
    subprocess.run([sys.executable, "-m", "libdc.run", "-n", str(ranks), __file__,
                    "--rank", out, transport, str(ranks)], check=True, stdin=subprocess.DEVNULL, env=environment)
    return list(json.loads(Path(out).read_text()))


def forecast(case: Case, machine: Any, width: int = WIDTH) -> float:
    """Seconds of a step."""
    if case.transport == "tcp":
        machine = machine._replace(node_bytes_per_second=machine.network_bytes_per_second,
                                   node_latency_ns=machine.network_latency_ns)
    layer = {"shapes": [[width, width]], "flops": 2 * case.tokens * width * width, "repeat": LAYERS}
    model = planner.from_layers({"tokens": case.tokens, "layers": [layer]}, "products")
    options = planner.Options(ranks=case.ranks, stage=case.stage, dtype="float32", bucket=1 << 20,
                              heap=case.transport == "shm", optimizer=False)
    return planner.run(model, machine, options).step_ns / 1e9


def page_of(title: str, line: str, doc: str, rows: List[str]) -> str:
    """A page of results. line: the command; doc: its description, whose paragraphs after the first two are shown."""
    about = "\n\n".join(doc.split("\n\n")[2:])
    return f"# {title}\n\n`{line}`: {describe()}.\n\n{about}\n\n" + "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="a page in bench/results")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.rank[0], arguments.rank[1], int(arguments.rank[2]))
        return 0
    ratios: Dict[Case, List[float]] = {case: [] for case in CASES}
    seen: Dict[Case, List[List[float]]] = {case: [] for case in CASES}
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            path = os.path.join(folder, "machine.json")
            measure(path, "processor")
            machine = planner.load(path)
            groups = dict.fromkeys((case.transport, case.ranks) for case in CASES)
            results = {group: iter(run_ranks(*group, folder)) for group in groups}
            for case in CASES:
                processor, wall = next(results[case.transport, case.ranks])
                real, planned = processor / cores, forecast(case, machine)
                ratios[case].append(planned / real)
                seen[case].append([planned, real, wall])
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    rows = ["| stage | tokens | transport | ranks | forecast ms | measured ms | forecast / measured "
            "| by the clock ms |",
            "|---|---|---|---|---|---|---|---|"]
    within = 0
    for case in CASES:
        planned, real, wall = (statistics.median(column) * 1e3 for column in zip(*seen[case]))
        ratio = statistics.median(ratios[case])
        within += abs(ratio - 1) <= 0.15
        rows.append(f"| {case.stage} | {case.tokens} | {case.transport} | {case.ranks} | {planned:.2f} | {real:.2f} "
                    f"| {ratio:.2f} | {wall:.2f} |")
    rows.append(f"\n{within} of {len(CASES)} rows are within 15 %.")
    print("\n".join(rows))
    if arguments.save:
        save("planner", page_of("Forecast times", command("bench/plan/times.py"), __doc__, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
