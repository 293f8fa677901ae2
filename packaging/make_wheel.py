#!/usr/bin/env python3
"""Builds the wheel that is given away: make_wheel.py FOLDER. It is what `pip wheel .` builds, linked so that it runs on
distributions older than this one, and tagged by auditwheel. make_wheel.py --ldflags FOLDER prints the linker's flags
for that alone, which use files in the folder.

Since 2.34, glibc has threads and the dynamic loader's functions in libc.so.6. A program that is linked there asks for
symbols of that version, as every program does for __libc_start_main, though the functions have not changed. libm's exp,
log and pow of 2.29 differ only in that they set errno no more. Here a program is linked with empty stand-ins for
libpthread, libdl and libm, whose symbols have the versions of old; every glibc still serves these. Before 2.33, stat()
was in no library, but made of __xstat() in each program: here again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Tuple

ROOT = Path(__file__).resolve().parent.parent
BEFORE = (2, 28)  # PyTorch's own wheels ask for as much
# Where a function was, and where it is.
LIBRARIES = {"libpthread.so.0": ("libc.so.6", r"(pthread|sem)_\w+|__libc_start_main"),
             "libdl.so.2": ("libc.so.6", r"dl\w+"), "libm.so.6": ("libm.so.6", r"\w+")}
# glibc's number of struct stat: for another one __xstat() is EINVAL.
STAT = """#ifdef __x86_64__
enum { VERSION = 1 };
#else
enum { VERSION = 0 };
#endif
""" + "".join(f"""int __{x}xstat{wide}(int, {kind}, void *);
__attribute__((visibility("hidden")))
int {x}stat{wide}({kind} what, void *to) {{ return __{x}xstat{wide}(VERSION, what, to); }}
""" for x, kind in (("", "const char *"), ("l", "const char *"), ("f", "int")) for wide in ("", "64"))


def run(*command: object, **environment: str) -> str:
    """A command's output; where it fails, that is shown, with its complaints."""
    words = [str(word) for word in command]
    done = subprocess.run(words, text=True, capture_output=True, cwd=ROOT, env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}{' '.join(words)}: exit status {done.returncode}")
    return done.stdout


def number(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def old_versions(soname: str) -> Dict[str, str]:
    """The newest version up to BEFORE of each of a library's functions."""
    library = run("gcc", f"-print-file-name={soname}").strip()
    old: Dict[str, str] = {}
    for name, version in re.findall(r" [TWi] (\w+)@@?GLIBC_([\d.]+)$", run("nm", "-D", library), re.M):
        if number(old.get(name, "0")) <= number(version) <= BEFORE:
            old[name] = version
    return old


def stand_in(folder: Path, soname: str, names: Dict[str, str]) -> None:
    nodes: Dict[str, List[str]] = {}
    for name, version in names.items():
        nodes.setdefault(version, []).append(name)
    source, script = folder / f"{soname}.c", folder / f"{soname}.map"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names), encoding="utf-8")
    lines = [f"GLIBC_{version} {{ global: {'; '.join(listed)}; }};\n" for version, listed in nodes.items()]
    script.write_text("".join(lines), encoding="utf-8")
    run("gcc", "-w", "-shared", "-fPIC", "-nostdlib", "-fno-builtin", source, f"-Wl,-soname,{soname}",
        f"-Wl,--version-script={script}", "-o", folder / soname)


def old_glibc(folder: Path) -> str:
    """The linker's flags for a program that runs with an old glibc; the stand-ins are made in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for soname, (now, pattern) in LIBRARIES.items():
        old = old_versions(now)
        stand_in(folder, soname, {name: version for name, version in old.items() if re.fullmatch(pattern, name)})
    (folder / "stat.c").write_text(STAT, encoding="utf-8")
    run("gcc", "-w", "-O2", "-fPIC", "-fno-builtin", "-c", folder / "stat.c", "-o", folder / "stat.o")
    flags = " ".join([str(folder / "stat.o"), *(f"-l:{soname}" for soname in LIBRARIES)])
    return f"-L{folder} -Wl,--push-state,--no-as-needed {flags} -Wl,--pop-state"


def repair(wheel: Path, target: Path) -> Path:
    """The wheel with the tag of the oldest distributions that it runs on, in a folder."""
    target.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", target, wheel)
    made = max(target.glob(f"{wheel.name.split('-')[0]}-*.whl"), key=lambda path: path.stat().st_mtime)
    print(made.relative_to(ROOT) if made.is_relative_to(ROOT) else made)
    return made


def main() -> int:
    target = Path(sys.argv[-1]).resolve()
    if sys.argv[1] == "--ldflags":
        print(old_glibc(target))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ".",
            LDFLAGS=old_glibc(folder / "old"))
        repair(next(folder.glob("*.whl")), target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
