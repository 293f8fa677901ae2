#!/usr/bin/env python3
"""Runs a build, and keeps what ptxas says of each kernel that was compiled: registers of a thread, shared memory of a
block, bytes spilled. Kernels that were not compiled this time keep their lines.

    scripts/record_kernels.py FILE COMMAND...

Exits as the command does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, Tuple

Key = Tuple[str, str]
HEAD = f"{'kernel':44}{'card':>7}{'registers':>11}{'shared':>8}{'spilled':>9}"


def kept(file: Path) -> Dict[Key, str]:
    lines = file.read_text(encoding="utf-8").splitlines()[1:] if file.exists() else []
    return {(line.split()[0], line.split()[1]): line for line in lines}


def found(text: str) -> Dict[Key, str]:
    table = {}
    for part in re.split(r"Compiling entry function ", text)[1:]:
        name = re.match(r"'(\w+)' for '(\w+)'", part)
        used = re.search(r"Used (\d+) registers[^\n]*", part)
        if name is not None and used is not None:
            shared = re.search(r"(\d+) bytes smem", used[0])
            spilled = re.search(r"(\d+) bytes spill stores", part)
            table[name[1], name[2]] = (f"{name[1]:44}{name[2]:>7}{used[1]:>11}{shared[1] if shared else 0:>8}"
                                       f"{spilled[1] if spilled else 0:>9}")
    return table


def main() -> int:
    file = Path(sys.argv[1])
    done = subprocess.run(sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    sys.stdout.write(done.stdout)
    table = {**kept(file), **found(done.stdout)}
    if table:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([HEAD, *(table[key] for key in sorted(table))]) + "\n", encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
