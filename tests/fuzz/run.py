#!/usr/bin/env python3
"""Fuzzing: run.py --seconds N shares N seconds among the coverage-guided targets and the random programs of
tests/programs (on simulated ranks and on threads); run.py --runs N gives each target N inputs, and no programs.

Each target begins with its seeds in tests/fuzz/seeds and the inputs that earlier runs kept in build/fuzz/found. An
input that breaks a promise stays in build/fuzz/broken; run the target on it to see the fault, mend it, and make the
input a seed."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "fuzz"
PROGRAMS = ("programs_sim", "programs_threads")
BATCH = 200  # random programs a process
# Each target with the bytes of its longest input.
TARGETS = {"options": 512, "tensor": 512, "rendezvous": 512, "tcp": 512, "calls": 512, "dumps": 2048, "state": 1024}
# Checks of pointers that take half of a build in the kernels of x86, which have them in suite asan.
UNCHECKED = "[alignment|null|pointer-overflow]\nsrc:*/kernels/x86/*\n"
FLAGS = (f"-fsanitize=fuzzer-no-link -fno-sanitize-recover=all -fno-omit-frame-pointer "
         f"-fsanitize-ignorelist={BUILD}/unchecked.txt")


def build() -> None:
    if not (BUILD / "build.ninja").exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        (BUILD / "unchecked.txt").write_text(UNCHECKED, encoding="utf-8")
        subprocess.run(["meson", "setup", str(BUILD), "-Dtests=false", "-Dfuzz=true", "-Dwerror=true",
                        "-Dbuildtype=debugoptimized", "-Doptimization=1", "-Db_lundef=false",
                        "-Db_sanitize=address,undefined",
                        f"-Dc_args={FLAGS}", "-Dc_link_args=-fsanitize=fuzzer-no-link"],
                       cwd=ROOT, check=True, env={**os.environ, "CC": "clang-14"}, stdout=subprocess.DEVNULL)
    built = subprocess.run(["meson", "compile", "-C", str(BUILD)], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    if built.returncode != 0:
        sys.exit(built.stdout)


def fuzz(target: str, limits: List[str], timeout: float) -> bool:
    found, broken = BUILD / "found" / target, BUILD / "broken"
    found.mkdir(parents=True, exist_ok=True)
    broken.mkdir(exist_ok=True)
    # The sanitizers' fixed shadow addresses fail under some kernels' address randomisation.
    command = ["setarch", "-R", str(BUILD / "tests" / "fuzz" / f"fuzz_{target}"), *limits,
               f"-max_len={TARGETS[target]}",
               "-len_control=0", "-timeout=25", "-print_final_stats=1", f"-artifact_prefix={broken}/{target}-",
               str(found), str(ROOT / "tests" / "fuzz" / "seeds" / target)]
    try:
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", timeout=timeout)
    except subprocess.TimeoutExpired:
        print(f"FAILED {target}: not done after {timeout:.0f} s", flush=True)
        return False
    runs = re.search(r"number_of_executed_units: (\d+)", done.stdout)
    covered = re.findall(r"cov: (\d+)", done.stdout)
    if done.returncode != 0:
        print("\n".join(done.stdout.splitlines()[-60:]))
    print(f"{'ok' if done.returncode == 0 else 'FAILED':7}{target:12}{runs[1] if runs else '?':>9} inputs, "
          f"{covered[-1] if covered else '?'} edges", flush=True)
    return done.returncode == 0


def random_programs(name: str, seconds: float) -> bool:
    """Batches from a seed that no run had before, until the time is over. A failure says its seed."""
    folder = ROOT / "build" / "gcc"
    if not (folder / "build.ninja").exists():
        subprocess.run(["meson", "setup", str(folder), "-Dwerror=true", "-Dtests=true", "-Ddebug=true",
                        "-Doptimization=g"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    program = f"tests/programs/{name}"
    subprocess.run(["ninja", "-C", str(folder), program], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    begin, first, done = time.monotonic(), int(time.time()) * 1000, 0
    while time.monotonic() - begin < seconds:
        environment = {"SIM_SEED": str(first + done), "SIM_PROGRAMS": str(BATCH), "SIM_ILLEGAL": str(BATCH)}
        batch = subprocess.run([str(folder / program)], env={**os.environ, **environment},
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if batch.returncode != 0:
            print(batch.stdout)
            print(f"FAILED {name}: SIM_SEED={first + done} SIM_PROGRAMS={BATCH} SIM_ILLEGAL={BATCH}", flush=True)
            return False
        done += BATCH
    print(f"ok     {name:16}{done:>5} legal and as many illegal programs, from seed {first}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--runs", type=int)
    arguments = parser.parse_args()
    build()
    alone = arguments.runs is not None
    share = max(1, arguments.seconds // (len(TARGETS) + len(PROGRAMS)))
    # The same inputs every time in `make test`, others in every long run.
    limits = [f"-runs={arguments.runs}", "-seed=1"] if alone else [f"-max_total_time={share}"]
    results = [fuzz(target, limits, 3600 if alone else share + 1200) for target in TARGETS]
    results += [] if alone else [random_programs(name, share) for name in PROGRAMS]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
