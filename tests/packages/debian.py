#!/usr/bin/env python3
"""Debian's packages. They are built in a chroot that has Build-Depends and no more, and read by lintian. In another
they are installed, and their own tests run: `libdc doctor` and a training step. Root and Debian's archive are needed.
Ends with one line, `N passed, N failed`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import List

from support import LINTIAN, ROOT, STEP_BITS, Tests, require, run

SUITE = "trixie"  # Debian 13, the first whose meson is new enough
BUILD_WITH = "debhelper,meson,pkgconf,python3:any,lintian"
RUN_WITH = "gcc,libc6-dev,pkgconf"
ADDRESS = "release@libdc.example"  # where pyproject.toml has none
INSIDE = """mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" sh -ec "$1" """


def chroot(root: Path, variant: str, packages: str) -> None:
    run("mmdebstrap", "--dpkgopt=force-unsafe-io", f"--variant={variant}", f"--include={packages}", SUITE, root)


def inside(root: Path, command: str) -> str:
    """A command's output, with the chroot's own processes and mounts."""
    return run("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", INSIDE, root, command,
               PATH="/usr/sbin:/usr/bin:/sbin:/bin", HOME="/root", LC_ALL="C.UTF-8", TMPDIR="/tmp")


def build(root: Path) -> None:
    place = root / "build"
    run(sys.executable, "packaging/make_debian.py", place, DEBEMAIL=ADDRESS)
    inside(root, "cd /build/libdc-0* && dpkg-buildpackage -us -uc")
    for package in packages(root):
        print(f"    {package.name:<36}{package.stat().st_size:>9} bytes")


def packages(root: Path) -> List[Path]:
    return sorted(path for path in (root / "build").glob("*.deb") if "dbgsym" not in path.name)


def install(root: Path, built: List[Path]) -> None:
    require([path.name.split("_")[0] for path in built] == ["libdc-dev", "libdc-tools", "libdc0.1"],
            f"the packages are {built}")
    for path in built:
        shutil.copy(path, root)
    inside(root, "dpkg -i /*.deb")


def main() -> int:
    test = Tests()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        builder, user = folder / "builder", folder / "user"
        test(f"a chroot of {SUITE} with Build-Depends", lambda: chroot(builder, "buildd", BUILD_WITH))
        test("  dpkg-buildpackage", lambda: build(builder))
        test("  lintian", lambda: print(inside(builder, f"lintian {' '.join(LINTIAN)} /build/*.changes")))
        test(f"a chroot of {SUITE} for a user", lambda: chroot(user, "apt", RUN_WITH))
        test("  the packages are installed, and lack nothing", lambda: install(user, packages(builder)))
        test("  libdc doctor", lambda: require("0 broken" in inside(user, "libdc doctor"), "it finds a fault"))
        step = (ROOT / "packaging" / "debian" / "tests" / "step").read_text(encoding="utf-8")
        test("  a training step", lambda: require(STEP_BITS.fullmatch(inside(user, step)), "step.c printed other bits"))
    return test.end()


if __name__ == "__main__":
    sys.exit(main())
