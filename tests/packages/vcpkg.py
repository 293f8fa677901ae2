#!/usr/bin/env python3
"""The port of vcpkg, whose portfile is run with stand-ins for vcpkg's functions (vcpkg.cmake), and a CMake program that
finds the library as usage says. Ends with one line, `N passed, N failed`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from support import ROOT, STEP_BITS, Tests, require, run

INSTALLED = ["include/dc_api.h", "lib/libdc.so.0.1", "lib/pkgconfig/dc.pc", "share/libdc/copyright",
             "share/libdc/libdc-config.cmake", "share/libdc/usage", "tools/libdc/libdc"]


def port(folder: Path) -> None:
    manifest = json.loads((folder / "vcpkg" / "vcpkg.json").read_text(encoding="utf-8"))
    run("cmake", f"-DPORT_DIR={folder / 'vcpkg'}", f"-DVERSION={manifest['version']}", f"-DOUT={folder / 'out'}", "-P",
        "tests/packages/vcpkg.cmake")


def installed(packages: Path) -> None:
    missing = [name for name in INSTALLED if not (packages / name).exists()]
    require(not missing, f"it has no {missing}")
    require(not list((packages / "bin").glob("*")), "programs are left in bin")
    notices = (packages / "share" / "libdc" / "copyright").read_text(encoding="utf-8")
    require("Apache License" in notices and "Colin Percival" in notices, "copyright lacks a notice")
    require("0 broken" in run(packages / "tools" / "libdc" / "libdc", "doctor", LD_LIBRARY_PATH=str(packages / "lib")),
            "libdc doctor finds a fault")


def used(packages: Path, folder: Path) -> None:
    run("cmake", "-S", "tests/packages", "-B", folder, f"-DCMAKE_PREFIX_PATH={packages}", "-DLIBRARY=libdc::libdc",
        f"-DSOURCE={ROOT / 'examples' / 'step' / 'step.c'}")
    run("cmake", "--build", folder)
    require(STEP_BITS.fullmatch(run(folder / "client")), "step.c printed something else")


def main() -> int:
    test = Tests()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = folder / "out" / "packages"
        test("make_recipes.py", lambda: run(sys.executable, "packaging/make_recipes.py", folder, folder.as_uri()))
        test("the portfile, with stand-ins for vcpkg's functions", lambda: port(folder))
        test("  what it installs, and libdc doctor", lambda: installed(packages))
        test("  a program that finds it by CMake trains", lambda: used(packages, folder / "client"))
    return test.end()


if __name__ == "__main__":
    sys.exit(main())
