#!/usr/bin/env python3
"""Packs the Rust crates for a registry: make_crates.py FOLDER. Into dc-sys go the sources of the library, for its
feature `vendored`; into both the licence and the README. FOLDER then has the packed files, and in `registry` the
unpacked crates as a directory source of cargo, since dc is packed against dc-sys."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from project import ROOT, addresses, metadata

RUST = ROOT / "bindings" / "rust"
SOURCES = "LICENSE", "include", "meson.build", "meson_options.txt", "src"


def stage(workspace: Path) -> None:
    """The crates as they are packed."""
    shutil.copytree(RUST, workspace, ignore=shutil.ignore_patterns("target"))
    places = addresses(metadata())
    fields = "".join(f"{name.lower()} = {json.dumps(places[name])}\n" for name in ("HOMEPAGE", "REPOSITORY")
                     if places[name])
    for crate in ("dc-sys", "dc"):
        for path in (ROOT / "LICENSE", RUST / "README.md"):
            shutil.copy(path, workspace / crate)
        # Its examples are this checkout's.
        manifest = workspace / crate / "Cargo.toml"
        own = re.sub(r"\[\[example\]\]\n(?:.+\n)+\n?", "", manifest.read_text(encoding="utf-8"))
        own = re.sub(r"^license = .*\n", lambda line: line[0] + fields, own, flags=re.M)
        manifest.write_text(own, encoding="utf-8")
    vendor = workspace / "dc-sys" / "vendor"
    vendor.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, vendor / name)


def source_of(registry: Path) -> list[str]:
    return ["--config", 'source.crates-io.replace-with="packed"', "--config",
            f"source.packed.directory={json.dumps(str(registry))}"]


def pack(workspace: Path, crate: str, folder: Path) -> Path:
    registry = folder / "registry"
    subprocess.run(["cargo", "package", "--quiet", "--offline", "--no-verify", "--allow-dirty", *source_of(registry),
                    "--manifest-path", workspace / crate / "Cargo.toml", "--target-dir", workspace / "target"],
                   check=True)
    packed = next((workspace / "target" / "package").glob(f"{crate}-[0-9]*.crate"))
    with tarfile.open(packed) as archive:
        archive.extractall(registry)
    checksum = {"files": {}, "package": hashlib.sha256(packed.read_bytes()).hexdigest()}
    (registry / packed.stem / ".cargo-checksum.json").write_text(json.dumps(checksum), encoding="utf-8")
    return Path(shutil.copy(packed, folder))


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "registry").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        workspace = Path(name) / "rust"
        stage(workspace)
        for crate in ("dc-sys", "dc"):
            packed = pack(workspace, crate, folder)
            print(f"{packed.name}: {packed.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
