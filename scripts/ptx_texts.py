#!/usr/bin/env python3
"""Packs the PTX that the simulated driver executes beside the kernels' C++ (tests/cudasim/ptx), as nvcc emitted it. It
is checked in, so that machines without nvcc can run it:

    scripts/ptx_texts.py pack BUILD       from a build of `make cuda` into tests/cudasim/ptx/texts.tar.xz
    scripts/ptx_texts.py unpack FOLDER    FAMILY.ptx of each family

The archive notes for each family a digest of its sources, so that scripts/checks/check_ptx.py sees whether they have
changed."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Dict, Set

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE = ROOT / "tests" / "cudasim" / "ptx" / "texts.tar.xz"
DIGESTS = "digests.json"
KERNELS = ROOT / "src" / "kernels"
FAMILIES = re.findall(r"^ +FAMILY\((\w+)\)", (KERNELS / "cuda" / "kernel_list.h").read_text(encoding="utf-8"), re.M)


def included(source: Path, found: Set[Path]) -> Set[Path]:
    """The source and the headers of src/kernels that it includes, directly or not."""
    found.add(source)
    for name in re.findall(r'^#include "kernels/([^"]+)"', source.read_text(encoding="utf-8"), re.M):
        if KERNELS / name not in found:
            included(KERNELS / name, found)
    return found


def digest(family: str) -> str:
    """A digest of the family's code. Comments and blanks are left out, since they do not change PTX."""
    source = next((KERNELS / "cuda").rglob(f"{family}.cu"))
    whole = hashlib.sha256()
    for path in sorted(included(source, set())):
        code = re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(encoding="utf-8"), flags=re.S)
        whole.update(f"{path.relative_to(KERNELS)}\n{' '.join(code.split())}\n".encode())
    return whole.hexdigest()


def pack(build: Path) -> None:
    """Packs the PTX, unless the sources are unchanged: then another nvcc or folder would only change names."""
    digests = {family: digest(family) for family in FAMILIES}
    if ARCHIVE.exists() and noted() == digests:
        return
    files: Dict[str, bytes] = {f"{family}.ptx": (build / "src/kernels/cuda" / f"{family}.ptx").read_bytes()
                               for family in FAMILIES}
    files[DIGESTS] = (json.dumps(digests, indent=2) + "\n").encode()
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)  # no time stamp, so that equal texts give equal bytes
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def noted() -> Dict[str, str]:
    with tarfile.open(ARCHIVE) as archive:
        file = archive.extractfile(DIGESTS)
        assert file is not None
        return dict(json.load(file))


def unpack(folder: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        for name in (f"{family}.ptx" for family in FAMILIES):
            file = archive.extractfile(name)
            assert file is not None
            (folder / name).write_bytes(file.read())


def main() -> int:
    {"pack": pack, "unpack": unpack}[sys.argv[1]](Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
