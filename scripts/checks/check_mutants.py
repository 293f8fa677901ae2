#!/usr/bin/env python3
"""Every patch in tests/mutants applies to the current sources, and is in the folder of the module that it changes.
`make mutants` applies them and names the test that finds each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "tests" / "mutants"


def applies(patch: Path) -> bool:
    command = ["patch", "--dry-run", "--silent", "--force", "-p1", "-i", str(patch)]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def module_of(patch: Path) -> str:
    found = re.search(r"^--- a/src/(\w+)/", patch.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "?"


def main() -> int:
    patches = sorted(MUTANTS.rglob("*.patch"))
    faults = [f"{patch.relative_to(ROOT)} no longer applies: bring it up to the sources that it changes"
              for patch in patches if not applies(patch)]
    faults += [f"{patch.relative_to(ROOT)} changes src/{module_of(patch)}: put it into tests/mutants/{module_of(patch)}"
               for patch in patches if patch.relative_to(MUTANTS).parts[0] != module_of(patch)]
    for fault in faults:
        print(fault)
    print(f"{len(patches)} faults, {len(faults)} complaints")
    return 1 if faults or not patches else 0


if __name__ == "__main__":
    sys.exit(main())
