"""Shared by the tests: ranks as threads, a context on one rank, a script on several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import libdc
import libdc.run
import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: once is enough, through the compiled module")


@pytest.fixture
def context() -> Iterator[libdc.Context]:
    """An initialised context in a world of one."""
    with libdc.Context() as context:
        context.init(initial_reduce_bucket_size=1024)
        yield context


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs a script's text under `python -m libdc.run`."""

    def run(text: str, *arguments: str, n: int = 2, **kwargs: Any) -> "subprocess.CompletedProcess[str]":
        script = tmp_path / "script.py"
        script.write_text(text)
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        return subprocess.run([sys.executable, "-m", "libdc.run", "-n", str(n), *arguments, str(script)], text=True,
                              capture_output=True, stdin=subprocess.DEVNULL, timeout=600, env=environment, **kwargs)

    return run


@pytest.fixture
def on_the_simulated_driver(tmp_path: Path) -> Callable[[str], str]:
    """Runs a script's text with the library that suite gcc built and a CUDA device on the simulated driver
    (tests/cudasim), whose memory simulated.py reads and writes; returns what it printed."""
    here = Path(__file__).resolve().parent
    built = here.parents[1] / "build" / "gcc"
    simulated = built / "tests" / "cudasim"
    if not (simulated / "libdc_cuda.so").exists():
        pytest.skip("suite gcc has not run")
    (tmp_path / "libdc.so").symlink_to(built / "libdc.so")  # the plug-in is looked for beside it
    (tmp_path / "libdc_cuda.so").symlink_to(simulated / "libdc_cuda.so")
    environment = {**os.environ, "LIBDC_LIBRARY": str(tmp_path / "libdc.so"), "LD_LIBRARY_PATH": str(simulated),
                   "PYTHONPATH": os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))}

    def run(text: str) -> str:
        done = subprocess.run([sys.executable, "-c", text], text=True, capture_output=True, timeout=600,
                              env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def on_ranks(n: int, function: Callable[..., Any], *args: Any) -> list:
    """function(context, comm, *args) on n thread ranks, each with its own initialised context."""

    def rank(comm: libdc.Comm) -> Any:
        with libdc.Context() as context:
            context.init(comm, initial_reduce_bucket_size=4096)
            return function(context, comm, *args)

    return libdc.run.threads(n, rank, timeout=60)
