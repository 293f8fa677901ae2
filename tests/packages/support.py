"""Commands that must succeed, and the count of tests made of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Callable, List

ROOT = Path(__file__).resolve().parent.parent.parent


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
