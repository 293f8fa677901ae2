"""Shared by the benchmarks: the machine's description, and how much of it others used meanwhile."""
from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Tuple

_TICKS = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0))


def busy_seconds() -> float:
    """Core seconds that all processes of the machine have used."""
    with open("/proc/stat") as f:
        v = [int(x) for x in f.readline().split()[1:]]
    return (sum(v[:8]) - v[3] - v[4]) / _TICKS


class Quiet:
    """Which share of the machine others use: begin() and end() around the work, any number of times, then
    foreign(own core seconds in the work)."""

    def __init__(self) -> None:
        self.busy = self.seconds = 0.0

    def begin(self) -> None:
        self.busy -= busy_seconds()
        self.seconds -= time.monotonic()

    def end(self) -> None:
        self.busy += busy_seconds()
        self.seconds += time.monotonic()

    def foreign(self, own: float) -> float:
        return max(0.0, self.busy - own) / (self.seconds * (os.cpu_count() or 1))


def foreign_now(seconds: float = 1) -> float:
    """The share that others use while this program waits."""
    quiet = Quiet()
    quiet.begin()
    time.sleep(seconds)
    quiet.end()
    return quiet.foreign(0)


def save(name: str, page: str, plot: str = "") -> None:
    """A page of today's results, and its plot if it has one."""
    stem = Path(__file__).resolve().parent / "results" / f"{name}-{time.strftime('%Y-%m-%d', time.gmtime())}"
    stem.with_suffix(".md").write_text(page)
    if plot:
        stem.with_suffix(".svg").write_text(plot)


def memory_kib(key: str) -> int:
    """A line of this process's /proc/self/status: VmRSS now, VmHWM at most."""
    with open("/proc/self/status") as f:
        return next((int(line.split()[1]) for line in f if line.startswith(key + ":")), 0)


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def describe() -> Dict[str, Any]:
    with open("/proc/cpuinfo") as f:
        text = f.read()
    found = re.search(r"model name\s*: (.*)", text)
    here = os.path.dirname(os.path.abspath(__file__))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, text=True, capture_output=True)
    packages = {n: _version(n) for n in ("libdc", "torch", "deepspeed", "numpy")}
    return {"date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "cpu": found.group(1) if found else "unknown", "cores": CORES,
            "kernel": platform.release(), "python": platform.python_version(), "commit": commit.stdout.strip(),
            "packages": {k: v for k, v in packages.items() if v}}


def command(program: str) -> str:
    """As this program was started, for its page, without this machine's paths. program: the line without arguments."""
    return shlex.join([*program.split(), *("PATH" if os.path.isabs(word) else word for word in sys.argv[1:])])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(rank: int, ranks: int, port: int, group: str) -> Dict[str, str]:
    """The environment that a launcher would set for a rank of its own process group with one thread."""
    return {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "LIBDC_GROUP": group, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
            "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def wait_quiet(limit: float = 0.1, seconds: float = 60) -> float:
    """Waits until others use less than `limit` of the machine; returns what they use."""
    end = time.monotonic() + seconds
    while True:
        load = foreign_now(0.5)
        if load <= limit or time.monotonic() > end:
            return load


def spread(values: Any) -> Tuple[float, float, float]:
    """Median and quartiles."""
    v = sorted(values)

    def at(q: float) -> float:
        i = q * (len(v) - 1)
        low = int(i)
        return v[low] + (v[min(low + 1, len(v) - 1)] - v[low]) * (i - low)

    return at(0.5), at(0.25), at(0.75)
