"""The tool, and groups of real processes that fail in a known way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, List

import libdc
import pytest

HERE = Path(__file__).resolve().parent
TOOL = Path(os.environ.get("DC_TOOL", str(Path(libdc.library_dir()) / "dc")))
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def dc() -> Run:
    def run(*arguments: Any, code: int = 0, **kwargs: Any) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "DC_PYTHON": sys.executable, **kwargs.pop("environment", {})}
        done = subprocess.run([str(TOOL), *map(str, arguments)], text=True, capture_output=True, env=environment,
                              stdin=subprocess.DEVNULL, timeout=150, **kwargs)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    return run


def run_group(how: str, world: int, folder: Path) -> Dict[int, str]:
    """The ranks' last words. A rank that does not end is killed."""
    environment = {**os.environ, "DC_DUMP_DIR": str(folder)}
    group = f"tools.{uuid.uuid4().hex}"
    ranks: List["subprocess.Popen[str]"] = [
        subprocess.Popen([sys.executable, str(HERE / "failing.py"), how, group, str(rank), str(world)], text=True,
                         env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) for rank in range(world)]
    words = {}
    for rank in sorted(range(world), key=lambda rank: rank == 1):  # the culprit comes last: it may be stopped
        if how == "stopped" and rank == 1:
            ranks[rank].send_signal(signal.SIGKILL)
        words[rank] = ranks[rank].communicate(timeout=120)[1]
    return words


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The folder with the dumps of a group that failed as told; each is run once."""
    made: Dict[Any, Path] = {}

    def dumps(how: str, world: int) -> Path:
        if (how, world) not in made:
            folder = tmp_path_factory.mktemp(f"{how}{world}")
            words = run_group(how, world, folder)
            failed = {rank for rank, text in words.items() if text}
            assert failed == set() if how == "well" else failed, words
            made[how, world] = folder
        return made[how, world]

    return dumps
