#!/usr/bin/env python3
"""libdc_cuda.so has, for each family, machine code for cards of capability 8.0 and 9.0, made by CUDA 12, which drivers
of CUDA 12 and later accept. It also has PTX that drivers of CUDA 12.0 can compile. check_image.py [LIBRARY]; without
it, the result of `make cuda`, if there is one."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path
from typing import List

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cuda_image import PTX_VERSION

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "cuda" / "libdc_cuda.so"
MACHINE = 190  # the machine number of cards in an ELF header
ABI = b"\x33\x07"  # ABI of CUDA 12's machine code; CUDA 13's is 0x41, 8


def families() -> int:
    text = (ROOT / "src" / "kernels" / "cuda" / "kernel_list.h").read_text(encoding="utf-8")
    begun = text[text.index("#define DC__CUDA_FAMILIES"):]
    return len(re.findall(r"\bFAMILY\(\w+\)", begun[:begun.index("\n\n")]))


def check_families(data: bytes, count: int) -> List[str]:
    """Checks the images of a library with `count` families."""
    found, capabilities = [], []
    for at in (match.start() for match in re.finditer(rb"\x7fELF\x02\x01\x01", data)):
        if struct.unpack_from("<H", data, at + 18)[0] == MACHINE and data[at + 7:at + 9] == ABI:
            capabilities.append(data[at + 48])  # the lowest byte of the header's flags
        elif struct.unpack_from("<H", data, at + 18)[0] == MACHINE:
            found.append("machine code that drivers of CUDA 12 do not take")
    for capability in (80, 90):
        if capabilities.count(capability) != count:
            found.append(f"{capabilities.count(capability)} images for sm_{capability}, must be {count}")
    heads = re.findall(rb"^\.version (\S+)\n\.target (\S+)$", data, re.M)
    found += [f"PTX {version.decode()} for {target.decode()}, must be {PTX_VERSION} for sm_80"
              for version, target in heads if (version.decode(), target) != (PTX_VERSION, b"sm_80")]
    return found + ([f"PTX of {len(heads)} families, must be {count}"] if len(heads) != count else [])


def main() -> int:
    library = Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT
    if library == BUILT and not BUILT.exists():
        print("the images of kernels: `make cuda` has not built any here")
        return 0
    found = check_families(library.read_bytes(), families())
    print("\n".join(f"{library.name}: {fault}" for fault in sorted(set(found))) or
          f"{library.name}: {families()} families, machine code of CUDA 12 for sm_80 and sm_90, PTX {PTX_VERSION}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
