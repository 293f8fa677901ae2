#!/usr/bin/env python3
"""Makes the recipe of conda-forge and the port of vcpkg: make_recipes.py FOLDER [URL]. FOLDER then has the tarball of
`make dist`, and in conda and vcpkg what is submitted: with the version, checksums, and the tarball's address. URL is
the folder that has it; without it, PyPI's."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from make_sdist import make
from project import ROOT, addresses, fill, metadata

PYPI = "https://pypi.org/packages/source/l/libdc"


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    made = metadata()
    tarball = make(folder)
    data = tarball.read_bytes()
    url = sys.argv[2] if len(sys.argv) > 2 else PYPI
    values = {**addresses(made), "VERSION": str(made.version), "SUMMARY": made.description,
              "SDIST_URL": f"{url}/{tarball.name}", "SHA256": hashlib.sha256(data).hexdigest(),
              "SHA512": hashlib.sha512(data).hexdigest()}
    for name in ("conda", "vcpkg"):
        (folder / name).mkdir(exist_ok=True)
        for source in sorted((ROOT / "packaging" / name).iterdir()):
            text = fill(source.read_text(encoding="utf-8"), values)
            (folder / name / source.name).write_text(text, encoding="utf-8")
            print(folder / name / source.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
