"""Commands that must succeed, and the count of tests made of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Callable, List, Set

ROOT = Path(__file__).resolve().parent.parent.parent
# Of examples/step, in every language.
STEP_BITS = re.compile(r"([0-9a-f]{8} -?\d\.\d{6}\n){4}")
# Errors and warnings are faults. Debian gives the number of the bug that asks for a package.
LINTIAN = ["--allow-root", "--display-info", "--tag-display-limit=0", "--fail-on=error,warning",
           "--suppress-tags=initial-upload-closes-no-bugs"]
LIBC = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
LIBC_OF_OLD = LIBC | {"libpthread.so.0", "libdl.so.2"}


class Fault(Exception):
    pass


def run(*command: object, folder: Path = ROOT, **environment: str) -> str:
    done = subprocess.run([str(word) for word in command], cwd=folder, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=3600,
                          env={**os.environ, **environment})
    if done.returncode:
        raise Fault(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}")
    return done.stdout


def require(holds: object, text: str) -> None:
    if not holds:
        raise Fault(text)


def sources(folder: Path) -> Path:
    """The files of a clean clone, with changes not yet committed."""
    for name in run("git", "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
            (folder / name).chmod((ROOT / name).stat().st_mode)
    return folder


def lintian(package: Path) -> None:
    print(run("lintian", *LINTIAN, package))


def needed(program: Path) -> Set[str]:
    """The libraries that a program or a library asks for."""
    return set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", "-W", program)))


def environment(python: Path, folder: Path, *requirements: object) -> Path:
    """A fresh environment with packages that need no compiler; its Python."""
    run(python, "-m", "venv", "--without-pip", folder)
    own = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", own, "install", "--quiet", "--only-binary=:all:", *requirements)
    return own


class Tests:
    """Runs tests one after the other; each prints its name, then ok or its fault."""

    def __init__(self) -> None:
        self._passed: List[bool] = []

    def __call__(self, name: str, body: Callable[[], object]) -> None:
        print(name, flush=True)
        try:
            body()
            fault = ""
        except (Fault, OSError, StopIteration, subprocess.SubprocessError) as error:
            fault = str(error)
        print(f"  {'FAILED ' + fault if fault else 'ok'}", flush=True)
        self._passed.append(not fault)

    def end(self) -> bool:
        """Prints the line that is counted; whether a test failed."""
        print(f"{self._passed.count(True)} passed, {self._passed.count(False)} failed")
        return not all(self._passed)
