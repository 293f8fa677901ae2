#!/usr/bin/env python3
"""The header, the version script and the built library name the same functions; the library calls nothing that it
promises not to (printing, ending the process, the environment, signal handlers)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import libdc

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "abort", "exit", "_exit", "quick_exit", "__assert_fail", "getenv", "secure_getenv", "setenv", "signal", "sigaction",
    "printf", "puts", "putchar", "perror", "fprintf", "fputs", "fwrite", "vprintf", "vfprintf", "__printf_chk",
    "__fprintf_chk", "setlocale", "fesetround", "system", "popen", "atexit", "__cxa_atexit",
}  # fmt: skip


def declared() -> set:
    header = (ROOT / "include" / "dc_api.h").read_text(encoding="utf-8")
    return set(re.findall(r"\b(dc_\w+)\(", re.sub(r"/\*.*?\*/", "", header, flags=re.S)))


def mapped() -> set:
    text = (ROOT / "src" / "libdc.map").read_text(encoding="utf-8")
    return set(re.findall(r"^\s+(dc_\w+);", text, re.M))


def symbols(library: Path, *flags: str) -> list:
    out = subprocess.run(["nm", "-D", *flags, str(library)], check=True, capture_output=True, text=True).stdout
    return [line.split()[-1] for line in out.splitlines()]


def main() -> int:
    library = Path(libdc.library_dir()) / "libdc.so"
    header, script = declared(), mapped()
    exported = {name for name in symbols(library, "--defined-only") if not name.startswith("DC_")}
    versioned = {re.sub(r"@.*", "", name) for name in exported}
    faults = [f"{name}: in the header, not in src/libdc.map" for name in sorted(header - script)]
    faults += [f"{name}: in src/libdc.map, not in the header" for name in sorted(script - header)]
    faults += [f"{name}: exported, not in the header" for name in sorted(versioned - header)]
    faults += [f"{name}: in the header, not exported" for name in sorted(header - versioned)]
    faults += [f"{name}: has no version node" for name in sorted(exported) if "@@DC_" not in name]
    called = {re.sub(r"@.*", "", name) for name in symbols(library, "--undefined-only")}
    faults += [f"{name}: called by the library, which promises not to" for name in sorted(called & FORBIDDEN)]
    print("\n".join(faults) or f"{len(header)} functions, in the header, the version script and the library")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
