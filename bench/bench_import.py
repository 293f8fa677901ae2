#!/usr/bin/env python3
"""Milliseconds that `import libdc` takes in a fresh process, beside Python's own start; the smallest and the middle of
21 runs, taken in turns."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Dict, List

CODE = {"python": "pass", "import cffi": "import _cffi_backend", "import libdc": "import libdc"}


def main() -> None:
    spent: Dict[str, List[float]] = {name: [] for name in CODE}
    for _ in range(21):
        for name, code in CODE.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            spent[name].append((time.perf_counter() - begin) * 1e3)
    for name, times in spent.items():
        print(f"{name:<14}{min(times):>7.1f} ms{statistics.median(times):>8.1f} ms")
    least = min(spent["import libdc"]) - min(spent["python"])
    print(f"libdc alone   {least:>7.1f} ms")


if __name__ == "__main__":
    main()
