#!/usr/bin/env python3
"""The sources as a tarball: make_sdist.py FOLDER. It has PKG-INFO, so it is what PyPI calls an sdist. Its files are
git's, or, where there is no git, those of an unpacked tarball. The same files give the same bytes again, since recipes
of other packages have its checksums: the time in it is SOURCE_DATE_EPOCH, or the commit's."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import List

from project import ROOT, metadata


def listed(*options: str) -> List[str]:
    command = ["git", "ls-files", "-z", "--exclude-standard", *options]
    text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [name for name in text.split("\0") if name]


def files() -> List[str]:
    if (ROOT / ".git").exists():
        others = listed("-o")
        if others:
            print(f"make_sdist: not in git, and packed: {', '.join(others)}", file=sys.stderr)
        names = listed("-co", "--deduplicate")
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
                 if not {"build", ".venv", "__pycache__"} & set(path.relative_to(ROOT).parts)]
    return sorted(name for name in names if (ROOT / name).is_file() and name != "PKG-INFO")


def seconds(names: List[str]) -> int:
    """The time that all files get: without git and SOURCE_DATE_EPOCH that of the newest."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return int(os.environ["SOURCE_DATE_EPOCH"])
    if (ROOT / ".git").exists():
        command = ["git", "log", "-1", "--format=%ct"]
        return int(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return max(int((ROOT / name).stat().st_mtime) for name in names)


def make(folder: Path) -> Path:
    made = metadata()
    version = made.version
    folder.mkdir(parents=True, exist_ok=True)
    target, inside = folder / f"libdc-{version}.tar.gz", f"libdc-{version}"
    names = [name for name in files() if (ROOT / name).resolve() != target.resolve()]
    time = seconds(names)

    def anywhere(member: tarfile.TarInfo) -> tarfile.TarInfo:
        """Without what is this machine's: owner, umask and the time of the checkout."""
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode = 0o755 if member.mode & 0o100 else 0o644
        member.mtime = time
        return member

    with open(target, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=time) as packed, \
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = bytes(made.as_rfc822())
        member = tarfile.TarInfo(f"{inside}/PKG-INFO")
        member.size = len(info)
        archive.addfile(anywhere(member), io.BytesIO(info))
        for name in names:
            archive.add(ROOT / name, f"{inside}/{name}", filter=anywhere)
    return target


def main() -> int:
    print(make(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
