#!/usr/bin/env python3
"""The public header compiles alone and twice, as C99 to C23 and C++11 to C++20, with every compiler that is there and
all warnings on. It has no type that another language cannot bind: no bool, int, long, enum, union, bit-field, variable
arguments or struct by value. size_t is a sizeof, and nothing else. Its structs begin with struct_size. Each initialiser
exists both as a macro and as a function. check_manual.py checks the comments."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "include" / "dc_api.h"
C = ["c99", "c11", "c17", "c2x"]
CXX = ["c++11", "c++17", "c++20"]
COMPILERS = {"gcc": C, "clang-14": C, "clang": C, "g++": CXX, "clang++-14": CXX, "clang++": CXX}
WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-Wconversion", "-Wshadow", "-Wundef", "-fsyntax-only"]
FORBIDDEN = {
    r"\b(bool|_Bool)\b": "bool; use int32_t",
    r"\b(short|int|long|unsigned)\b": "a type of no fixed size; use int32_t, int64_t or size_t",
    r"\bva_list\b|\.\.\.": "variable arguments",
    r"\bunion\b": "a union",
    r"\benum\s+\w+\s*[^{\s\w]|\benum\s+\w+\s+\w": "a type that is an enum; use int32_t",
    r"\b\w+\s*:\s*\d": "a bit-field",
}


def read() -> str:
    """The header without comments and strings, with its line breaks."""
    text = HEADER.read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.S)
    return re.sub(r'"[^"\n]*"', '""', text)


def structs(code: str) -> Dict[str, str]:
    """The bodies of structs that are not opaque."""
    return {match[1]: match[2] for match in re.finditer(r"typedef struct (\w+) \{(.*?)\n\} \1;", code, re.S)}


def initialisers(code: str) -> List[str]:
    """The name dc_x for each DC_X_INIT."""
    return [f"dc_{name.lower()}" for name in re.findall(r"#define DC_(\w+)_INIT\b", code)]


def check_compiles(code: str) -> List[str]:
    lines = ["#include <dc_api.h>", "#include <dc_api.h>", "int main(void) {"]
    lines += [f"  {name} {name}_ = {name.upper()}_INIT; (void){name}_;" for name in initialisers(code)]
    lines += ["  return dc_api_version() == DC_API_VERSION ? 0 : 1; }"]
    faults = []
    runs = 0
    with tempfile.TemporaryDirectory() as folder:
        for compiler, standards in COMPILERS.items():
            if shutil.which(compiler) is None:
                continue
            source = Path(folder) / ("main.c" if standards is C else "main.cc")
            source.write_text("\n".join(lines) + "\n", encoding="utf-8")
            for standard in standards:
                command = [compiler, f"-std={standard}", *WARNINGS, f"-I{HEADER.parent}", str(source)]
                command += ["-Wstrict-prototypes"] if standards is C else []
                done = subprocess.run(command, capture_output=True, text=True)
                runs += 1
                if done.returncode:
                    faults.append(f"{compiler} -std={standard}:\n{done.stderr}")
    return faults if runs else ["no compiler found"]


def check_types(code: str) -> List[str]:
    faults = []
    plain = re.sub(r'extern ""', "", re.sub(r"^\s*#.*$", "", code, flags=re.M))
    bodies = structs(code)
    names = set(bodies) | set(re.findall(r"typedef struct (\w+) \1;", code))
    values = rf"(?<!struct )(?<!\}} )\b({'|'.join(sorted(names))})\b(?!\s*(const\s*)?\*)"
    for number, line in enumerate(plain.splitlines(), 1):
        at = f"include/{HEADER.name}:{number}"
        faults += [f"{at}: {what}" for pattern, what in FORBIDDEN.items() if re.search(pattern, line)]
        if not line.lstrip().startswith("typedef struct"):
            faults += [f"{at}: {match[1]} by value" for match in re.finditer(values, line)]
    faults += [f"size_t {name}: a number of bytes is an int64_t" for name in re.findall(r"\bsize_t \*?(\w+)", plain)
               if name not in ("struct_size", "tensor_size", "event_size", "info_size", "dc_dtype_size")]
    for name, body in bodies.items():
        # Elements of an array need no struct_size if the call gets their size.
        strided = re.findall(rf"\b{name} \*\w+, size_t \w+_size\b", plain)
        if not re.match(r"\s*size_t struct_size;", body) and not strided:
            faults.append(f"{name}: must begin with size_t struct_size, or be passed with its size")
    return faults


def check_pairs(code: str) -> List[str]:
    faults = []
    macros = set(initialisers(code))
    functions = {name for name in re.findall(r"DC_API void (\w+)_init\((?:\w+) \*\w+, size_t struct_size\);", code)}
    faults += [f"{name.upper()}_INIT has no function {name}_init" for name in sorted(macros - functions)]
    faults += [f"{name}_init has no macro {name.upper()}_INIT" for name in sorted(functions - macros)]
    sized = {name for name, body in structs(code).items() if re.match(r"\s*size_t struct_size;", body)}
    faults += [f"{name}: has no {name.upper()}_INIT" for name in sorted(sized - macros)]
    return faults


def main() -> int:
    code = read()
    faults = check_compiles(code) + check_types(code) + check_pairs(code)
    print("\n".join(faults) or "the header compiles alone, and has no type that cannot be bound")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
