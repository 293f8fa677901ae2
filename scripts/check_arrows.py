#!/usr/bin/env python3
"""Reads every #include under src/: a room may use rooms below it only, and those by their one header, ROOM/ROOM.h.
Bindings, examples and tools use the public header alone. Names FILE:LINE of each fault."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
ROOMS = ["base", "device", "kernels", "comm", "linalg", "transformer", "runtime", "optim", "planner", "api"]
OUTSIDE = ["bindings", "examples", "tools"]
PUBLIC = "dc_api.h"
SUFFIXES = {".c", ".h", ".cc", ".cpp", ".cu", ".cuh", ".inc"}


def sources(folder: Path) -> List[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())


def includes(path: Path) -> Iterator[Tuple[int, str, str]]:
    """(line, what stands after #include, the name in it or "")."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = re.match(r"\s*#\s*include\s+(.*)", line)
        if match:
            name = re.match(r'[<"]([^>"]+)[>"]', match[1])
            yield number, match[1].strip(), name[1] if name else ""


def found(path: Path, name: str) -> Optional[Path]:
    """The project's file that the compiler would take, which looks beside the including file first."""
    for folder in (path.parent, SRC, ROOT / "include"):
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


def room_fault(path: Path, text: str, name: str) -> str:
    """Why a file of a room may not include this; "" if it may."""
    room = path.relative_to(SRC).parts[0]
    if room not in ROOMS:
        return f"{room} is no room"
    if not name:
        return "an #include must name its file"
    target = found(path, name)
    if target is None:
        return "no such file" if text.startswith('"') else ""
    if target == ROOT / "include" / PUBLIC:
        return ""
    if SRC not in target.parents:
        return "it is not in src"
    other = target.relative_to(SRC).parts[0]
    if other not in ROOMS:
        return f"{other} is no room"
    if ROOMS.index(other) > ROOMS.index(room):
        return f"{other} is above {room}"
    if other != room and target != SRC / other / f"{other}.h":
        return f"it is inside {other}; {room} may include {other}/{other}.h"
    return ""


def outside_fault(path: Path, text: str, name: str) -> str:
    target = found(path, name) if name else None
    return f"only {PUBLIC} is public" if target is not None and SRC in target.parents else ""


def faults() -> Tuple[int, List[str]]:
    count = 0
    lines = []
    for folder, fault in [(SRC, room_fault), *((ROOT / name, outside_fault) for name in OUTSIDE)]:
        for path in sources(folder):
            for number, text, name in includes(path):
                count += 1
                reason = fault(path, text, name)
                if reason:
                    lines.append(f"{path.relative_to(ROOT)}:{number}: #include {text}: {reason}")
    return count, lines


def main() -> int:
    count, lines = faults()
    print("\n".join(lines) or f"{count} includes, all of them allowed")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
