"""Old programs on the new library, and a new program on the old one: the cases of a user that updates one of the
two."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import List

from header import ROOT, build_stub, must, run

NEW_FUNCTION = "DC_API int32_t dc_newer(void);\n"
NEW_NODE = "DC_0.2 {\n  global:\n    dc_newer;\n} DC_0.1;\n"
LIBRARIES = ["-lcmocka", "-lm", "-pthread"]


def old_on_new(release: Path, library: Path) -> List[str]:
    """The release's own clients, which saw only its header and a stub of its symbols, run on today's library."""
    faults = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_stub(folder, release / "dc_api.h", release / "libdc.map")
        for source in sorted((release / "clients").glob("*.c")):
            program = folder / source.stem
            must("cc", "-std=gnu11", f"-I{release}", source, f"-L{folder}", "-ldc", *LIBRARIES, "-o", program)
            done = run(program, LD_LIBRARY_PATH=str(library.parent), PATH=os.environ["PATH"])
            print(f"  {source.stem:<16} of {release.name}: {'ends well' if done.returncode == 0 else 'FAILS'}")
            if done.returncode:
                faults.append(f"{source.stem} of {release.name}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return faults or ([] if any((release / "clients").glob("*.c")) else [f"no clients of {release.name}"])


def new_on_old(library: Path) -> List[str]:
    """A program that calls a function of the next minor version is refused when it starts, with the version's name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = (ROOT / "include" / "dc_api.h").read_text(encoding="utf-8")
        place = "DC_API int32_t dc_is_profiling("
        (folder / "dc_api.h").write_text(text.replace(place, NEW_FUNCTION + place), encoding="utf-8")
        (folder / "libdc.map").write_text((ROOT / "src" / "libdc.map").read_text(encoding="utf-8") + NEW_NODE,
                                          encoding="utf-8")
        build_stub(folder, folder / "dc_api.h", folder / "libdc.map")
        source = folder / "newer.c"
        source.write_text("#include <dc_api.h>\nint main(void) { return (int)dc_newer(); }\n", encoding="utf-8")
        must("cc", f"-I{folder}", source, f"-L{folder}", "-ldc", "-o", folder / "newer")
        if run(folder / "newer", LD_LIBRARY_PATH=str(folder)).returncode != 0:
            return ["the newer client does not run on the newer library either"]
        done = run(folder / "newer", LD_LIBRARY_PATH=str(library.parent))
    said = done.stderr.strip()
    print(f"  a newer client: exit {done.returncode}, {said.split(': ', 1)[-1]}")
    return [] if done.returncode and "version `DC_0.2' not found" in said else [f"not refused by its version: {said}"]


def old_on_grown(release: Path) -> List[str]:
    """The release's clients on a library in which every struct has grown at its end, as a later minor version's may:
    nothing may rest on today's sizes."""
    with tempfile.TemporaryDirectory() as name:
        tree, build = Path(name) / "tree", Path(name) / "build"
        for part in ("src", "include", "tools", "docs", "scripts", "packaging"):
            shutil.copytree(ROOT / part, tree / part)
        for part in ("meson.build", "meson_options.txt"):
            shutil.copy(ROOT / part, tree)
        header = tree / "include" / "dc_api.h"
        text, count = re.subn(r"^(\} (dc_\w+);)$", r"  int64_t grown_later;\n\1", header.read_text(encoding="utf-8"),
                              flags=re.M)
        header.write_text(text, encoding="utf-8")
        meson = Path(sys.executable).parent / "meson"
        environment = {**os.environ, "PATH": f"{meson.parent}{os.pathsep}{os.environ['PATH']}", "CC": "gcc"}
        for command in (("setup", build, tree, "-Doptimization=0", "-Ddebug=false", "-Dwerror=false", "-Dtests=false"),
                        ("compile", "-C", build)):
            done = run(meson, *command, **environment)
            if done.returncode:
                return [f"the library with grown structs does not build:\n{done.stdout[-2000:]}{done.stderr}"]
        print(f"  {count} structs grown")
        return old_on_new(release, build / "libdc.so")
