#!/usr/bin/env python3
"""Freezes a release, once, at its tag: freeze.py LIBRARY, a debug build. Writes abi-check/VERSION (the header, the
version script, the baseline, and programs that use it) and tests/abi (the locks).
An old release's files are never written again."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import gate
from header import ROOT, layout_lock, prototype_lock, read

HEADER = ROOT / "include" / "dc_api.h"
# They see the public header alone.
CLIENTS = ["examples/*.c", "examples/c/*.c", "tests/support/harness.h", "tests/abi/test_results.c",
           "tests/api/test_bad_input.c", "tests/runtime/test_gather.c", "tests/runtime/test_offload.c",
           "tests/runtime/test_reduce.c"]


def main() -> int:
    library = Path(sys.argv[1]).resolve()
    text = HEADER.read_text(encoding="utf-8")
    major, minor = (text.split(f"#define DC_VERSION_{part} ")[1].split()[0] for part in ("MAJOR", "MINOR"))
    version = f"{major}.{minor}"
    folder, locks = ROOT / "abi-check" / version, ROOT / "tests" / "abi"
    (folder / "clients").mkdir(parents=True, exist_ok=True)
    shutil.copy(HEADER, folder)
    shutil.copy(ROOT / "src" / "libdc.map", folder)
    for pattern in CLIENTS:
        for source in ROOT.glob(pattern):
            shutil.copy(source, folder / "clients")
    gate.write(library, HEADER.parent, folder / "libdc.x86_64.abi")
    name = version.replace(".", "_")
    (locks / f"layout_{name}.c").write_text(layout_lock(HEADER, version), encoding="utf-8")
    (locks / f"prototypes_{name}.c").write_text(prototype_lock(HEADER, version), encoding="utf-8")
    table = ROOT / "abi-check" / "symbols-in-versions"
    known = table.read_text(encoding="utf-8") if table.exists() else "# FUNCTION INTRODUCED\n"
    names = {line.split()[0] for line in known.splitlines()}
    table.write_text(known + "".join(f"{name} {version}\n" for name in sorted(read(HEADER).functions)
                                     if name not in names), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
