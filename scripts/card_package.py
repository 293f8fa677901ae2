#!/usr/bin/env python3
"""Installs the wheels of the library and of its CUDA plug-in, which `make wheel-cuda` and the kit have in build/wheel:
card_package.py FOLDER. They are unpacked, since a machine with a card may have no pip. Those of an earlier call are
removed, and nothing else is installed; the folder belongs in PYTHONPATH."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

WHEELS = Path(__file__).resolve().parent.parent / "build" / "wheel"
NAMES = ("libdc", "libdc_cuda")


def wheel_of(name: str) -> Path:
    found = sorted(WHEELS.glob(f"{name}-*.whl"))
    if len(found) != 1:
        sys.exit(f"{WHEELS} must have one wheel of {name}, has {', '.join(path.name for path in found) or 'none'}; "
                 "`make wheel-cuda` builds it")
    return found[0]


def unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = Path(archive.extract(member, folder))
            if member.external_attr >> 16 & 0o100 and path.is_file():  # zipfile does not set the mode of programs
                path.chmod(0o755)


def main() -> None:
    folder, wheels = Path(sys.argv[1]), [wheel_of(name) for name in NAMES]
    for earlier in filter(Path.is_dir, folder.glob("libdc*")):  # the folder may have other packages
        shutil.rmtree(earlier)
    for wheel in wheels:
        unpack(wheel, folder)
        print(wheel.name)


if __name__ == "__main__":
    main()
