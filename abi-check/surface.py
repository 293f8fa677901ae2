"""Nine lists of the library's functions, which must be the same: what is there is declared, exported, documented,
bound, and called by a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List, Set

from header import ROOT, cdef_of, must, read


def exported(library: Path) -> Dict[str, str]:
    """The version node of each exported symbol."""
    lines = [line.split() for line in must("nm", "-D", "--defined-only", library).splitlines()]
    return dict(re.split("@+", words[2]) for words in lines if words[1] in "Ti")


def mapped() -> Dict[str, str]:
    found = {}
    for node in re.finditer(r"^(DC_[\d.]+) \{(.*?)^\}", (ROOT / "src" / "libdc.map").read_text(encoding="utf-8"),
                            re.M | re.S):
        found.update({name: node[1] for name in re.findall(r"\b(dc_\w+);", node[2])})
    return found


def introduced() -> Dict[str, str]:
    lines = (ROOT / "abi-check" / "symbols-in-versions").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def python() -> Set[str]:
    from libdc._lib import lib

    return {name for name in dir(lib) if name.startswith("dc_")}


def rust() -> Set[str]:
    text = (ROOT / "bindings" / "rust" / "dc-sys" / "src" / "bindings.rs").read_text(encoding="utf-8")
    return set(re.findall(r"pub fn (dc_\w+)\(", text))


def called(tests: Path) -> Set[str]:
    """The functions that objects of test programs call."""
    text = must("nm", "--undefined-only", *sorted(tests.rglob("*.o")))
    return set(re.findall(r" U (dc_[a-z]\w*)$", text, re.M))


def layout_faults() -> List[str]:
    """Python without a compiler lays structs out by itself: it must find the offsets and sizes that are locked."""
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(cdef_of((ROOT / "include" / "dc_api.h").read_text(encoding="utf-8")))
    found, count = [], 0
    for lock in sorted((ROOT / "tests" / "abi").glob("layout_*.c")):
        text = lock.read_text(encoding="utf-8")
        for struct, field, offset in re.findall(r"offsetof\((\w+), (\w+)\) == (\d+)", text):
            count += 1
            if ffi.offsetof(struct, field) != int(offset):
                found.append(f"{struct}.{field}: at {ffi.offsetof(struct, field)}, in {lock.name} at {offset}")
        for struct, size in re.findall(r"sizeof\((dc_\w+)\) >= (\d+)", text):
            count += 1
            if ffi.sizeof(struct) < int(size):
                found.append(f"{struct}: {ffi.sizeof(struct)} bytes, in {lock.name} {size}")
    print(f"  {count} offsets and sizes")
    return found if count else ["no locks found"]


def version_faults() -> List[str]:
    """The version, wherever it is written."""
    where = {
        "include/dc_api.h": r"DC_VERSION_MAJOR (\d+)\n#define DC_VERSION_MINOR (\d+)\n#define DC_VERSION_PATCH (\d+)",
        "meson.build": r"project\('libdc'.*? version: '(\d+)\.(\d+)\.(\d+)'",
        "bindings/rust/dc-sys/Cargo.toml": r'^version = "(\d+)\.(\d+)\.(\d+)"',
        "bindings/rust/dc/Cargo.toml": r'^version = "(\d+)\.(\d+)\.(\d+)"',
        "CHANGELOG.md": r"^## (\d+)\.(\d+)\.(\d+)",
    }
    found = {}
    for name, pattern in where.items():
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.M)
        found[name] = ".".join(match.groups()) if match else "nowhere"
    print("  " + ", ".join(f"{name} {version}" for name, version in found.items()))
    return [] if len(set(found.values())) == 1 else [f"the versions differ: {found}"]


def faults(library: Path, tests: Path) -> List[str]:
    header = read(ROOT / "include" / "dc_api.h")
    nodes = exported(library)
    lists: Dict[str, Set[str]] = {
        "exported": set(nodes),
        "version script": set(mapped()),
        "symbols-in-versions": set(introduced()),
        "documented": {name for name, version in header.since.items() if version},
        "Python": python(),
        "Rust": rust(),
        "called by tests": called(tests) & set(header.functions),
    }
    found = []
    print(f"  {len(header.functions):>4} header")
    for name, functions in lists.items():
        print(f"  {len(functions):>4} {name}")
        declared = set(header.functions)
        found += [f"{function}: in the header, not in: {name}" for function in sorted(declared - functions)]
        found += [f"{function}: not in the header, but in: {name}" for function in sorted(functions - declared)]
    versions = {name: f"DC_{version}" for name, version in introduced().items()}
    for function in sorted(header.functions):
        says = {"the library": nodes.get(function), "the version script": mapped().get(function),
                "symbols-in-versions": versions.get(function), "its comment": f"DC_{header.since.get(function)}"}
        if len(set(says.values())) > 1:
            found.append(f"{function}: introduced in {says}")
    return found
