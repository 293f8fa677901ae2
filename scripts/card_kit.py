#!/usr/bin/env python3
"""Makes an archive with all that scripts/gpu-check needs on a machine with a card, so that nothing is built there:

    scripts/card_kit.py BUILD ARCHIVE [--simulated]

BUILD is a build of the target `card_programs`; ARCHIVE ends in .tar.xz, or in .tar. It has the programs without
debugging symbols, and the wheels of build/wheel, whose plug-in the programs use too. In .carried are cmocka and the
Python packages that a machine without a network lacks. It has the sources too, for machines on which the programs do
not start and must be built. build/gpu/kit.json says from what it was made, and which glibc the programs need.

--simulated: from a build with the simulated driver (tests/cudasim), whose programs and libraries replace those for a
card. The wheels are made from build/package and that plug-in, and of the Python packages only this Python's cffi is
carried. The rehearsal of the kit uses it where there is no card."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Dict, List

from card_package import NAMES, wheel_of
from mutants import copy_sources

ROOT = Path(__file__).resolve().parent.parent
NAME = "libdc-card-kit"
LIMIT = 60 << 20  # bytes of the archive
PYTHONS = ("3.12", "3.11")  # of machines with cards, in order of preference
CARRIED = ("cffi", "pycparser", "pytest", "iniconfig", "pluggy", "packaging", "pygments")
SIMULATED = ("libcuda.so.1", "libcublasLt.so.13", "libcusolver.so.12", "libnccl.so.2")
PLUGIN = "libdc_cuda.so"


def run(*command: object) -> str:
    return subprocess.run([str(word) for word in command], cwd=ROOT, check=True, stdout=subprocess.PIPE,
                          text=True).stdout


def conformance() -> List[str]:
    text = (ROOT / "tests" / "conformance" / "meson.build").read_text(encoding="utf-8")
    return re.findall(r"'(\w+)'", re.findall(r"conformance_chapters = \[(.*?)\]", text, re.S)[0])


def programs(build: Path, simulated: bool) -> Dict[str, Path]:
    """The paths of the programs, by their names in the kit."""
    if not simulated:
        return {path.name: path for path in sorted((build / "tests" / "card").glob("card_*")) if path.is_file()}
    folder = build / "tests" / "cudasim"
    found = {path.name.replace("cudasim_", "card_", 1): path for path in sorted(folder.glob("cudasim_*"))
             if path.is_file()}
    found.update((f"card_{chapter}", folder / f"conformance_{chapter}_cuda") for chapter in conformance())
    return {**found, "card_calls": folder / "cudasim_calls"}


def stripped(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    run("strip", "--strip-unneeded", "-o", target, source)


def newest_glibc(files: List[Path]) -> str:
    """The newest version of glibc's symbols that the files need."""
    wanted = re.findall(r"GLIBC_([\d.]+)", run("readelf", "--wide", "--version-info", *files))
    return max(wanted, key=lambda version: [int(part) for part in version.split(".")])


def carry_cmocka(folder: Path) -> None:
    """Copies cmocka with its paths below /usr, as in the Debian packages, so that pkg-config finds it under another
    root."""
    for variable, pattern in (("includedir", "cmocka*.h"), ("libdir", "libcmocka.so*"),
                              ("libdir", "pkgconfig/cmocka.pc")):
        place = Path(run("pkg-config", f"--variable={variable}", "cmocka").strip())
        for path in place.glob(pattern):
            target = folder / "cmocka" / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def carry_python(folder: Path) -> None:
    """Unpacks the packages for all Python versions. At import, Python selects the compiled module that fits."""
    for python in reversed(PYTHONS):
        with tempfile.TemporaryDirectory() as wheels:
            run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                "--python-version", python, "--platform", "manylinux_2_17_x86_64", "--dest", wheels, *CARRIED)
            for wheel in Path(wheels).glob("*.whl"):
                run(sys.executable, "-m", "zipfile", "-e", wheel, folder / "site")


def carry_own_cffi(folder: Path) -> None:
    for name in ("cffi", "pycparser"):
        for file in importlib.metadata.files(name) or []:
            if ".." not in file.parts:  # no commands
                target = folder / "site" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)


def carry_wheels(folder: Path, build: Path, simulated: bool) -> None:
    folder.mkdir(parents=True)
    if simulated:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps",
            "--config-settings=build-dir=build/package", "--wheel-dir", folder, ".")
        run(sys.executable, "packaging/make_cuda_wheel.py", folder, build / "tests" / "cudasim" / PLUGIN)
    else:
        for name in NAMES:
            shutil.copy(wheel_of(name), folder)


def fill(kit: Path, build: Path, simulated: bool) -> None:
    copy_sources(kit)
    carry_wheels(kit / "build" / "wheel", build, simulated)
    inside = kit / "build" / "gpu"
    folder = inside / "tests" / "card"
    placed = {folder / name: path for name, path in programs(build, simulated).items()}
    if simulated:
        placed.update((folder / name, build / "tests" / "cudasim" / name) for name in SIMULATED)
        carry_own_cffi(kit / ".carried")
    else:
        carry_python(kit / ".carried")
    for target, path in placed.items():
        stripped(path, target)
    with zipfile.ZipFile(next((kit / "build" / "wheel").glob("libdc_cuda-*.whl"))) as archive:
        (folder / PLUGIN).write_bytes(archive.read(f"libdc/{PLUGIN}"))
    carry_cmocka(kit / ".carried")
    made_of = {"date": datetime.date.today().isoformat(), "commit": run("git", "rev-parse", "HEAD").strip(),
               "simulated": simulated, "glibc": newest_glibc(list(placed)), "programs": len(placed)}
    (inside / "kit.json").write_text(json.dumps(made_of, indent=2) + "\n", encoding="utf-8")
    print(f"{len(placed)} programs and libraries, for glibc {made_of['glibc']} and later")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    options.archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / NAME, options.build.resolve(), options.simulated)
        whole = options.archive.with_name(f"{options.archive.name}.part")  # an interrupted call leaves the last archive
        with tarfile.open(whole, "w:xz" if options.archive.suffix == ".xz" else "w") as archive:
            archive.add(Path(folder) / NAME, NAME)
        whole.replace(options.archive)
    size = options.archive.stat().st_size
    print(f"{options.archive}: {size / 1048576:.1f} MiB")
    if size > LIMIT:
        print(f"{options.archive}: must be at most {LIMIT >> 20} MiB", file=sys.stderr)
    return int(size > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
