#!/usr/bin/env python3
"""Measures all-gather and reduce-scatter of libdc over MPI beside the same library's own Iallgatherv and Ialltoallv,
in alternate rounds of one run, with each launcher of MPI that is here. Its program is mpi_collectives.c.

    bench_mpi.py [--save] [ROUNDS] [RANKS]      41 rounds, 2 ranks; --save writes results/mpi-DATE.md"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Dict, List

from bench_growth import HERE
from machine import describe, foreign_now, save

PROGRAM = HERE.parent / "build" / "bench" / "bench" / "mpi_collectives"
LAUNCHERS: Dict[str, List[str]] = {"mpirun.mpich": [], "mpirun.openmpi": ["--oversubscribe"]}
SECONDS = 1800


def measure(launcher: str, rounds: int, ranks: int) -> str:
    command = [launcher, *LAUNCHERS[launcher], "-n", str(ranks), str(PROGRAM), str(rounds)]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS, env=environment)
    return done.stdout


def main() -> int:
    numbers = [int(word) for word in sys.argv[1:] if not word.startswith("--")]
    rounds, ranks = (numbers + [41, 2][len(numbers):])[:2]
    load = os.getloadavg()[0]
    found = [measure(launcher, rounds, ranks) for launcher in LAUNCHERS if shutil.which(launcher)]
    if not found:
        print(f"bench_mpi: none of {', '.join(LAUNCHERS)} is here", file=sys.stderr)
        return 1
    page = (f"# libdc over MPI beside MPI alone\n\n`bench/bench_mpi.py --save {rounds} {ranks}`: {describe()}.\n\n"
            f"Others used {foreign_now():.0%} of the machine at the end; the load was {load:.0f} before. Times are "
            "medians of rank 0, and the ratio is the median of MPI's time over libdc's in paired rounds: above 1 libdc "
            "is faster. MPI alone is tested without a pause, so beside other work it loses more. Small tensors show "
            "the comparison of calls.\n\n" + "\n".join(found))
    print(page)
    if "--save" in sys.argv:
        save("mpi", page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
