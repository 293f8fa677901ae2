"""Installs the frameworks from PyPI beside .venv, and runs programs with them on several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Callable, List

import pytest
from from_pypi import install

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def launch() -> Callable[..., str]:
    """Runs a program on ranks that are processes, in a folder, and returns what it printed. 0 ranks: as one process
    without a launcher."""
    folders = [install(HERE / "requirements.txt"), install(HERE.parent / "transformers" / "requirements.txt")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *folders]), "HF_HUB_OFFLINE": "1",
                   "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment.pop("WORLD_SIZE", None)

    def run(ranks: int, *command: str, folder: Path = HERE) -> str:
        launcher: List[str] = ["-m", "libdc.run", "-n", str(ranks)] if ranks else []
        done = subprocess.run([sys.executable, *launcher, *command], text=True, capture_output=True, timeout=1200,
                              stdin=subprocess.DEVNULL, env=environment, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
