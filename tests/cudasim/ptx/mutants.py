#!/usr/bin/env python3
"""Faults put into the PTX, each of which a test of the kernels must find; without one, it passes. Tests of the kernels'
C++ cannot find them, since it has other code where a card has inline assembly, parameters and barriers.

    mutants.py TEXTS PROGRAMS

TEXTS is the folder of the texts, PROGRAMS that of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 200
PROGRAMS = {"elementwise": "kernels_elementwise", "rowops": "kernels_rowops", "attention": "kernels_attention",
            "attention_backward": "kernels_attention", "update": "optim_elementwise", "blockwise": "optim_shampoo",
            "matrix": "optim_muon", "kfac": "optim_kfac"}


class Mutant(NamedTuple):
    name: str
    family: str
    pattern: str
    replacement: str
    count: int = 0  # how many of its places, 0: all


TILE = r"(mma\.sync\S+\s+\{[^}]*\}, \{)(%r\d+),\s*(%r\d+)(,[^}]*\})"
CONTRACTED = r"mul\.rn\.f32 \s*(%f\d+), (%f\d+), (%f\d+);\n\s*add\.rn\.f32 \s*(%f\d+), (%f\d+), \1;"
MUTANTS = [
    Mutant("swapped registers of a tile", "attention", TILE, r"\1\3,\2\4"),
    Mutant("a swapped lane", "rowops", r"(shfl\.sync\.idx\.b32 \s*\S+, %r\d+, )%r\d+(, %r\d+, %r\d+;)", r"\g<1>0\2"),
    Mutant("a missing wait", "attention", r"cp\.async\.wait_all;", ""),
    Mutant("a wrong transposition", "attention", r"x4\.trans", "x4"),
    Mutant("a transposition too many", "attention", r"x4\.shared", "x4.trans.shared"),
    Mutant("copies that fill no zeros", "attention", r"(cp\.async\.cg\S+ \[%r\d+\], \[%rd\d+\], 16, )%r\d+",
           r"\g<1>16"),
    Mutant("a missing barrier", "rowops", r"bar\.sync\s+0;", ""),
    Mutant("swapped halves", "rowops", r"(cvt\.rn\.bf16x2\.f32 %r\d+, )(%f\d+), (%f\d+)", r"\1\3, \2"),
    Mutant("a parameter 8 bytes further", "elementwise", r"(dc__reduce_kernel_param_0)\+16\]", r"\1+24]"),
    Mutant("a lost addend", "rowops", r"fma\.rn\.f32( \s*%f\d+, %f\d+, %f\d+, )%f\d+;",
           r"fma.rn.f32\g<1>0f00000000;"),
    Mutant("a turned comparison", "elementwise", r"setp\.lt\.s64", "setp.gt.s64", 12),
    Mutant("swapped registers of a tile", "attention_backward", TILE, r"\1\3,\2\4"),
    Mutant("a wrong transposition", "attention_backward", r"x4\.trans", "x4"),
    Mutant("a missing wait", "attention_backward", r"cp\.async\.wait_all;", ""),
    Mutant("a missing barrier", "attention_backward", r"bar\.sync\s+0;", ""),
    Mutant("a swapped lane", "attention_backward", r"(shfl\.sync\.idx\.b32 \s*\S+, %r\d+, )%r\d+(, %r\d+, %r\d+;)",
           r"\g<1>0\2"),
    Mutant("a contracted product", "update", CONTRACTED, r"fma.rn.f32 \4, \2, \3, \5;"),
    Mutant("a square root that is left out", "update", r"sqrt\.rn\.f32", "mov.f32"),
    Mutant("another parameter's span", "update", r"%ctaid\.y", "%ctaid.x"),
    Mutant("a maximum without order", "update", r"atom\.global\.max\.u64(\s+%rd\d+, )(\[%rd\d+\]), (%rd\d+);",
           r"st.global.u64 \2, \3;"),
    Mutant("a contracted product", "blockwise", CONTRACTED, r"fma.rn.f32 \4, \2, \3, \5;"),
    Mutant("another block of the batch", "blockwise", r"%ctaid\.y", "%ctaid.x"),
    Mutant("a swapped lane", "matrix", r"(shfl\.sync\.idx\.b32 \s*\S+, %r\d+, )%r\d+(, %r\d+, %r\d+;)",
           r"\g<1>0\2"),
    Mutant("a swapped lane", "kfac", r"(shfl\.sync\.idx\.b32 \s*\S+, %r\d+, )%r\d+(, %r\d+, %r\d+;)", r"\g<1>0\2"),
    Mutant("a missing barrier", "kfac", r"bar\.sync\s+0;", ""),
]


def found(program: str, text: Path) -> str:
    """How the program fails with the text; "" if it does not."""
    try:
        done = subprocess.run([program], env={**os.environ, "CUDASIM_PTX": str(text)}, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"it does not end in {LIMIT_S} s"
    said = re.search(r"^(?:cudasim: |ERROR: )(.*)$", done.stdout, re.M)
    return "" if done.returncode == 0 else said[1] if said else f"status {done.returncode}"


def main() -> int:
    folder, programs = Path(sys.argv[1]), Path(sys.argv[2])
    survived = 0
    for mutant in MUTANTS:
        text = (folder / f"{mutant.family}.ptx").read_text(encoding="ascii")
        changed, places = re.subn(mutant.pattern, mutant.replacement, text, count=mutant.count)
        with tempfile.TemporaryDirectory() as made:
            path = Path(made) / f"{mutant.family}.ptx"
            path.write_text(changed, encoding="ascii")
            how = found(str(programs / f"cudasim_{PROGRAMS[mutant.family]}"), path) if places > 0 else ""
        survived += not how
        print(f"{mutant.name:32}{mutant.family:20}{places:>4} places: {how or 'SURVIVED'}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
