#!/usr/bin/env python3
"""Measures a group over TCP by its number of ranks, which are processes of this machine. It prints a table of the time
and the connections of a meeting, and of the time of an all-reduce of 1 KiB.

    bench_ranks.py [--save] [RANKS...]      --save writes results/ranks-DATE.md and .svg; up to 1,024 ranks

Up to 64 ranks have two connections for each pair. More of them have those of an overlay, and connections for data that
the meeting's small collective and the all-reduce need. A rank's descriptors are its connections and three or four
others."""
from __future__ import annotations

import os
import subprocess
import sys
from typing import List

from bench_growth import HERE, curve
from machine import command, describe, foreign_now, save

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PROGRAM = HERE.parent / "build" / "bench" / "bench" / "ranks"
SECONDS = 1800


def measure(ranks: int) -> List[float]:
    done = subprocess.run([str(PROGRAM), str(ranks)], stdout=subprocess.PIPE, text=True, check=True,
                          timeout=SECONDS)
    return [float(number) for number in done.stdout.split()]


def table(sizes: List[int], found: List[List[float]]) -> str:
    lines = ["| ranks | meeting, s | of it a rank's processor time, ms | descriptors a rank | all-reduce, µs | of it a "
             "rank's processor time, µs |", "|---|---|---|---|---|---|"]
    lines += [f"| {ranks} | {meeting / 1e6:.2f} | {cpu / 1e3:.1f} | {files:.0f} | {wall:,.0f} | {own:.0f} |"
              for ranks, (meeting, cpu, files, wall, own) in zip(sizes, found)]
    return "\n".join(lines)


def plot(sizes: List[int], found: List[List[float]]) -> str:
    titles = {1: "meeting: a rank's processor time", 2: "descriptors a rank", 4: "all-reduce: a rank's processor time"}
    parts = [curve([(float(n), row[column]) for n, row in zip(sizes, found)], 20.0 + i * 230, 30.0, title)
             for i, (column, title) in enumerate(titles.items())]
    return ('<svg xmlns="http://www.w3.org/2000/svg" width="720" height="160" font-family="sans-serif" font-size="12">'
            '<rect width="720" height="160" fill="white"/>' + "\n".join(parts) + "</svg>\n")


def main() -> int:
    sizes = [int(word) for word in sys.argv[1:] if not word.startswith("--")] or list(SIZES)
    found: List[List[float]] = []
    load = os.getloadavg()[1]
    for ranks in sizes:
        found.append(measure(ranks))
        print(table([ranks], found[-1:]).splitlines()[-1], flush=True)
    page = (f"# Costs of a group by its ranks\n\n`{command('bench/bench_ranks.py')}`: {describe()}.\n\nOthers used "
            f"{foreign_now():.0%} of the machine at the end; the load was {load:.0f} before. Means over ranks; all of "
            f"them share the processors, so that times by the clock grow with all ranks' work.\n\n"
            f"{table(sizes, found)}\n")
    print(page)
    if "--save" in sys.argv:
        save("ranks", page, plot(sizes, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
