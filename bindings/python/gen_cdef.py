"""Turns dc_api.h into a cffi cdef: gen_cdef.py HEADER CDEF [MODULE].

Comments, DC_API, attributes, extern "C" and preprocessor lines go; numeric #defines stay. MODULE gets the same text as
a Python constant for the dlopen mode."""

import re
import sys


def cdef_of(header: str) -> str:
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    header = re.sub(r"#ifdef __cplusplus.*?#endif", "", header, flags=re.S)
    header = re.sub(r"^(?!#)(.*?)\s*__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", r"\1", header, flags=re.M)
    lines = []
    for line in header.splitlines():
        number = re.match(r"#define\s+(DC_\w+)\s+(-?\d+|0x[0-9a-fA-F]+)[uU]?\s*$", line)
        if number:
            lines.append(f"#define {number[1]} {number[2]}")
        elif line.strip() and not line.startswith("#"):
            lines.append(re.sub(r"\bDC_API\s+", "", line.rstrip()))
    return "\n".join(lines) + "\n"


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        cdef = cdef_of(file.read())
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(cdef)
    if len(sys.argv) > 3:
        with open(sys.argv[3], "w", encoding="utf-8") as file:
            file.write(f'"""Made from dc_api.h."""\n\nCDEF = {cdef!r}\n')


if __name__ == "__main__":
    main()
