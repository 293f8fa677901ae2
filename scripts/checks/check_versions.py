#!/usr/bin/env python3
"""The version is the same everywhere: meson.build's, of which the wheel and dc.pc are made, in the header, the crates,
their lock file and the newest entry of CHANGELOG.md; and the series, its first two numbers before 1.0, wherever a file
names the library, its symbols' node or the frozen surface."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Callable, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "meson.build", r"^project\('libdc'.*? version: '([\d.]+)'"
VERSIONS: Dict[str, str] = {
    "pyproject.toml": r'"libdc-cuda==([\d.]+)"',
    "bindings/rust/dc-sys/Cargo.toml": r'^version = "([\d.]+)"',
    "bindings/rust/dc/Cargo.toml": r'^(?:version|dc-sys = .* version) = "([\d.]+)"',
    "bindings/rust/Cargo.lock": r'^version = "([\d.]+)"',
}
SERIES: Dict[str, str] = {
    "meson.build": r"'soversion': '([\d.]+)'",
    "src/libdc.map": r"^DC_([\d.]+) \{",
    "bindings/python/libdc.so.in": r"libdc\.so\.([\d.]+)\)",
    "bindings/python/libdc/_lib.py": r'"libdc\.so\.([\d.]+)"',
    "bindings/python/libdc/config.py": r'"libdc\.so\.([\d.]+)"',
    "bindings/rust/dc-sys/build.rs": r'"dc >= ([\d.]+)"',
    "packaging/libdc-config.cmake.in": r"libdc\.so\.([\d.]+)\"?$",
    "docs/guide/first-context.md": r"find_package\(libdc ([\d.]+)",
}
Reader = Callable[[str], str]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def numbers(version: str) -> Tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def faults_of(text_of: Reader) -> List[str]:
    version = re.findall(PROJECT[1], text_of(PROJECT[0]), re.M)[0]
    major, minor, patch = numbers(version)
    series = f"{major}.{minor}" if major == 0 else f"{major}"
    faults = []

    def compare(name: str, found: List[str], expected: str) -> None:
        if not found or set(found) != {expected}:
            faults.append(f"{name} says {', '.join(sorted(set(found))) or 'nothing'}, must say {expected}")

    for name, pattern in VERSIONS.items():
        compare(name, re.findall(pattern, text_of(name), re.M), version)
    for name, pattern in SERIES.items():
        compare(name, re.findall(pattern, text_of(name), re.M), series)
    header = text_of("include/dc_api.h")
    parts = re.findall(r"^#define DC_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header, re.M)
    compare("include/dc_api.h", [".".join(parts)], version)
    compare("DC_API_VERSION", re.findall(r"^#define DC_API_VERSION (\d+)", header, re.M),
            str(major * 1000000 + minor * 1000 + patch))
    compare("CHANGELOG.md's first entry", re.findall(r"^## ([\d.]+)", text_of("CHANGELOG.md"), re.M)[:1], version)
    if not (ROOT / "abi-check" / series).is_dir():
        faults.append(f"abi-check/{series} is missing: the surface of the series is not frozen")
    return faults


def planted() -> List[str]:
    """Changes the version in one file at a time, and returns the files for which that is not detected."""
    others = {name: r"(?<!\d)(?<!\d\.)0\.1(?!\d)" for name in (*VERSIONS, *SERIES, "CHANGELOG.md")}
    others["include/dc_api.h"] = r"(?<=_API_VERSION )1000"
    del others["meson.build"]
    missed = []
    for name, pattern in others.items():

        def changed(asked: str, name: str = name, pattern: str = pattern) -> str:
            text = read(asked)
            return re.sub(pattern, "7.7", text) if asked == name else text

        if not faults_of(changed):
            missed.append(f"a planted version in {name} is not found")
    return missed


def main() -> int:
    faults = faults_of(read) + planted()
    print("\n".join(faults) or f"{len({*VERSIONS, *SERIES}) + 2} files have the same version; a planted one is found")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
