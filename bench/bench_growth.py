#!/usr/bin/env python3
"""How costs grow with parameters, ranks, layers, groups and models: each row over its range, the exponent fitted, a
plot of all. Under five minutes.

    bench_growth.py [--save] [ROW...]       --save writes results/growth-DATE.md and .svg"""
from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple

from machine import command, describe, foreign_now, save

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parent / "build" / "bench" / "bench" / "growth"
LIMIT = 1.1  # of exponents
# Other programs only ever add to a cost. So a row is measured until the least cost of no size falls any more, or until
# its time is over.
SETTLED_ROUNDS = 2
FALL = 0.99
ROW_SECONDS = 12

PARAMS = (100, 1000, 10_000, 50_000)
RANKS = (2, 4, 8, 16, 32, 64)
LAYERS = (10, 100, 300)
STEPS = (("step_plain", "PyTorch alone, Linear(32, 32)"), ("step_stage1", "stage 1"), ("step_stage3", "stage 3"),
         ("step_fsdp2", "FSDP2"))
PEERS = ("step_plain", "step_fsdp2")  # whose growth is not libdc's


class Row(NamedTuple):
    name: str
    what: str
    sizes: Sequence[int]
    unit: str    # of the whole cost: us, bytes
    model: str   # linear in the size, log2 of it, or constant
    torch: str = ""  # the row of growth_torch.py; none: of growth.c
    ranks: int = 1   # processes, of a row of PyTorch


ROWS = (
    Row("removal", "register and unregister a model's parameters", PARAMS, "us", "linear"),
    Row("ids", "the same with ids i << 44", PARAMS, "us", "linear"),
    Row("prefetch", "one fused prefetch of all parameters, waits, releases", (1000, 10_000, 50_000, 200_000), "us",
        "linear"),
    Row("blocks", "gathers into every other block of memory", (200, 2000, 20_000, 100_000), "us", "linear"),
    Row("groups", "`load_full_optimizer_state_dict` without PyTorch's part, a parameter a group", (300, 1200, 4800),
        "us", "linear", "groups"),
    Row("models", "100 forwards of one model beside others", (1, 10, 100, 300), "us", "constant", "models"),
    Row("splits", "bytes of a registered parameter on a rank, by ranks", (2, 4, 8, 16, 32), "bytes", "constant"),
    Row("tcp_barrier", "barrier over TCP, a rank", RANKS, "us", "log"),
    Row("tcp_all_reduce", "all-reduce of 1 KiB over TCP, a rank", RANKS, "us", "log"),
    Row("tcp_all_gather", "all-gather of 1 KiB a rank over TCP, a rank", RANKS, "us", "linear"),
    Row("shm_barrier", "barrier in shared memory, a rank", RANKS, "us", "linear"),
    Row("shm_memory", "bytes that a rank of processes holds", (2, 4, 8, 16, 32), "bytes", "linear"),
    Row("large", "peak of a parameter's step at stage 3, a rank of two", (10**7, 3 * 10**7, 10**8), "bytes", "linear"),
    *(Row(f"{name}_{ranks}", f"a step of {what}, {ranks} rank{'s' * (ranks - 1)}", LAYERS, "us", "linear", name, ranks)
      for ranks in (1, 2) for name, what in STEPS[ranks - 1 :]),
)


def numbers(*command: object) -> List[float]:
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    return [float(line) for line in done.stdout.split()]


def measure_once(row: Row) -> List[float]:
    if not row.torch:
        return [numbers(PROGRAM, row.name, size)[0] for size in row.sizes]
    launcher = ("-m", "libdc.run", "-n", row.ranks) if row.ranks > 1 else ()
    return numbers(sys.executable, *launcher, HERE / "growth_torch.py", row.torch, *row.sizes)


def measure(row: Row) -> Tuple[List[float], int]:
    """The least cost of each size, and the rounds that it took."""
    best, settled, rounds = [math.inf] * len(row.sizes), 0, 0
    until = time.monotonic() + ROW_SECONDS
    fewest = 1 if row.torch else 2  # programs of PyTorch's repeat themselves
    while settled < SETTLED_ROUNDS and (rounds < fewest or time.monotonic() < until):
        found = measure_once(row)
        settled = 0 if any(cost < FALL * least for cost, least in zip(found, best)) else settled + 1
        best, rounds = [min(pair) for pair in zip(found, best)], rounds + 1
        if row.unit == "bytes":
            break
    return best, rounds


def scale(row: Row, size: int) -> float:
    return math.log2(size) if row.model == "log" else float(size)


def exponent(row: Row, costs: Sequence[float]) -> float:
    """The slope of log(cost) over log(size); over log(log2 ranks) where the model is a logarithm. It is the median of
    the slopes between any two sizes (Theil and Sen's), which one disturbed size changes little."""
    points = [(math.log(scale(row, n)), math.log(cost)) for n, cost in zip(row.sizes, costs)]
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2))


def limit(row: Row) -> float:
    if row.torch in PEERS:
        return math.inf
    return LIMIT - 1 if row.model == "constant" else LIMIT


def one_each(row: Row, size: int, cost: float) -> str:
    each = cost if row.model != "linear" or row.name.startswith(("tcp", "shm")) else cost / size
    return f"{each:,.3g}" if each < 1000 else f"{each:,.0f}"


def table(found: Dict[str, List[float]]) -> str:
    lines = ["| row | what | sizes | cost of one (µs, or bytes) | model | exponent | at most |",
             "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        if row.name in found:
            costs = found[row.name]
            sizes = ", ".join(f"{n:,}" for n in row.sizes)
            ones = ", ".join(one_each(row, n, c) for n, c in zip(row.sizes, costs))
            lines.append(f"| {row.name} | {row.what} | {sizes} | {ones} | {row.model} | {exponent(row, costs):.2f} "
                         f"| {'-' if row.torch in PEERS else f'{limit(row):.1f}'} |")
    return "\n".join(lines)


def curve(points: List[Tuple[float, float]], left: float, top: float, title: str) -> str:
    """A small log-log plot: each point, and a line through them."""
    wide, high = 200.0, 110.0
    x = [math.log10(a) for a, _ in points]
    y = [math.log10(b) for _, b in points]
    decades = max(x[-1] - x[0], max(y) - min(y), 0.5)
    at = [(left + (a - x[0]) / decades * wide, top + high - (b - min(y)) / decades * high) for a, b in zip(x, y)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in at)
    return (f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="none" stroke="#bbb"/>'
            f'<polyline points="{path}" fill="none" stroke="#06c"/><g fill="#06c">{dots}</g>'
            f'<text x="{left}" y="{top - 5}">{title}</text>')


def plot(found: Dict[str, List[float]]) -> str:
    parts = []
    for i, row in enumerate(r for r in ROWS if r.name in found):
        points = list(zip([float(n) for n in row.sizes], found[row.name]))
        title = f"{row.name}: {exponent(row, found[row.name]):.2f} ({row.model})"
        parts.append(curve(points, 20.0 + i % 4 * 230, 30.0 + i // 4 * 150, title))
    size = f'width="950" height="{40 + -(-len(parts) // 4) * 150}"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
            f'<rect {size} fill="white"/>' + "\n".join(parts) + "</svg>\n")


def main() -> int:
    wanted = [a for a in sys.argv[1:] if not a.startswith("--")]
    rows = [row for row in ROWS if not wanted or row.name in wanted]
    found: Dict[str, List[float]] = {}
    rounds: Dict[str, int] = {}
    begin = time.monotonic()
    for row in rows:
        found[row.name], rounds[row.name] = measure(row)
        print(f"{row.name:<15} {rounds[row.name]:3} rounds  exponent {exponent(row, found[row.name]):5.2f}  "
              + "  ".join(f"{n}: {c:.4g}" for n, c in zip(row.sizes, found[row.name])), flush=True)
    late = [row.name for row in rows if exponent(row, found[row.name]) > limit(row)]
    page = (f"# Growth of costs\n\n`{command('bench/bench_growth.py')}`: {describe()}.\n\nOthers used "
            f"{foreign_now():.0%} of the machine at the end; all took {time.monotonic() - begin:.0f} s. Processor "
            f"time, the least of {min(rounds.values())} to {max(rounds.values())} rounds: until no size's least fell "
            f"any more, or for {ROW_SECONDS} s a row.\n\n{table(found)}\n\n"
            f"Above the limit: {', '.join(late) or 'none'}.\n")
    print(page)
    if "--save" in sys.argv:
        save("growth", page, plot(found))
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
