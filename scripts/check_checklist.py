#!/usr/bin/env python3
"""docs/checklist.md has its 52 points in order, each with a verdict, and names files and suites that are there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (\w+) \| (.*?) \|$",
                      (ROOT / "docs" / "checklist.md").read_text(encoding="utf-8"), re.M)
    suites = (ROOT / "scripts" / "run_tests.py").read_text(encoding="utf-8")
    faults = [] if [int(row[0]) for row in rows] == list(range(1, 53)) else ["the points are not 1 to 52 in order"]
    for number, _, verdict, shown in rows:
        if verdict not in ("yes", "partly", "no"):
            faults.append(f"{number}: {verdict!r} is no verdict")
        for name in re.findall(r"`([^`]+)`", shown):
            suite = re.fullmatch(r"make test SUITES=(\w+)", name)
            there = f'"{suite[1]}": ' in suites if suite else name == "make test" or (ROOT / name).exists()
            faults += [] if there else [f"{number}: there is no {name}"]
    counts = ", ".join(f"{sum(row[2] == verdict for row in rows)} {verdict}" for verdict in ("yes", "partly", "no"))
    print("\n".join(faults) or f"docs/checklist.md: {counts}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
