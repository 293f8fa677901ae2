#!/usr/bin/env python3
"""Applies each patch of tests/mutants to a copy of the sources, and says which test finds the fault.

    scripts/mutants.py [NAME ...]       all of them, or those whose paths below tests/mutants begin with NAME

A mutant is caught by a test that fails, crashes or does not end. Exits with 1 if one survives, with 2 if a patch no
longer applies or does not compile, or a NAME has none."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "tests" / "mutants"
# The tests that find most mutants come first.
TESTS = [
    "programs/programs_sim", "sim/sim_gather", "sim/sim_reduce", "sim/sim_large_gradients", "sim/sim_offload",
    *(f"runtime/test_{stem}" for stem in ("gather", "gather_types", "reduce", "large_gradients", "large_param",
                                         "grad_buffers", "offload", "replicas")),
    "api/test_bad_input", "base/test_map", "base/test_tensor",
    *(f"device/{stem}" for stem in ("cpu/test_stream", "cpu/test_event", "cpu/test_device", "test_arena",
                                    "test_block_tree", "test_buffer")),
    "kernels/test_reduce",
    *(f"faults/test_{stem}" for stem in ("fork", "corruption", "system_calls", "rank_faults", "tcp_trust")),
    *(f"comm/{stem}" for stem in ("test_comm", "test_coll_group", "test_host_transport", "shm/test_rendezvous",
                                  "test_signature", "test_comm_errors", "test_deadlock", "external/test_callbacks",
                                  "tcp/failure/test_stragglers", "tcp/bootstrap/test_handshake", "tcp/test_mesh",
                                  "tcp/relay/test_relay", "tcp/tls/test_tls", "levels/test_levels_errors")),
    "optim/blockwise/test_muon", "abi/test_results", "conformance/conformance_finite_sim"]


def name_of(mutant: Path) -> str:
    return str(mutant.relative_to(MUTANTS).with_suffix(""))


def copy_sources(to: Path) -> None:
    """Copies tracked and new files in their current state."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def patch(tree: Path, file: Path, *options: str) -> bool:
    done = subprocess.run(["patch", "-p1", "--quiet", "--no-backup-if-mismatch", *options, "-i", str(file)], cwd=tree,
                          capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
    return done.returncode == 0


def build(out: Path, tests: list[str]) -> None:
    done = subprocess.run(["ninja", "-C", str(out), *(f"tests/{name}" for name in tests)], capture_output=True,
                          text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:])


def tests_for(mutant: Path) -> list[str]:
    """All tests, the likeliest to find it first: the changed file's own test, its folder's, the others."""
    changed = re.search(r"^--- a/src/(.+)\.\w+$", mutant.read_text(encoding="utf-8"), re.M)
    file = Path(changed[1] if changed else "")
    return sorted(TESTS, key=lambda test: (Path(test) != file.parent / f"test_{file.name}",
                                           Path(test).parent != file.parent))


def first_report(output: str, code: int) -> str:
    for line in output.splitlines():
        found = re.match(r"(?:\[  ERROR   \] --- |ERROR: )?(seed \d+.*|.*rank \d+ of \d+: .*)", line)
        if found:
            return found[1]
    for line in output.splitlines():
        if line.startswith("[  FAILED  ] test_"):
            return line[len("[  FAILED  ] "):]
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def run(out: Path, test: str, limit_s: float | None) -> str | None:
    """Runs a test. Returns None if it passes, else its message."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # not a pipe, which a hung test's child may hold
        try:
            environment = {**os.environ, "SIM_PROGRAMS": "3000", "SIM_ILLEGAL": "500"}
            code = subprocess.run([str(out / "tests" / test)], stdout=log, stderr=subprocess.STDOUT,
                                  timeout=limit_s, env=environment).returncode
        except subprocess.TimeoutExpired:
            return f"not done after {limit_s:.0f} s"
        log.seek(0)
        return None if code == 0 else first_report(log.read(), code)


def limits_without_mutant(out: Path) -> dict[str, float]:
    """The seconds after which a test counts as hung: far more than it takes now on this machine."""
    limits = {}
    build(out, TESTS)
    for test in TESTS:
        begun = time.monotonic()
        if said := run(out, test, None):
            raise RuntimeError(f"{test}: {said}")
        limits[test] = 30 + 10 * (time.monotonic() - begun)
    return limits


def first_failure(tree: Path, out: Path, mutant: Path, limits: dict[str, float]) -> tuple[str, str]:
    """The test that finds the mutant, and its message; empty if none does."""
    if not patch(tree, mutant):
        raise RuntimeError("the patch does not apply")
    for test in tests_for(mutant):
        build(out, [test])
        if (said := run(out, test, limits[test])) is not None:
            return test, said
    return "", ""


def main(wanted: list[str]) -> int:
    every = sorted(MUTANTS.rglob("*.patch"))
    unknown = [name for name in wanted if not any(name_of(mutant).startswith(name) for mutant in every)]
    if unknown or not every:
        print(f"mutants: no name begins with {', '.join(unknown)}; they are paths below {MUTANTS}", file=sys.stderr)
        return 2
    mutants = [mutant for mutant in every if not wanted or name_of(mutant).startswith(tuple(wanted))]
    survivors, broken = [], []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="libdc-mutants-") as scratch:
        tree, out = Path(scratch) / "tree", Path(scratch) / "build"
        copy_sources(tree)
        subprocess.run(["meson", "setup", str(out), str(tree), "-Dwerror=false"], check=True,
                       stdout=subprocess.DEVNULL)
        try:
            limits = limits_without_mutant(out)
        except RuntimeError as reason:
            print(f"without a mutant: {reason}", file=sys.stderr)
            return 2
        for mutant in mutants:
            try:
                test, said = first_failure(tree, out, mutant, limits)
                survivors += [] if test else [name_of(mutant)]
                print(f"{name_of(mutant):52} " + (f"{test}: {said}" if test else "SURVIVES"), flush=True)
            except RuntimeError as reason:
                broken.append(name_of(mutant))
                print(f"{name_of(mutant):52} BROKEN: {reason}", flush=True)
            patch(tree, mutant, "-R")
    print(f"{len(mutants)} mutants, {len(mutants) - len(survivors) - len(broken)} caught, {len(survivors)} survive, "
          f"{len(broken)} broken, {time.monotonic() - begun:.0f} s")
    return 2 if broken else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
