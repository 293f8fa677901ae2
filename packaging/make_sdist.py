#!/usr/bin/env python3
"""The sources as a tarball: make_sdist.py FOLDER. It has PKG-INFO, so it is what PyPI calls an sdist. Its files are
git's, or, where there is no git, those of an unpacked tarball."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import List

from project import ROOT, metadata


def files() -> List[str]:
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-co", "--exclude-standard", "--deduplicate"]
        names = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
                 if not {"build", ".venv", "__pycache__"} & set(path.relative_to(ROOT).parts)]
    return sorted(name for name in names if (ROOT / name).is_file() and name != "PKG-INFO")


def make(folder: Path) -> Path:
    made = metadata()
    version = made.version
    folder.mkdir(parents=True, exist_ok=True)
    target, inside = folder / f"libdc-{version}.tar.gz", f"libdc-{version}"

    def owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(target, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        info = bytes(made.as_rfc822())
        member = tarfile.TarInfo(f"{inside}/PKG-INFO")
        member.size = len(info)
        archive.addfile(member, io.BytesIO(info))
        for name in files():
            archive.add(ROOT / name, f"{inside}/{name}", filter=owner)
    return target


def main() -> int:
    print(make(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
