"""libdc's all-gather and reduce-scatter between 2 processes, by shared memory and by TCP, beside Gloo's, which go by
TCP, and beside what the memory can do.

    python bench/bench_collectives.py

Sizes are those of the whole tensor. The calls take turns, one of each a round, each after a barrier, in another order
each round, and a call's time is that of the slower rank. The memory's share is (time of the necessary torch work) /
(libdc's time). The necessary work runs on both ranks at once: a copy of the whole tensor, or an addition of two halves.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist

import machine

HERE = os.path.dirname(os.path.abspath(__file__))
RANKS = 2
KIB = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536]
CALLS = ("libdc all-gather", "tcp all-gather", "gloo all-gather", "copy",
         "libdc reduce-scatter", "tcp reduce-scatter", "gloo reduce-scatter", "add")


def calls(comm: Any, tcp: Any, kib: int) -> Dict[str, Callable[[], Any]]:
    n = kib * 256
    rank = comm.rank
    full, other = torch.randn(n), torch.randn(n)
    part, out = torch.randn(n // RANKS), torch.empty(n // RANKS)
    a, b = full.chunk(2)
    # PyTorch 2.13 has new names for Gloo's part.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    counted = {
        "libdc all-gather": lambda: comm.all_gather(part, full),
        "tcp all-gather": lambda: tcp.all_gather(part, full),
        "gloo all-gather": lambda: gather(full, part),
        "copy": lambda: other.copy_(full),
        "libdc reduce-scatter": lambda: comm.reduce_scatter(full, out),
        "tcp reduce-scatter": lambda: tcp.reduce_scatter(full, out),
        "gloo reduce-scatter": lambda: scatter(out, full),
        "add": lambda: torch.add(a, b, out=out),
    }
    both = torch.stack([part * 0 + r for r in range(RANKS)]).flatten()
    part.fill_(rank)
    for name in CALLS[:3]:  # a fast wrong answer is worth nothing
        full.zero_()
        counted[name]()
        assert torch.equal(full, both), name
    for name in CALLS[4:7]:
        full.fill_(rank + 1)
        counted[name]()
        assert torch.equal(out, torch.full_like(out, 3.0)), name
    return counted


def measure(comm: Any, tcp: Any, kib: int, rounds: int) -> Dict[str, List[float]]:
    counted = calls(comm, tcp, kib)
    times: Dict[str, List[float]] = {name: [] for name in CALLS}
    for i in range(rounds + 3):
        for name in CALLS[i % len(CALLS):] + CALLS[:i % len(CALLS)]:
            call = counted[name]
            comm.barrier()
            begin = time.perf_counter()
            call()
            seconds = time.perf_counter() - begin
            if i >= 3:
                times[name].append(seconds)
    every = torch.empty(RANKS, len(CALLS), rounds, dtype=torch.float64)
    comm.all_gather(torch.tensor([times[n] for n in CALLS], dtype=torch.float64), every)
    slower = every.amax(0)
    return {name: slower[i].tolist() for i, name in enumerate(CALLS)}


def rank_main(rounds: int) -> None:
    import libdc
    torch.set_num_threads(1)
    comm = libdc.init_comm()
    tcp = libdc.Comm.tcp(f"127.0.0.1:{os.environ['TCP_PORT']}", "bench", comm.rank, comm.size)
    dist.init_process_group("gloo")
    rows = []
    for kib in KIB:
        count = rounds * (10 if kib <= 256 else 3 if kib <= 4096 else 1)
        times = measure(comm, tcp, kib, count)
        rows.append({"kib": kib, "rounds": count,
                     "us": {n: {"median": machine.spread(t)[0] * 1e6, "min": min(t) * 1e6} for n, t in times.items()}})
    comm.barrier()
    if comm.rank == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def markdown(rows: List[Dict[str, Any]], about: Dict[str, Any], foreign: float) -> str:
    packages = ", ".join(f"{k} {v}" for k, v in about["packages"].items())
    out = ["# All-gather and reduce-scatter between 2 processes of one machine", "",
           f"{about['date']}, {about['cpu']}, {about['cores']} cores, {packages}, commit {about['commit']}; others "
           f"used {foreign:.0%} of the machine.", "", f"    {about['command']}", "",
           "Microseconds, median (minimum), called from Python on float32 tensors; sizes are the whole tensor's. "
           "libdc's by shared memory, and by TCP as between machines, which is Gloo's way.", "",
           "| KiB | all-gather: libdc | libdc, TCP | gloo | gloo / libdc | gloo / TCP | memory's share | "
           "reduce-scatter: libdc | libdc, TCP | gloo | gloo / libdc | gloo / TCP | memory's share |",
           "|" + "---|" * 13]
    for r in rows:
        cells = [str(r["kib"])]
        for names in (CALLS[:4], CALLS[4:]):
            ours, tcp, theirs, floor = (r["us"][name]["median"] for name in names)
            cells += [f"{r['us'][name]['median']:.0f} ({r['us'][name]['min']:.0f})" for name in names[:3]]
            cells += [f"{theirs / ours:.1f}", f"{theirs / tcp:.1f}", f"{floor / ours:.0%}"]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=20, help="calls of each at the largest sizes, more at smaller ones")
    p.add_argument("--out", default=os.path.join(HERE, "results"))
    a = p.parse_args()
    if "RANK" in os.environ:
        rank_main(a.rounds)
        return 0
    about = {**machine.describe(), "command": machine.command("python bench/bench_collectives.py")}
    machine.wait_quiet()
    quiet, before = machine.Quiet(), os.times()
    quiet.begin()
    port, second = machine.free_port(), str(machine.free_port())
    ranks = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--rounds", str(a.rounds)], text=True,
                              env={**machine.environment(r, RANKS, port, f"bench-{os.getpid()}"), "TCP_PORT": second},
                              stdout=subprocess.PIPE if r == 0 else subprocess.DEVNULL) for r in range(RANKS)]
    answer = ranks[0].communicate()[0]
    if any([r.wait() for r in ranks]):
        return 1
    quiet.end()
    after = os.times()
    foreign = quiet.foreign(after.children_user + after.children_system - before.children_user - before.children_system)
    rows = json.loads(answer.splitlines()[-1])
    text = markdown(rows, about, foreign)
    os.makedirs(a.out, exist_ok=True)
    stem = os.path.join(a.out, f"collectives-{about['date'][:10]}")
    with open(stem + ".json", "w") as f:
        json.dump({"about": about, "foreign": foreign, "rows": rows}, f, indent=1)
    with open(stem + ".md", "w") as f:
        f.write(text)
    print(text + f"\nwritten: {stem}.json, {stem}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
