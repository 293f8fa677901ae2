"""Facts of a header that debug information does not show: its initialisers, the names of parameters, its version, and
whether C++ can use it. Compared with a release's header."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Dict, List, Tuple

from header import must, read, run


def initialisers(path: Path) -> Dict[str, str]:
    """The values of each DC_X_INIT, without the closing brace: a struct that grows appends values."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^#define (DC_\w+_INIT) (\{.*)\}$", re.sub(r"\\\n", " ", text), re.M)
    return {name: re.sub(r"\s+", "", values) for name, values in found}


def version(path: Path) -> Tuple[int, int]:
    """DC_API_VERSION, and the number that the three parts of the version make; -1 is a number that is not there."""
    found = dict(re.findall(r"^#define DC_(API_VERSION|VERSION_MAJOR|VERSION_MINOR|VERSION_PATCH) (\d+)$",
                            path.read_text(encoding="utf-8"), re.M))
    major, minor, patch = (int(found.get(f"VERSION_{name}", -1)) for name in ("MAJOR", "MINOR", "PATCH"))
    return int(found.get("API_VERSION", -1)), major * 1000000 + minor * 1000 + patch


def version_faults(header: Path, frozen: Path) -> List[str]:
    number, made = version(header)
    least = version(frozen)[0]
    if number != made:
        return [f"DC_API_VERSION is {number}, must be {made}, which major, minor and patch make"]
    return [f"DC_API_VERSION is {number}, must be at least {least}"] if number < least or least < 0 else []


def parameters(prototype: str) -> List[Tuple[str, str]]:
    """Type and name of each parameter."""
    inside = prototype[prototype.index("(") + 1 : prototype.rindex(")")]
    return [] if inside == "void" else [(part[: -len(name)].strip(), name) for part in inside.split(", ")
                                        for name in re.findall(r"\w+$", part)]


def _swapped(before: str, after: str) -> bool:
    """Whether parameters of one type have changed places. A new name alone changes no program."""
    old, new = parameters(before), parameters(after)
    return old != new and [kind for kind, _ in old] == [kind for kind, _ in new] and any(
        name != other and name in [known for _, known in new] for (_, name), (_, other) in zip(old, new))


def _cxx(include: Path, library: Path, functions: List[str]) -> List[str]:
    """A C++ program that takes every function's address, linked with the library."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "client.cpp"
        rows = "".join(f"  reinterpret_cast<void *>(&{function}),\n" for function in functions)
        source.write_text(f"#include <dc_api.h>\nvoid *volatile all[] = {{\n{rows}}};\nint main() {{ return 0; }}\n",
                          encoding="utf-8")
        for compiler in ("g++", "clang++-14"):
            done = run(compiler, "-std=c++11", f"-I{include}", source, library, "-o", Path(name) / "client",
                       "-Wl,--allow-shlib-undefined")
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line]
                found.append(f"{compiler}: {(lines or [done.stderr])[0].strip()}")
    return found


def faults(include: Path, library: Path, release: Path) -> List[str]:
    """The promises of a release's header that include/dc_api.h and the library do not keep."""
    header, frozen = include / "dc_api.h", release / "dc_api.h"
    found = version_faults(header, frozen)
    now = initialisers(header)
    for name, values in initialisers(frozen).items():
        if not now.get(name, "").startswith(values):
            found.append(f"{name} begins {now.get(name, 'nowhere')}, must begin {values}")
    functions = read(header).functions
    for name, prototype in read(frozen).functions.items():
        if name in functions and _swapped(prototype, functions[name]):
            found.append(f"{name}: parameters have changed places: {functions[name]}")
    return found + _cxx(include, library, sorted(functions))


def elf_faults(library: Path) -> List[str]:
    """The library's demands on the loader: other libraries, an executable stack, and static TLS, with which
    dlopen() may fail."""
    allowed = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2",
               "ld-linux-aarch64.so.1"}
    dynamic = must("readelf", "-dW", library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)) - allowed
    found = [f"{library.name} needs {name}" for name in sorted(needed)]
    if "STATIC_TLS" in dynamic:
        found.append(f"{library.name} has static thread-local storage")
    if re.search(r"GNU_STACK.* RWE ", must("readelf", "-lW", library)):
        found.append(f"{library.name} asks for an executable stack")
    return found
