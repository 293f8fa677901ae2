#!/usr/bin/env python3
"""Model-checks the protocols of this folder with Spin: run.py [--long]. Exits with 1 on a fault.

Each line of RUNS is an exhaustive search that must find nothing. Each of MUTANTS is a search that must find its fault.
Together the searches must take every row of a model's table. --long adds the searches that take minutes."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, NamedTuple, Set, Tuple

HERE = Path(__file__).resolve().parent
SAFETY = ("-DSAFETY", "-DNOCLAIM")  # assertions, and no rank waits for ever
ENDS = ("-DNFAIR=8",)               # the formula `ends`, with weak fairness


class Run(NamedTuple):
    what: str
    model: str
    flags: Tuple[str, ...]
    names: str
    long: bool = False
    optimization: str = "-O1"


def comm(what: str, flags: Tuple[str, ...], names: str, long: bool = False) -> Run:
    return Run(what, "comm", flags, names, long)


def gather(what: str, flags: Tuple[str, ...], names: str, long: bool = False) -> Run:
    return Run(what, "gather", flags, names, long)


def reduce(what: str, flags: Tuple[str, ...], names: str, long: bool = False) -> Run:
    return Run(what, "reduce", flags, names, long)


def types(what: str, flags: Tuple[str, ...], names: str, long: bool = False) -> Run:
    return Run(what, "types", flags, names, long)


# Names that are left out are 0.
RUNS = [
    comm("2 ranks, two communicators of two collectives in two rounds; no wake-up is lost", SAFETY,
         "N=2 GENS=2 CALLS=2 ROUNDS=2 THREADS=1"),
    comm("3 ranks, one collective; no wake-up is lost", SAFETY, "N=3 GENS=1 CALLS=1 ROUNDS=1 THREADS=1"),
    comm("2 ranks, an abort at any time: later calls fail, memory is freed unread", SAFETY,
         "N=2 GENS=1 CALLS=2 ROUNDS=1 THREADS=1 SLICES=1 ABORT=1"),
    comm("2 ranks, an abort at any time: every rank ends", ENDS,
         "N=2 GENS=1 CALLS=1 ROUNDS=1 THREADS=1 SLICES=1 ABORT=1"),
    comm("2 ranks, calls that differ: every rank ends", ENDS,
         "N=2 GENS=1 CALLS=2 ROUNDS=1 THREADS=1 SLICES=1 MISMATCH=1"),
    comm("2 ranks, one killed at any time: the other ends", ENDS,
         "N=2 GENS=1 CALLS=1 ROUNDS=2 SLICES=1 KILL=1"),
    gather("1 rank, every call, for ever", SAFETY, "N=1 PARAMS=1 BLOCKS=2 QUEUE=2 KEPT_FIRST=1"),
    gather("2 ranks, three calls", SAFETY, "N=2 PARAMS=1 BLOCKS=2 QUEUE=2 LIMIT=3 FEW=1"),
    gather("1 rank, two parameters, five calls", SAFETY, "N=1 PARAMS=2 BLOCKS=2 QUEUE=2 LIMIT=5 FEW=1"),
    gather("2 ranks, a failure at any time: every rank ends", ENDS,
           "N=2 PARAMS=1 BLOCKS=1 QUEUE=2 LIMIT=1 FEW=1 ABORT=1"),
    gather("3 ranks, one call", SAFETY, "N=3 PARAMS=1 BLOCKS=1 QUEUE=2 LIMIT=1 FEW=1"),
    types("gathers in three types, in any order, for ever", SAFETY, ""),
    reduce("2 ranks, gradients for ever", SAFETY, "N=2 QUEUE=2"),
    reduce("2 ranks, a failure at any time: every rank ends", ENDS, "N=2 QUEUE=2 LIMIT=2 ABORT=1"),
    reduce("2 ranks, a failure at any time of a backward of three: every rank ends", ENDS,
           "N=2 QUEUE=2 LIMIT=3 ABORT=1", True),
    reduce("3 ranks, five gradients", SAFETY, "N=3 QUEUE=2 LIMIT=5", True),
    comm("2 ranks, an abort at any time, two collectives: every rank ends", ENDS,
         "N=2 GENS=1 CALLS=2 ROUNDS=1 THREADS=1 SLICES=1 ABORT=1", True),
    comm("2 ranks, an abort at any time, one of them killed: the other ends", ENDS,
         "N=2 GENS=1 CALLS=1 ROUNDS=1 SLICES=1 ABORT=1 KILL=1", True),
    gather("2 ranks, a failure at any time between three calls: every rank ends", ENDS,
           "N=2 PARAMS=1 BLOCKS=1 QUEUE=2 LIMIT=3 FEW=1 ABORT=1", True),
    gather("1 rank, two parameters, for ever", SAFETY, "N=1 PARAMS=2 BLOCKS=2 QUEUE=2 FEW=1", True),
    gather("2 ranks, four calls", SAFETY, "N=2 PARAMS=1 BLOCKS=2 QUEUE=2 LIMIT=4 FEW=1", True),
    gather("2 ranks, every call, three of them", SAFETY, "N=2 PARAMS=1 BLOCKS=2 QUEUE=2 LIMIT=3 KEPT_FIRST=1", True),
    gather("3 ranks, two calls", SAFETY, "N=3 PARAMS=1 BLOCKS=1 QUEUE=2 LIMIT=2 FEW=1", True),
]

PLAIN = "N=2 GENS=2 CALLS=2 ROUNDS=2 THREADS=1"
ABORTED = "N=2 GENS=1 CALLS=2 ROUNDS=1 THREADS=1 SLICES=1 ABORT=1"
ALONE = "N=1 PARAMS=1 BLOCKS=2 QUEUE=2 KEPT_FIRST=1"
TWO = "N=2 PARAMS=1 BLOCKS=2 QUEUE=2 LIMIT=3 FEW=1"
MUTANTS = [
    comm("an increment wakes no waiter", SAFETY, PLAIN + " MUTANT=1"),
    comm("the sleep does not compare the value first", SAFETY, PLAIN + " MUTANT=2"),
    comm("a wait ends one round early", SAFETY, PLAIN + " MUTANT=3"),
    comm("without time slices, an abort between a rank's check and its sleep", SAFETY,
         "N=2 GENS=1 CALLS=1 ROUNDS=1 THREADS=1 ABORT=1"),
    comm("a waiting rank does not check for the group's failure", ENDS, ABORTED + " MUTANT=5"),
    comm("the first rank to leave resets the channel", SAFETY, PLAIN + " MUTANT=6"),
    comm("no rank checks for dead processes", ENDS,
         "N=2 GENS=1 CALLS=1 ROUNDS=2 SLICES=1 KILL=1 MUTANT=7"),
    comm("a reader does not check for the failure first", SAFETY, ABORTED + " MUTANT=8"),
    comm("memory read in place is freed before all have read it", SAFETY, PLAIN + " MUTANT=9"),
    comm("after a failure memory is freed while others read", SAFETY, ABORTED + " MUTANT=10"),
    gather("released before the last reader", SAFETY, ALONE + " MUTANT=1"),
    gather("released before it arrived", SAFETY, ALONE + " MUTANT=2"),
    gather("gathered over what the caller still reads", SAFETY, ALONE + " MUTANT=3"),
    gather("an update does not invalidate copies", SAFETY, ALONE + " MUTANT=4"),
    gather("a wait for a gather returns at once", SAFETY, ALONE + " MUTANT=5"),
    gather("a rank's shard is written while others gather it", SAFETY, TWO + " MUTANT=6"),
    gather("an abort is not forwarded to a gather under way", ENDS,
           "N=2 PARAMS=1 BLOCKS=1 QUEUE=2 LIMIT=1 FEW=1 ABORT=1 MUTANT=7"),
    types("a gather casts any current copy", SAFETY, "MUTANT=1"),
    reduce("a slot is filled again before all have read it", SAFETY, "N=2 QUEUE=2 MUTANT=1"),
    reduce("a bucket is reduced before its copies are made", SAFETY, "N=2 QUEUE=2 MUTANT=2"),
    reduce("a backward ends before its gradients have arrived", SAFETY, "N=2 QUEUE=2 MUTANT=3"),
    reduce("a reduction ends before others have read", SAFETY, "N=2 QUEUE=2 MUTANT=4"),
    reduce("an abort is not forwarded to a reduction under way", ENDS, "N=2 QUEUE=2 LIMIT=3 ABORT=1 MUTANT=5"),
    reduce("a gradient overtakes an earlier one of another type", SAFETY, "N=2 QUEUE=2 MUTANT=6"),
]

ALL_NAMES = {
    "comm": ("GENS", "CALLS", "ROUNDS", "THREADS", "SLICES", "ABORT", "KILL", "MISMATCH", "MUTANT"),
    "gather": ("PARAMS", "BLOCKS", "QUEUE", "LIMIT", "ABORT", "KEPT_FIRST", "FEW", "MUTANT"),
    "reduce": ("QUEUE", "LIMIT", "ABORT", "MUTANT"),
    "types": ("MUTANT",),
}
TABLES = {"comm": "comm_table.h", "gather": "param_table.h", "types": "type_table.h"}


def search(run: Run) -> Tuple[str, int, Set[int], float]:
    """Spin's finding ('' for none), the number of states, the rows that were taken, seconds."""
    begin = time.monotonic()
    values: Dict[str, str] = {name: "0" for name in ALL_NAMES[run.model]}
    values.update(item.split("=") for item in run.names.split())
    with tempfile.TemporaryDirectory(prefix="libdc-spin-") as scratch:
        def step(*command: str) -> str:
            done = subprocess.run(command, cwd=scratch, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, timeout=3600)
            if done.returncode != 0 and command[0] != "./pan":
                raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}")
            return done.stdout

        defines = [f"-D{name}={value}" for name, value in values.items()]
        step("gcc", "-E", "-P", "-x", "c", *defines, str(HERE / f"{run.model}.pml"), "-o", "model.pml")
        step("spin", "-a", "model.pml")
        step("gcc", run.optimization, "-w", "-DCOLLAPSE", "-DMEMLIM=6000", *run.flags, "pan.c", "-o", "pan")
        output = step("./pan", "-m1000000", *(("-a", "-f", "-N", "ends") if run.flags == ENDS else ()))
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"(\d+) states, stored", output)
    if errors is None or states is None or "max search depth too small" in output or "out of memory" in output:
        return f"no end of the search:\n{output}", 0, set(), time.monotonic() - begin
    found = re.search(r"^pan:1: (.*)$", output, re.M)
    text = "" if errors[1] == "0" else found[1] if found else "an error"
    rows = {int(row) for row in re.findall(r"^row (\d+): ", output, re.M)}
    return text, int(states[1]), rows, time.monotonic() - begin


def main() -> int:
    chosen = [run for run in RUNS if "--long" in sys.argv[1:] or not run.long]
    wrong = 0
    taken: Dict[str, Set[int]] = {model: set() for model in TABLES}
    with ThreadPoolExecutor(2) as pool:
        for run, (found, states, rows, seconds) in zip(chosen, pool.map(search, chosen)):
            taken.setdefault(run.model, set()).update(rows)
            wrong += found != ""
            print(f"{'ok' if found == '' else 'FAILED':7}{run.model:7} {states:>9} states {seconds:6.1f} s  {run.what}"
                  + (f": {found}" if found else ""), flush=True)
        # A fault is found soon, so that the compiler would take longer than the search.
        mutants = [run._replace(optimization="-O0") for run in MUTANTS]
        for run, (found, states, _, _) in zip(mutants, pool.map(search, mutants)):
            caught = found != "" and not found.startswith("no end")
            wrong += not caught
            print(f"{'caught' if caught else 'MISSED':7}{run.model:7} {run.what}: {found}", flush=True)
    for model, file in TABLES.items():
        table = re.findall(r"^ROW\((.*)\)", (HERE / file).read_text(encoding="utf-8"), re.M)
        missing = [row for at, row in enumerate(table) if at not in taken[model]]
        wrong += bool(missing)
        print(f"{'FAILED' if missing else 'ok':7}{model:7} {len(table) - len(missing)} of {len(table)} rows of {file} "
              f"taken{': not ' + '; '.join(missing) if missing else ''}", flush=True)
    total = len(chosen) + len(MUTANTS) + len(TABLES)
    print(f"{total - wrong} passed, {wrong} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
