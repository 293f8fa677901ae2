#!/usr/bin/env python3
"""How much of src/ the C tests run: line and branch coverage, by file and in all. Exits with 1 below the limits.

    scripts/coverage.py [--write] [--lines FILE]

--write keeps the figures in bench/results/coverage.txt; --lines shows the file's lines and branches that nothing ran.
The counters are clang's in continuous mode: they lie in mapped files, so a rank that is killed has counted too."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "coverage"
PROFILES = BUILD / "profiles"
RESULT = ROOT / "bench" / "results" / "coverage.txt"
LEAST = {"lines": 95.0, "branches": 85.0}
COUNTERS = "-fprofile-instr-generate -fcoverage-mapping -mllvm -runtime-counter-relocation"


def run(*command: str, **environment: str) -> None:
    """Runs a command, whose programs write their counters into PROFILES, even during setup and build. build_and_test()
    clears those before the tests, so that only tests count."""
    everywhere = {"LLVM_PROFILE_FILE": str(PROFILES / "%m%c.profraw")}
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **everywhere, **environment}, stdout=sys.stderr)


def build_and_test() -> None:
    if not (BUILD / "build.ninja").exists():
        run("meson", "setup", str(BUILD), "-Dtests=true", "-Dbuildtype=debug", "-Db_lundef=false",
            f"-Dc_args={COUNTERS}", "-Dc_link_args=-fprofile-instr-generate", f"-Dcpp_args={COUNTERS}",
            "-Dcpp_link_args=-fprofile-instr-generate", CC="clang-14", CXX="clang++-14")
    run("meson", "compile", "-C", str(BUILD))
    shutil.rmtree(PROFILES, ignore_errors=True)
    PROFILES.mkdir()
    run("meson", "test", "-C", str(BUILD), "--no-rebuild", "--timeout-multiplier=20", "--num-processes=3", "--quiet")
    run("llvm-profdata-14", "merge", "-o", str(BUILD / "all.profdata"), *map(str, PROFILES.glob("*.profraw")))


def llvm_cov(*arguments: str) -> str:
    """Runs llvm-cov on the library. Its objects are in every test as well, and are counted together."""
    command, *rest = arguments
    return subprocess.run(["llvm-cov-14", command, str(BUILD / "libdc.so"), *rest,
                           f"-instr-profile={BUILD / 'all.profdata'}"], cwd=ROOT, check=True, stdout=subprocess.PIPE,
                          text=True).stdout


def table() -> "tuple[List[str], List[str]]":
    """The report's lines, and the figures that are below their limits."""
    data = json.loads(llvm_cov("export", "-summary-only"))["data"][0]
    inside = {str(Path(entry["filename"]).resolve().relative_to(ROOT)): entry["summary"] for entry in data["files"]
              if Path(entry["filename"]).resolve().is_relative_to(ROOT / "src")}
    lines = [f"{'':40}{'lines':>7}{'missed':>8}{'%':>8}{'branches':>10}{'missed':>8}{'%':>8}"]
    total = {kind: [0, 0] for kind in LEAST}
    for name, summary in sorted(inside.items()):
        row = f"{name:40}"
        for kind, width in (("lines", 7), ("branches", 10)):
            count, covered = summary[kind]["count"], summary[kind]["covered"]
            total[kind][0] += count
            total[kind][1] += covered
            row += f"{count:>{width}}{count - covered:>8}{100 * covered / max(1, count) if count else 100:>8.2f}"
        lines.append(row)
    percent = {kind: 100 * covered / count for kind, (count, covered) in total.items()}
    lines.append("in all: " + ", ".join(f"{percent[kind]:.2f} % of {total[kind][0]} {kind} (at least {LEAST[kind]:.0f})"
                                       for kind in LEAST))
    return lines, [kind for kind in LEAST if percent[kind] < LEAST[kind]]


def missed(file: str) -> str:
    """Lines of the file that never ran, and branches of which one side was never taken."""
    keep, inside, found = [], False, False
    for line in llvm_cov("show", "-show-branches=count").splitlines():
        if line.endswith(".c:") or line.endswith(".h:"):
            inside = line.endswith(f"/{file}:")
            found = found or inside
        parts = line.split("|")
        never = len(parts) > 2 and parts[1].strip() == "0"
        half = "Branch (" in line and (": 0," in line or ": 0]" in line)
        if inside and (never or half):
            keep.append(line)
    if not found:  # else it would seem that nothing is missed
        sys.exit(f"coverage: --lines {file}: no source has this name")
    return "\n".join(keep)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--lines", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.lines is not None:
        print(missed(arguments.lines))
        return 0
    build_and_test()
    lines, low = table()
    print("\n".join(lines))
    if arguments.write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, text=True,
                                stdout=subprocess.PIPE).stdout.strip()
        RESULT.write_text("\n".join([f"make coverage ARGS=--write, {datetime.date.today()}, commit {commit}, on the "
                                     "processor of this machine; the C tests alone", *lines, ""]), encoding="utf-8")
    for kind in low:
        print(f"coverage: too few {kind}", file=sys.stderr)
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
