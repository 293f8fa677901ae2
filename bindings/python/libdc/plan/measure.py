"""libdc bench --machine FILE: this machine's description, measured on two ranks that are processes.

Figures are medians of several turns, measured on both ranks at once, since ranks of a machine share its memory.
Products run on one thread. A small collective gives the latency, a large one the rate."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from .checks import run_command, whole_file
from .machine import load

RANKS = 2
_WIDTHS, _ROWS = (64, 256, 1024), (16, 64, 256, 512)
_SMALL, _LARGE, _TURNS = 1 << 10, 1 << 24, 9
_CLOCKS: Dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def median_seconds(clock: str, comm: Any, work: Callable[[], Any], repeats: int = 1) -> float:
    """The median time of a call on this rank, while the others make it too."""
    now, seconds = _CLOCKS[clock], []
    work()
    for _ in range(_TURNS):
        comm.barrier()
        begin = now()
        for _ in range(repeats):
            work()
        seconds.append((now() - begin) / repeats)
    return statistics.median(seconds)


def _product_rates(clock: str, comm: Any) -> Dict[str, int]:
    """Floating-point operations a second of x W, by the width of the square matrix W."""
    import numpy as np

    rates: Dict[str, int] = {}
    for width in _WIDTHS:
        x, weights = np.ones((512, width), np.float32), np.ones((width, width), np.float32)
        out = np.empty_like(x)
        seconds = median_seconds(clock, comm, lambda: np.matmul(x, weights, out=out), max(1, (256 // width) ** 2))
        rates[str(width)] = int(2 * 512 * width * width / seconds)
    return rates


def _percents_by_rows(clock: str, comm: Any, rate: int) -> Dict[str, int]:
    """The percentage of a rate that a layer's three products reach, by their rows. With few rows the weights' gradient
    is slow."""
    import numpy as np

    percents, width = {}, _WIDTHS[-1]
    weights, gradient = [np.ones((width, width), np.float32) for _ in range(4)], np.empty((width, width), np.float32)
    for rows in _ROWS:
        x, out = np.ones((rows, width), np.float32), np.empty((rows, width), np.float32)

        def step(x: Any = x, out: Any = out) -> None:
            for each in weights:
                np.matmul(x, each, out=out)
                np.matmul(x.T, out, out=gradient)
                np.matmul(out, each.T, out=x)
                x[:] = 1

        seconds = median_seconds(clock, comm, step)
        percents[str(rows)] = min(100, max(1, int(100 * len(weights) * 6 * rows * width * width / seconds / rate)))
    return percents


def measure_level(name: str, clock: str, comm: Any, large: int = _LARGE) -> Dict[str, int]:
    """Latency and rate of all-gathers, from a small and a large part of each rank. name: node or network."""
    import numpy as np

    seconds = {}
    for size in (_SMALL, large):
        part, whole = np.zeros(size // 4, np.float32), np.zeros(size // 4 * comm.size, np.float32)
        seconds[size] = median_seconds(clock, comm, lambda: comm.all_gather(part, whole), large // size // 256 + 1)
    received = (comm.size - 1) * large
    return {f"{name}_bytes_per_second": int(received / max(1e-9, seconds[large] - seconds[_SMALL])),
            f"{name}_latency_ns": int(1e9 * seconds[_SMALL])}


def measure_work(clock: str, comm: Any) -> Dict[str, Any]:
    """Rates of products and copies."""
    import numpy as np

    rates = _product_rates(clock, comm)
    source, target = np.zeros(_LARGE, np.float32), np.zeros(_LARGE, np.float32)
    copied = int(2 * source.nbytes / median_seconds(clock, comm, lambda: np.copyto(target, source)))
    peak = max(rates.values())
    return {"flops": {"float32": peak},
            "product_percent_by_width": {width: 100 * rate // peak for width, rate in rates.items()},
            "product_percent_by_rows": _percents_by_rows(clock, comm, rates[str(_WIDTHS[-1])]),
            "memory_bytes_per_second": copied, "host_bytes_per_second": copied // 2}  # counts received bytes once


def measure_rank(comm: Any, address: str, clock: str) -> Dict[str, Any]:
    """This rank's figures. address: where the ranks meet over TCP, for the network's."""
    from ..comm import Comm

    figures = {**measure_work(clock, comm), **measure_level("node", clock, comm)}
    with Comm.tcp(address, "measure", comm.rank, comm.size, node="") as network:
        return {**figures, **measure_level("network", clock, network)}


def describe(figures: Dict[str, Any], clock: str) -> Dict[str, Any]:
    """The content of a machine's file."""
    cores = len(os.sched_getaffinity(0))
    day = datetime.date.today().isoformat()
    source = f"measured by libdc bench --machine on {day}: {RANKS} ranks, medians of {_TURNS} turns, {clock} time"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    table = {"name": f"{platform.node()}, {cores} cores", "ranks_per_node": 0, "cores": cores,
             "memory_bytes": memory // cores, "product_percent": 100, **figures, "launch_ns": 0}
    sources = {field: source for field in figures}
    sources.update(ranks_per_node="0: all ranks are on this machine", cores="the process may use so many",
                   memory_bytes="of the system, for each core", product_percent="the peak itself is measured",
                   launch_ns="a CPU launches no kernels")
    return {**table, "sources": sources}


def free_address() -> str:
    """An address at which ranks of this machine can meet over TCP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def measure(path: str, clock: str = "wall") -> Dict[str, Any]:
    """Measures with rank processes and writes the file, whole or not at all."""
    with whole_file("machine", path) as partial:
        partial.write_text("")
        partial.write_text(json.dumps(describe(_figures(clock), clock), indent=2) + "\n")
        load(str(partial))
    return dict(json.loads(Path(path).read_text()))


def _figures(clock: str) -> Dict[str, Any]:
    """The figures of rank 0."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "figures.json")
            done = subprocess.run([sys.executable, "-m", "libdc.run", "-n", str(RANKS), "-m", "libdc.plan.measure", out,
                                   free_address(), clock], stdin=subprocess.DEVNULL, text=True, capture_output=True,
                                  env=environment)
            if done.returncode != 0:
                raise ValueError(f"the ranks that measure failed: {done.stderr.strip()[-600:]}")
            return dict(json.loads(Path(out).read_text()))
    except OSError as error:
        raise ValueError(f"the ranks that measure cannot be run: {error}") from None


def main(argv: List[str]) -> int:
    """libdc bench --machine FILE, without the word bench."""
    parser = argparse.ArgumentParser(prog="libdc bench", description="Measures this machine for libdc plan, libdc sim")
    parser.add_argument("--machine", required=True, metavar="FILE", help="is written")
    parser.add_argument("--clock", default="wall", choices=sorted(_CLOCKS),
                        help="processor: where other programs use the machine")
    arguments = parser.parse_args(argv)
    return run_command("libdc bench", lambda: _command(arguments))


def _command(arguments: argparse.Namespace) -> int:
    table = measure(arguments.machine, arguments.clock)
    rates = {width: table["flops"]["float32"] * percent / 100
             for width, percent in table["product_percent_by_width"].items()}
    print(f"{table['name']}")
    for width, rate in rates.items():
        print(f"  products of width {width:<6} {rate / 1e9:10.1f} GFLOP/s a core, float32")
    print(f"  memory                   {table['memory_bytes_per_second'] / 1e9:10.2f} GB/s")
    for level, text in (("node", "shared memory"), ("network", "TCP, this machine")):
        print(f"  {text:<24} {table[f'{level}_bytes_per_second'] / 1e9:10.2f} GB/s a rank, "
              f"{table[f'{level}_latency_ns'] / 1e3:.1f} us")
    return 0


def _rank(out: str, address: str, clock: str) -> None:
    import libdc

    comm = libdc.init_comm()
    figures = measure_rank(comm, address, clock)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(figures))
    comm.barrier()


if __name__ == "__main__":
    _rank(*sys.argv[1:4])
