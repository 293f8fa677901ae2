#!/usr/bin/env python3
"""Makes C with the images of a family of kernels:

    cuda_image.py NAME SOURCE PTX CUBIN_80 CUBIN_90 C DEPFILE NVCC PTXAS FLAGS...

nvcc makes PTX for compute capability 8.0, from which ptxas makes machine code for 8 and 9: no kernel asks for the
capability, so one PTX serves all. Each version of PTX only adds to the one before. The PTX is declared as CUDA 12.0's
version, so ptxas refuses later features, and a driver of any CUDA 12 or 13 can compile it. Drivers of the same major
version of CUDA as ptxas, or of later ones, accept the machine code. PTXAS may be `-`, nvcc's own. Warnings are errors,
and so are kernels that spill registers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import List

PTX_VERSION = "8.0"
WARNINGS = ["-v", "-warn-spills", "-warn-lmem-usage", "-Werror"]


def lowered(ptx: str) -> str:
    """The PTX declared as PTX_VERSION, without hints that are newer. ptxas refuses anything else that is newer."""
    ptx = re.sub(r"^\t*\.pragma \"used_bytes_mask [^\n]*\n", "", ptx, flags=re.M)
    ptx, count = re.subn(r"^\.version \S+$", f".version {PTX_VERSION}", ptx, flags=re.M)
    assert count == 1, f"{count} versions in one PTX"
    return ptx


def embedded(name: str, file: str) -> str:
    """C with a file's bytes, and a zero that ends PTX. The assembler includes the file, since a compiler would take
    minutes for an array."""
    lines = [".pushsection .rodata", ".balign 64", f".globl {name}", f".hidden {name}", f"{name}:",
             f'.incbin \\"{Path(file).resolve()}\\"', ".byte 0", ".popsection"]
    return "__asm__(\n" + "\n".join(f'    "{line}\\n"' for line in lines) + ");\n"


def run(command: List[str]) -> None:
    if subprocess.run(command).returncode != 0:
        sys.exit(1)


def main() -> None:
    name, source, ptx, cubin_80, cubin_90, target, depfile, nvcc, ptxas, *flags = sys.argv[1:]
    run([nvcc, "-std=c++17", "-O3", "-Werror", "all-warnings", "-arch=compute_80", *flags, "-MD", "-MF", depfile,
         "-ptx", source, "-o", ptx])
    Path(ptx).write_text(lowered(Path(ptx).read_text(encoding="ascii")), encoding="ascii")
    own = [nvcc, "-cubin", f"-Xptxas={','.join(WARNINGS)}"]
    for cubin, capability in ((cubin_80, "sm_80"), (cubin_90, "sm_90")):
        run([*(own if ptxas == "-" else [ptxas, *WARNINGS]), f"-arch={capability}", ptx, "-o", cubin])
    Path(target).write_text(embedded(f"{name}_80", cubin_80) + embedded(f"{name}_90", cubin_90) +
                            embedded(f"{name}_ptx", ptx), encoding="ascii")


if __name__ == "__main__":
    main()
