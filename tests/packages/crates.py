#!/usr/bin/env python3
"""The Rust crates as packaging/make_crates.py packs them, used by a program that knows the packed files alone. Ends
with one line, `N passed, N failed`."""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from support import ROOT, Tests, require, run

FILES = {
    "dc-sys": ["LICENSE", "README.md", "build.rs", "src/bindings.rs", "vendor/LICENSE", "vendor/meson.build",
               "vendor/include/dc_api.h", "vendor/src/libdc.map"],
    "dc": ["LICENSE", "README.md", "src/lib.rs", "tests/zero3.rs"],
}  # fmt: skip
MANIFEST = """[package]
name = "client"
version = "0.1.0"
edition = "2021"

[dependencies]
dc = { version = "0.1.0", features = ["vendored"] }
"""


def contents(crate: Path, files: list) -> None:
    with tarfile.open(crate) as archive:
        names = {member.name.split("/", 1)[1] for member in archive}
    require(names >= set(files), f"{crate.name} lacks {sorted(set(files) - names)}")
    require(not any(name.startswith("target/") for name in names), f"{crate.name} has what a build left")


def builds_again(folder: Path, nowhere: dict) -> None:
    """A changed source is built again by the feature `vendored`; a stand-in for meson writes what it is asked."""
    sys.path.insert(0, str(ROOT / "packaging"))
    from make_crates import stage

    workspace, meson, log = folder / "workspace", folder / "bin" / "meson", folder / "meson.log"
    stage(workspace)
    meson.parent.mkdir()
    meson.write_text(f'#!/bin/sh\necho $1 >>"{log}"\n[ $1 = compile ] || {{ mkdir "$4" && touch "$4/build.ninja"; }}\n',
                     encoding="utf-8")
    meson.chmod(0o755)
    later = time.time() + 60
    for _ in range(2):
        run("cargo", "build", "--quiet", "--offline", "--package", "dc-sys", "--features", "vendored", folder=workspace,
            PATH=f"{meson.parent}{os.pathsep}{os.environ['PATH']}", **nowhere)
        os.utime(workspace / "dc-sys" / "vendor" / "src" / "base" / "clock.c", (later, later))
    asked = log.read_text(encoding="utf-8").split()
    require(asked == ["setup", "compile", "compile"], f"meson was asked to {asked}")


def client(folder: Path, crates: Path) -> Path:
    """A program of its own, which trains by the library that cargo builds out of the packed sources."""
    (folder / "src").mkdir(parents=True)
    (folder / ".cargo").mkdir()
    (folder / "Cargo.toml").write_text(MANIFEST, encoding="utf-8")
    (folder / ".cargo" / "config.toml").write_text(
        f'[source.crates-io]\nreplace-with = "packed"\n[source.packed]\ndirectory = "{crates / "registry"}"\n',
        encoding="utf-8")
    example = ROOT / "examples" / "rust" / "mlp.rs"
    (folder / "src" / "main.rs").write_bytes(example.read_bytes())
    return folder


def blanks_in_paths(folder: Path) -> None:
    """pkg-config names a folder with a blank in it, as dc.pc of a wheel does."""
    sys.path.insert(0, str(ROOT / "packaging"))
    from make_crates import stage

    place, target = folder / "my projects", folder / "target-blanks"
    stage(place / "rust")
    (place / "libdc.so").touch()
    (place / "dc.pc").write_text("libdir=${pcfiledir}\nName: dc\nDescription: dc\nVersion: 0.1.0\n", encoding="utf-8")
    run("cargo", "build", "--quiet", "--offline", "--package", "dc-sys", folder=place / "rust",
        CARGO_TARGET_DIR=str(target), PKG_CONFIG_PATH=str(place))
    require(any(f"cargo:libdir={place}\n" in path.read_text(encoding="utf-8")
                for path in target.glob("debug/build/dc-sys-*/output")), f"{place} is not the library's folder")


def main() -> int:
    test = Tests()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        crates = folder / "crates"
        # No library is to be found: neither installed, nor of this checkout.
        nowhere = {"PKG_CONFIG": "false", "CARGO_TARGET_DIR": str(folder / "target")}
        test("make_crates.py packs both", lambda: run(sys.executable, "packaging/make_crates.py", crates))
        for crate, files in FILES.items():
            test(f"  what {crate} holds", lambda crate=crate, files=files: contents(
                next(crates.glob(f"{crate}-[0-9]*.crate")), files))
        test("a library whose path has a blank", lambda: blanks_in_paths(folder))
        test("DOCS_RS: the documentation needs no library", lambda: run(
            "cargo", "doc", "--quiet", "--offline", "--no-deps", "--package", "dc",
            folder=client(folder / "docs", crates), DOCS_RS="1", **nowhere))
        test("vendored: changed sources are built again", lambda: builds_again(folder, nowhere))
        program = folder / "client"
        test("vendored: a program that has the packed files alone trains", lambda: require(
            "loss" in run("cargo", "run", "--quiet", "--offline", folder=client(program, crates), **nowhere),
            "mlp.rs printed no loss"))
    return test.end()


if __name__ == "__main__":
    sys.exit(main())
