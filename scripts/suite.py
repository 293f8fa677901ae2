"""A test suite, which runs commands and logs their output to its own file, and the counting of their tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import List, NamedTuple, Set

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
VENV_BIN = Path(sys.executable).parent

# The limit of a command in seconds, for those that hang. It is generous, since a busy machine may be four times slower.
LIMIT = 7200

LOCK = threading.Lock()
running: Set[int] = set()  # process ids, each the leader of its group
stopping = threading.Event()


def kill(pid: int) -> None:
    """Kills a command and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def stop() -> None:
    """Kills every command, and lets no other begin."""
    with LOCK:
        stopping.set()
        for pid in running:
            kill(pid)


class Count(NamedTuple):
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Count") -> "Count":  # type: ignore[override]
        return Count(*(a + b for a, b in zip(self, other)))


class Suite:
    """A suite's log, and how it runs commands."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = LOGS / f"{name}.log"
        self.log = open(self.path, "w", encoding="utf-8", errors="replace")
        self.processor_s = 0.0
        self.notes: List[str] = []  # lines to show beside the result

    def run(self, *command: str, **environment: str) -> int:
        """Runs a command with its output in the log. Returns its exit status; 124 if it took too long, 127 if it did
        not start."""
        self.log.write(f"$ {' '.join(command)}\n")
        self.log.flush()
        path = f"{VENV_BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        with LOCK:
            if stopping.is_set():
                return 125
            try:
                process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PATH": path, **environment},
                                           stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
                                           start_new_session=True)
            except OSError as error:
                self.log.write(f"run_tests: {error}\n")
                return 127
            running.add(process.pid)
        timer = threading.Timer(LIMIT, kill, [process.pid])
        timer.daemon = True
        timer.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with LOCK:  # after wait4() another process may get its number
            running.discard(process.pid)
            status, usage = os.wait4(process.pid, 0)[1:]
        self.processor_s += usage.ru_utime + usage.ru_stime
        process.returncode = os.waitstatus_to_exitcode(status)
        if not timer.is_alive():
            self.log.write(f"run_tests: took more than {LIMIT} s\n")
            return 124
        timer.cancel()
        return process.returncode

    def write(self, text: str) -> None:
        self.log.write(text)

    def text(self) -> str:
        self.log.flush()
        return self.path.read_text(encoding="utf-8", errors="replace")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.text().splitlines()[-lines:])


def cmocka_count(text: str, status: int) -> Count:
    """The tests in a cmocka program's output; a program of another kind counts as one."""
    groups = re.findall(r"^\[  PASSED  \] (\d+) test", text, re.M)
    passed = sum(int(n) for n in groups)
    failed = sum(int(n) for n in re.findall(r"^\[  FAILED  \] (\d+) test", text, re.M))
    skipped = sum(int(n) for n in re.findall(r"^\[  SKIPPED \] (\d+) test", text, re.M))
    if status == 77:
        return Count(skipped=1)
    if status != 0 and failed == 0:
        failed = 1  # it crashed, or a sanitizer reported at its end
    if passed + failed + skipped == 0:
        return Count(failed=1) if groups else Count(passed=1)  # no test ran, or it is not a cmocka program
    return Count(passed, failed, skipped)


def one(status: int) -> Count:
    return Count(passed=1) if status == 0 else Count(failed=1)


def counted(suite: Suite, pattern: str, status: int) -> Count:
    """Adds up the groups passed and failed of all matches of `pattern` in the suite's log. No test at all is a
    failure."""
    total = Count()
    for match in re.finditer(pattern, suite.text(), re.M):
        total += Count(int(match["passed"]), int(match["failed"]))
    return total if sum(total) and (status == 0 or total.failed) else total + Count(failed=1)
