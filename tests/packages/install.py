#!/usr/bin/env python3
"""The installed library, shared and static, as C programs find it by pkg-config and by CMake, which takes its own
series alone. Ends with one line, `N passed, N failed`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from support import ROOT, STEP_BITS, Fault, Tests, needed, require, run

STEP = ROOT / "examples" / "step" / "step.c"


def trains(program: Path, **environment: str) -> None:
    require(STEP_BITS.fullmatch(run(program, **environment)), "step.c printed something else")


def by_pkg_config(prefix: Path, program: Path, static: bool) -> None:
    asked = ["pkg-config", "--cflags", "--libs", *(["--static"] if static else []), "dc"]
    flags = run(*asked, PKG_CONFIG_PATH=str(prefix / "lib" / "pkgconfig")).split()
    run("cc", STEP, *flags, "-o", program)
    require(("libdc.so.0.1" in needed(program)) != static, f"the program needs {sorted(needed(program))}")
    trains(program, LD_LIBRARY_PATH="" if static else str(prefix / "lib"))


def by_cmake(prefix: Path, folder: Path, target: str) -> None:
    run("cmake", "-S", Path(__file__).parent, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", f"-DSOURCE={STEP}",
        f"-DLIBRARY={target}")
    run("cmake", "--build", folder)
    require(("libdc.so.0.1" in needed(folder / "client")) == (target == "libdc::libdc"), "another library is linked")
    trains(folder / "client")


def through_a_link(prefix: Path, root: Path) -> None:
    """A root whose lib is a link to usr/lib, as distributions have it."""
    root.mkdir()
    run("cp", "-a", prefix, root / "usr")
    (root / "lib").symlink_to("usr/lib")
    by_cmake(root, root / "client", "libdc::libdc")


def refuses(prefix: Path, version: str, folder: Path) -> None:
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.18)\nproject(c C)\nfind_package(libdc {version} REQUIRED)\n",
        encoding="utf-8")
    try:
        run("cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    except Fault as fault:
        require("0.1.0" in str(fault), str(fault))
    else:
        raise Fault(f"find_package(libdc {version}) takes it")


def main() -> int:
    test = Tests()
    build, prefix = ROOT / "build" / "static", ROOT / "build" / "static-prefix"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        again = ["--reconfigure"] if (build / "build.ninja").exists() else []
        test("meson setup -Dstatic=true", lambda: run("meson", "setup", *again, build, "-Dtests=false", "-Dstatic=true",
                                                      f"--prefix={prefix}", "--libdir=lib", "--bindir=tools/bin"))
        test("meson install", lambda: run("meson", "install", "-C", build))
        test("the command finds its library, two folders up", lambda: run(prefix / "tools" / "bin" / "libdc", "info",
                                                                          LD_LIBRARY_PATH=""))
        moved = folder / "moved"
        test("the folder may be moved", lambda: run("cp", "-a", prefix, moved))
        test("pkg-config", lambda: by_pkg_config(prefix, folder / "shared", False))
        for target in ("libdc::libdc", "libdc::static"):
            test(f"CMake, {target}", lambda target=target: by_cmake(moved, folder / target[7:], target))
        test("CMake, by a link to its folder", lambda: through_a_link(moved, folder / "root"))
        for version in ("0.2", "1.0", "0.1.7"):
            (folder / version).mkdir()
            test(f"CMake does not take it for {version}", lambda version=version: refuses(moved, version,
                                                                                         folder / version))
        for shared in (prefix / "lib").glob("libdc.so*"):
            shared.unlink()  # or the linker would take it
        test("pkg-config --static", lambda: by_pkg_config(prefix, folder / "static-program", True))
    return test.end()


if __name__ == "__main__":
    sys.exit(main())
