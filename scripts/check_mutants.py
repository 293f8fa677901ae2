#!/usr/bin/env python3
"""Every fault of tests/mutants still applies to the sources as they are; `make mutants` puts them in and names the test
that finds each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def applies(patch: Path) -> bool:
    command = ["patch", "--dry-run", "--silent", "--force", "-p1", "-i", str(patch)]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def main() -> int:
    patches = sorted((ROOT / "tests" / "mutants").glob("*.patch"))
    stale = [patch.name for patch in patches if not applies(patch)]
    for name in stale:
        print(f"tests/mutants/{name} no longer applies: bring it up to the sources that it changes")
    print(f"{len(patches) - len(stale)} of {len(patches)} faults apply")
    return 1 if stale or not patches else 0


if __name__ == "__main__":
    sys.exit(main())
