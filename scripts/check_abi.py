#!/usr/bin/env python3
"""Compares structs, constants and signatures, as the C compiler laid them out, with the committed baseline of the
series: check_abi.py [--write]. What is there must stay; structs may only grow at the end. --write takes a change in,
which CHANGELOG.md must tell under `abi:`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import libdc
from libdc._lib import ffi, lib

BASELINE = Path(__file__).resolve().parent / "abi-0.1.txt"


def lines() -> list:
    if libdc.ffi_mode != "api":
        raise SystemExit("check_abi: needs the compiled module, whose layouts are the C compiler's")
    out = []
    for name in ffi.list_types()[0]:
        kind = ffi.typeof(name)
        if kind.kind == "struct":
            try:
                out.append(f"struct {name} size {ffi.sizeof(kind)}")
            except (ValueError, ffi.error):  # a handle
                continue
            out += [f"  {name}.{field} at {info.offset}: {info.type.cname}" for field, info in kind.fields]
        else:
            out.append(f"type {name}: {kind.cname}")
    for name in sorted(dir(lib)):
        value = getattr(lib, name)
        out.append(f"constant {name} = {value}" if isinstance(value, int) else f"function {name}: {ffi.typeof(value).cname}")
    return out


def main() -> int:
    now = lines()
    if sys.argv[1:] == ["--write"]:
        BASELINE.write_text("\n".join(now) + "\n", encoding="utf-8")
        return 0
    then = BASELINE.read_text(encoding="utf-8").splitlines()
    sizes = {name: int(size) for name, size in re.findall(r"^struct (\w+) size (\d+)$", "\n".join(now), re.M)}
    faults, kept = [], set(now)
    for line in then:
        grown = re.match(r"struct (\w+) size (\d+)$", line)
        if grown and sizes.get(grown[1], 0) >= int(grown[2]):
            continue
        if line not in kept and not line.startswith("constant DC_VERSION_") and "DC_API_VERSION" not in line:
            faults.append(f"gone or changed: {line}")
    print("\n".join(faults) or f"{len(then)} facts of {BASELINE.name} hold; {len(now) - len(then)} more are new")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
