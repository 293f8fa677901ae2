"""The cost of trust over TCP: that of a meeting of 64 ranks among 9,000 and more hostile connections, of checksums in
an all-gather of 64 MiB, and of TLS in all-reduces.

    python bench/bench_trust.py [--save]

The ranks of a meeting are threads and have a secret. A process of its own connects to rank 0 as fast as it can, from
before the other ranks come. Its connections say nothing, send garbage, or send half a handshake, and all stay open.
Quiet and hostile meetings take turns, and so do all-gathers with and without checksums and all-reduces with and without
TLS, whose 2 ranks are processes. Their processor time is that of both.
"""
from __future__ import annotations

import argparse
import os
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import machine
import numpy as np
from libdc import Comm

RANKS, BEFORE, HOSTILE, MIB = 64, 9_000, 16_000, 64
REDUCED_KIB = (64, 4 << 10, 64 << 10)
HELLOS = (b"", b"GET / HTTP/1.1\r\n\r\n", b"libdc/t\0\1\0\0\0")


def allow_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def attack(port: int) -> None:
    """Says when the first connections are made, and how many were in the end, when its input ends."""
    allow_files()
    held, made, ended = [], 0, threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while made < HOSTILE and not ended.is_set():
        stranger = socket.socket()
        try:
            stranger.settimeout(0.2)
            stranger.connect(("127.0.0.1", port))
            stranger.send(HELLOS[made % len(HELLOS)])
        except OSError:  # refused, or rank 0's backlog is full
            stranger.close()
            continue
        held.append(stranger)
        made += 1
        if made == BEFORE:
            print("go", flush=True)
    ended.wait()
    print(made, flush=True)


def meet(hostile: bool) -> Tuple[float, int]:
    """Seconds from the start of the other ranks until all have met, and the hostile connections made until then."""
    port, secret = machine.free_port(), secrets.token_hex(32)
    comms: List[Any] = [None] * RANKS

    def join(rank: int) -> None:
        comms[rank] = Comm.tcp(f"127.0.0.1:{port}", "bench", rank, RANKS, 600, secret)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(RANKS)]
    threads[0].start()
    attacker = None
    if hostile:
        attacker = subprocess.Popen([sys.executable, __file__, "--attack", str(port)], text=True, stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE)
        assert attacker.stdout is not None and attacker.stdout.readline() == "go\n"
    begin = time.monotonic()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, made = time.monotonic() - begin, 0
    if attacker is not None:
        made = int(attacker.communicate()[0])
    for comm in comms:
        comm.close()
    return seconds, made


Costs = Dict[bool, List[Tuple[float, float]]]  # of each round processor and elapsed seconds, without and with it


def print_costs(rounds: int, comms: Sequence[Comm], work: Callable[[Comm], Any]) -> None:
    """A rank's processor and elapsed seconds of each call, of the communicators in turn."""
    for turn in range(2 * (rounds + 1)):
        comm = comms[turn % 2]
        comm.barrier()
        before, begin = time.process_time(), time.monotonic()
        work(comm)
        print(time.process_time() - before, time.monotonic() - begin, flush=True)


def exchange(rank: int, port: int, rounds: int) -> None:
    """A rank of the all-gathers."""
    comms = [Comm.tcp(f"127.0.0.1:{port + way}", "bench", rank, 2, 600) for way in (0, 1)]
    comms[1].set_checksums(True)
    whole, part = np.zeros(MIB << 18, np.float32), np.ones(MIB << 17, np.float32)
    print_costs(rounds, comms, lambda comm: comm.all_gather(part, whole))


def reduce(rank: int, port: int, rounds: int) -> None:
    """A rank of the all-reduces."""
    comms = [Comm.tcp(f"127.0.0.1:{port + way}", "bench", rank, 2, 600, "a secret of the bench", tls=way == 1)
             for way in (0, 1)]
    for kib in REDUCED_KIB:
        data = np.ones(kib << 8, np.float32)
        print_costs(rounds, comms, lambda comm: comm.all_reduce(data))


def compare(work: str, rounds: int) -> List[Costs]:
    """Both ranks' processor seconds, and the slower one's elapsed seconds, of each size."""
    port = machine.free_port()
    ranks = [subprocess.Popen([sys.executable, __file__, work, str(rank), str(port), str(rounds)], text=True,
                              stdout=subprocess.PIPE) for rank in range(2)]
    told = [[tuple(map(float, line.split())) for line in rank.communicate()[0].splitlines()] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"bench_trust: a rank of {work} failed")
    sizes: List[Costs] = []
    for turn, (a, b) in enumerate(zip(*told)):
        if turn % (2 * (rounds + 1)) == 0:
            sizes.append({False: [], True: []})
        if turn % (2 * (rounds + 1)) > 1:
            sizes[-1][turn % 2 == 1].append((a[0] + b[0], max(a[1], b[1])))
    return sizes


def cells(costs: Costs, way: bool) -> str:
    return " | ".join(f"{statistics.median(c[i] for c in costs[way]) * 1e3:.2f} "
                      f"({min(c[i] for c in costs[way]) * 1e3:.2f})" for i in (0, 1))


def page(meetings: Dict[bool, List[Tuple[float, int]]], costs: Costs, encrypted: List[Costs], foreign: float) -> str:
    told = machine.describe()
    quiet, hostile = (statistics.median(seconds for seconds, _ in meetings[way]) for way in (False, True))
    made = min(number for _, number in meetings[True])
    lines = ["# The cost of trust over TCP", "", f"{told['date']}, {told['cpu']}, {told['cores']} cores, Python "
             f"{told['python']}, libdc {told['packages'].get('libdc', '')}, commit {told['commit']}; others used "
             f"{foreign:.0%} of the machine.", "", f"    {machine.command('python bench/bench_trust.py')}", "",
             f"A meeting of {RANKS} ranks, medians (least) of {len(meetings[True])}. At least {made} hostile "
             "connections were made before the last rank had met.", "", "| meeting | s |", "|---|---|"]
    for way, name in ((False, "quiet"), (True, "hostile")):
        lines.append(f"| {name} | {statistics.median(s for s, _ in meetings[way]):.2f} "
                     f"({min(s for s, _ in meetings[way]):.2f}) |")
    lines += ["", f"Hostile by quiet: {hostile / quiet:.2f}.", "",
              f"An all-gather of {MIB} MiB between 2 processes, medians (least) of {len(costs[True])}.", "",
              "| checksums | processor time of both, ms | elapsed, ms |",
              "|---|---|---|"]
    lines += [f"| {name} | {cells(costs, way)} |" for way, name in ((False, "off"), (True, "on"))]
    lines += ["", f"All-reduces between 2 processes, medians (least) of {len(encrypted[0][True])}.", "",
              "| KiB | TLS | processor time of both, ms | elapsed, ms | ratio of the times, median of the rounds |",
              "|---|---|---|---|---|"]
    for kib, each in zip(REDUCED_KIB, encrypted):
        ratios = " and ".join(f"{statistics.median(b[i] / a[i] for a, b in zip(each[False], each[True])):.2f}"
                              for i in (0, 1))
        lines += [f"| {kib} | {name} | {cells(each, way)} | {ratios if way else ''} |"
                  for way, name in ((False, "off"), (True, "on"))]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meetings", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--save", action="store_true", help="keep the page in bench/results")
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--exchange", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--reduce", type=int, nargs=3, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.attack is not None:
        return attack(a.attack)
    if a.exchange is not None:
        return exchange(*a.exchange)
    if a.reduce is not None:
        return reduce(*a.reduce)
    allow_files()
    others, usage = machine.Quiet(), [time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)]
    others.begin()
    meetings: Dict[bool, List[Tuple[float, int]]] = {False: [], True: []}
    for turn in range(2 * a.meetings):
        meetings[turn % 2 == 1].append(meet(turn % 2 == 1))
    costs, encrypted = compare("--exchange", a.rounds)[0], compare("--reduce", a.rounds)
    others.end()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() - usage[0] + after.ru_utime + after.ru_stime - usage[1].ru_utime - usage[1].ru_stime
    text = page(meetings, costs, encrypted, others.foreign(own))
    print(text)
    if a.save:
        name = time.strftime("trust-%Y-%m-%d.md", time.gmtime())
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", name), "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
