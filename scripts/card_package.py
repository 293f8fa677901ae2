#!/usr/bin/env python3
"""Puts the Python package together from the libraries of a build, without pip: card_package.py BUILD FOLDER. For a
machine that has PyTorch and cffi, and no headers of Python's: there is no compiled module, the package finds libdc.so
itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINDINGS = ROOT / "bindings"


def main() -> None:
    build, package = Path(sys.argv[1]), Path(sys.argv[2]) / "libdc"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(BINDINGS / "python" / "libdc", package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, BINDINGS / "python" / "gen_cdef.py", ROOT / "include" / "dc_api.h", os.devnull,
                    package / "_cdef.py"], check=True)
    shutil.copy(next(build.glob("libdc.so.*.*.*[0-9]")), package / "libdc.so.0.1")
    if (build / "libdc_cuda.so").exists():
        shutil.copy(build / "libdc_cuda.so", package)
    sources = sorted((BINDINGS / "torch" / "adapter").glob("*.c"))
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-fexceptions", "-fvisibility=hidden", "-O2",
                    "-std=gnu11", f"-I{ROOT / 'include'}", *sources, package / "libdc.so.0.1", "-ldl", "-pthread", "-o",
                    package / "libdc_torch.so"], check=True)


if __name__ == "__main__":
    main()
