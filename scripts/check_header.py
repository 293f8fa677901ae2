#!/usr/bin/env python3
"""The public header alone compiles as C99, C11 and C++ with both compilers, all warnings on; every function says since
when it is there, and every options struct has its initialiser twice, as a macro and as a function."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include" / "dc_api.h"
COMPILERS = [
    ["gcc", "-std=c99", "-xc"], ["gcc", "-std=c11", "-xc"], ["clang-14", "-std=c99", "-xc"],
    ["g++", "-std=c++11", "-xc++"], ["clang-14", "-std=c++17", "-xc++"],
]  # fmt: skip
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wundef", "-Werror", "-fsyntax-only"]


def compiler_faults() -> list:
    faults = []
    with tempfile.NamedTemporaryFile("w", suffix=".c") as source:
        source.write("#include <dc_api.h>\n#include <dc_api.h>\nint main(void) { return (int)dc_api_version(); }\n")
        source.flush()
        for compiler in COMPILERS:
            done = subprocess.run([*compiler, *WARNINGS, f"-I{HEADER.parent}", source.name], capture_output=True, text=True)
            if done.returncode:
                faults.append(f"{' '.join(compiler)}:\n{done.stderr}")
    return faults


def text_faults() -> list:
    text = HEADER.read_text(encoding="utf-8")
    faults = []
    comment = ""
    for match in re.finditer(r"/\*\*.*?\*/|^DC_API [^;]*;", text, re.S | re.M):
        if match[0].startswith("/**"):
            comment = match[0]
        elif "Since 0." not in comment:
            faults.append(f"{match[0].split('(')[0].split()[-1]}: its comment has no 'Since'")
    for name in re.findall(r"#define DC_(\w+)_INIT ", text):
        if f"dc_{name.lower()}_init(" not in text:
            faults.append(f"DC_{name}_INIT has no function of the same name")
    return faults


if __name__ == "__main__":
    found = compiler_faults() + text_faults()
    print("\n".join(found) or "the header compiles alone, and is complete")
    sys.exit(bool(found))
