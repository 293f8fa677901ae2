#!/usr/bin/env python3
"""docs/checklist.md has its 52 points in order, each with a verdict; check_docs.py checks that the things it names
exist. This also checks rules without their own check: the length of source files, and of lines that clang-format does
not break."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import List

from check_english import tracked_files

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {".c", ".h", ".cu", ".cpp", ".py", ".rs"}
SCRIPTS = ("Makefile", "meson.build", "scripts/gpu-check", "scripts/setup.sh", "bindings/rust/dc-sys/gen.sh")
MADE = ("bindings/rust/dc-sys/src/bindings.rs", "include/dc_api.h", "tests/abi/layout_", "tests/abi/prototypes_",
        "abi-check/0")
MOST, WIDEST = 400, 120  # lines, columns


def long_files() -> List[str]:
    texts = {name: (ROOT / name).read_text(encoding="utf-8").splitlines() for name in tracked_files()
             if (Path(name).suffix in SOURCES or name in SCRIPTS) and not name.startswith(MADE)}
    return [f"{name} has {len(lines)} lines, at most {MOST} are allowed" for name, lines in texts.items()
            if len(lines) > MOST] + [
        f"{name}:{number} has {len(line)} columns, at most {WIDEST} are allowed" for name, lines in texts.items()
        for number, line in enumerate(lines, 1) if len(line) > WIDEST]


def main() -> int:
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (\w+) \| (.*?) \|$",
                      (ROOT / "docs" / "checklist.md").read_text(encoding="utf-8"), re.M)
    faults = long_files()
    faults += [] if [int(row[0]) for row in rows] == list(range(1, 53)) else ["the points are not 1 to 52 in order"]
    faults += [f"{number}: {verdict!r} is no verdict" for number, _, verdict, _ in rows
               if verdict not in ("yes", "partly", "no")]
    counts = ", ".join(f"{sum(row[2] == verdict for row in rows)} {verdict}" for verdict in ("yes", "partly", "no"))
    print("\n".join(faults) or f"docs/checklist.md: {counts}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
