#!/usr/bin/env python3
"""Rooms may use rooms below them only, and bindings and examples only the public header."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["base", "device", "kernels", "comm", "runtime", "api"]  # each may include those before it
OUTSIDE = ["bindings", "examples"]


def includes(path: Path) -> list:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.M)


def faults() -> list:
    found = []
    for path in sorted((ROOT / "src").rglob("*.[ch]")):
        room = path.relative_to(ROOT / "src").parts[0]
        for name in includes(path):
            if name.startswith(".."):
                target = (path.parent / name).resolve().relative_to(ROOT / "src").parts[0]
            else:
                target = name.split("/")[0]
            if target in ROOMS and ROOMS.index(target) > ROOMS.index(room):
                found.append(f"{path.relative_to(ROOT)} includes {name}: {room} is below {target}")
    for folder in OUTSIDE:
        for path in sorted((ROOT / folder).rglob("*.[ch]")):
            for name in includes(path):
                if name.split("/")[0] in ROOMS or name.startswith("src/"):
                    found.append(f"{path.relative_to(ROOT)} includes {name}: only dc_api.h is public")
    return found


if __name__ == "__main__":
    found = faults()
    print("\n".join(found) or "all includes point down")
    sys.exit(bool(found))
