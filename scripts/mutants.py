#!/usr/bin/env python3
"""Puts each fault of tests/mutants into a copy of the sources and says which test finds it.

    scripts/mutants.py [NAME ...]       all of them, or those whose paths below tests/mutants begin so

A mutant is caught by a test that fails, crashes or does not end. Exits with 1 if one survives, with 2 if a patch no
longer applies or does not compile."""
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
# Those that find most of them come first; what comes before is not asked again.
TESTS = [
    "programs/programs_sim", "sim/sim_gather", "sim/sim_reduce", "sim/sim_large_gradients", "sim/sim_offload",
    *(f"runtime/test_{stem}" for stem in ("gather", "gather_types", "reduce", "large_gradients", "large_param",
                                         "grad_buffers", "offload")),
    "api/test_bad_input", "base/test_map", "base/test_tensor",
    *(f"device/{stem}" for stem in ("cpu/test_stream", "cpu/test_event", "cpu/test_device", "test_arena",
                                    "test_block_tree", "test_buffer")),
    "kernels/test_reduce",
    *(f"faults/test_{stem}" for stem in ("fork", "corruption", "system_calls", "rank_faults", "tcp_trust")),
    *(f"comm/{stem}" for stem in ("test_comm", "test_coll_group", "test_host_transport", "shm/test_rendezvous",
                                  "test_signature", "test_comm_errors", "test_deadlock", "external/test_callbacks",
                                  "tcp/test_stragglers", "tcp/bootstrap/test_handshake", "tcp/test_mesh",
                                  "tcp/test_relay", "tcp/tls/test_tls")),
    "optim/blockwise/test_muon", "abi/test_results", "conformance/conformance_finite_sim"]
LIMIT_S = 120


def name_of(mutant: Path) -> str:
    return str(mutant.relative_to(MUTANTS).with_suffix(""))


def copy_sources(to: Path) -> None:
    """Tracked files and new ones, in their present state."""
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


def build(out: Path) -> str:
    """'' or the compiler's words."""
    done = subprocess.run(["ninja", "-C", str(out), *(f"tests/{name}" for name in TESTS)], capture_output=True,
                          text=True)
    return "" if done.returncode == 0 else done.stdout[-2000:]


def first_report(output: str, code: int) -> str:
    for line in output.splitlines():
        found = re.match(r"(?:\[  ERROR   \] --- |ERROR: )?(seed \d+.*|.*rank \d+ of \d+: .*)", line)
        if found:
            return found[1]
    for line in output.splitlines():
        if line.startswith("[  FAILED  ] test_"):
            return line[len("[  FAILED  ] "):]
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def run(out: Path, test: str) -> str | None:
    """None if the test passes, else what it says."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # a file: what a hung test leaves behind holds no pipe
        try:
            environment = {**os.environ, "SIM_PROGRAMS": "3000", "SIM_ILLEGAL": "500"}
            code = subprocess.run([str(out / "tests" / test)], stdout=log, stderr=subprocess.STDOUT,
                                  timeout=LIMIT_S, env=environment).returncode
        except subprocess.TimeoutExpired:
            return f"not done after {LIMIT_S} s"
        log.seek(0)
        return None if code == 0 else first_report(log.read(), code)


def main(wanted: list[str]) -> int:
    mutants = [m for m in sorted(MUTANTS.rglob("*.patch")) if not wanted or name_of(m).startswith(tuple(wanted))]
    survivors, broken = [], []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="libdc-mutants-") as scratch:
        tree, out = Path(scratch) / "tree", Path(scratch) / "build"
        copy_sources(tree)
        subprocess.run(["meson", "setup", str(out), str(tree), "-Dwerror=false"], check=True,
                       stdout=subprocess.DEVNULL)
        failed = build(out)
        for test in TESTS:
            failed = failed or run(out, test) or ""
        if failed:
            print(f"without a mutant: {failed}", file=sys.stderr)
            return 2
        for mutant in mutants:
            failed = "" if patch(tree, mutant) else "the patch does not apply"
            failed = failed or build(out)
            if failed:
                broken.append(name_of(mutant))
                print(f"{name_of(mutant):52} BROKEN: {failed}", flush=True)
            else:
                caught = next(((test, said) for test in TESTS if (said := run(out, test)) is not None), None)
                if caught is None:
                    survivors.append(name_of(mutant))
                print(f"{name_of(mutant):52} " + (f"{caught[0]}: {caught[1]}" if caught else "SURVIVES"), flush=True)
            patch(tree, mutant, "-R")
    print(f"{len(mutants)} mutants, {len(mutants) - len(survivors) - len(broken)} caught, {len(survivors)} survive, "
          f"{len(broken)} broken, {time.monotonic() - begun:.0f} s")
    return 2 if broken else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
