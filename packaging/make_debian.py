#!/usr/bin/env python3
"""Makes Debian's source package: make_debian.py FOLDER. FOLDER then has the tarball of `make dist` under the name that
Debian gives it, and the unpacked sources with debian/, where dpkg-buildpackage runs. Where pyproject.toml has no
maintainer's address, it is that of DEBEMAIL, as with Debian's own tools."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from email.utils import formatdate
from pathlib import Path

from make_sdist import make
from project import ROOT, addresses, fill, metadata


def make_debian(folder: Path) -> Path:
    """The unpacked sources."""
    made = metadata()
    values = addresses(made)
    email = os.environ.get("DEBEMAIL", "root@localhost")
    values.update(VERSION=str(made.version), MAINTAINER=values["MAINTAINER"] or f"{made.authors[0][0]} <{email}>",
                  DATE=formatdate(int(os.environ["SOURCE_DATE_EPOCH"]) if "SOURCE_DATE_EPOCH" in os.environ else None))
    sources = folder / f"libdc-{made.version}"
    shutil.rmtree(sources, ignore_errors=True)
    tarball = make(folder)
    with tarfile.open(tarball) as archive:
        archive.extractall(folder)
    tarball.rename(folder / f"libdc_{made.version}.orig.tar.gz")
    debian = Path(shutil.copytree(ROOT / "packaging" / "debian", sources / "debian"))
    for name in ("changelog", "control"):
        path = debian / name
        path.write_text(fill(path.read_text(encoding="utf-8"), values), encoding="utf-8")
    return sources


def main() -> int:
    print(make_debian(Path(sys.argv[1]).resolve()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
