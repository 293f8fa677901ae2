#!/usr/bin/env python3
"""A family of kernels as C that holds its images:

    cuda_image.py NAME SOURCE PTX CUBIN_80 CUBIN_90 C DEPFILE NVCC PTXAS FLAGS...

nvcc makes PTX for compute capability 8.0, and ptxas machine code for 8 and for 9 out of it: no kernel asks for the
capability, so one PTX serves all. PTX is a language of which each version adds to the one before. The PTX is declared
to be CUDA 12.0's version, so ptxas refuses what came later, and a driver of any CUDA 12 or 13 can compile it. Machine
code is taken by drivers of the same major version of CUDA as ptxas, and by later ones. PTXAS may be `-`, nvcc's own.
No warning passes, nor a kernel that keeps a register in memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import List

PTX_VERSION = "8.0"
WARNINGS = ["-v", "-warn-spills", "-warn-lmem-usage", "-Werror"]


def lowered(ptx: str) -> str:
    """Without hints that are newer than the version; what is no hint is left for ptxas to refuse."""
    ptx = re.sub(r"^\t*\.pragma \"used_bytes_mask [^\n]*\n", "", ptx, flags=re.M)
    ptx, count = re.subn(r"^\.version \S+$", f".version {PTX_VERSION}", ptx, flags=re.M)
    assert count == 1, f"{count} versions in one PTX"
    return ptx


def embedded(name: str, file: str) -> str:
    """A file's bytes and a zero, which ends PTX; the assembler reads them, since a compiler takes minutes to."""
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
