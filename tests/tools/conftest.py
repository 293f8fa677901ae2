"""The tool, and groups of real processes that fail in a known way."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import libdc
import pytest

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1] / "scripts"
TOOL = Path(os.environ.get("LIBDC_TOOL", str(Path(libdc.library_dir()) / "libdc")))
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def dc() -> Run:
    def run(*arguments: Any, code: int = 0, **kwargs: Any) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "LIBDC_PYTHON": sys.executable, **kwargs.pop("environment", {})}
        done = subprocess.run([str(TOOL), *map(str, arguments)], text=True, capture_output=True, env=environment,
                              stdin=subprocess.DEVNULL, timeout=600, **kwargs)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    return run


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a program of scripts or of scripts/checks by its name."""
    for folder in (SCRIPTS, SCRIPTS / "checks"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


def run_group(how: str, world: int, folder: Path) -> Dict[int, str]:
    """The ranks' last words. A rank that does not end is killed."""
    environment = {**os.environ, "LIBDC_DUMP_DIR": str(folder)}
    group = f"tools.{uuid.uuid4().hex}"
    ranks: List["subprocess.Popen[str]"] = [
        subprocess.Popen([sys.executable, str(HERE / "failing.py"), how, group, str(rank), str(world)], text=True,
                         env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) for rank in range(world)]
    words = {}
    for rank in sorted(range(world), key=lambda rank: rank == 1):  # the culprit comes last: it may be stopped
        if how == "stopped" and rank == 1:
            ranks[rank].send_signal(signal.SIGKILL)
        words[rank] = ranks[rank].communicate(timeout=600)[1]
    return words


WAITING = [(how, world) for how in ("late", "stopped") for world in (2, 3)]  # they end at a deadline


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Path]]:
    """The folder with the dumps of a group that failed as told; each is run once, and those that wait do so together,
    beside the others."""
    made: Dict[Tuple[str, int], "Future[Path]"] = {}

    def make(how: str, world: int, folder: Path) -> Path:
        words = run_group(how, world, folder)
        failed = {rank for rank, text in words.items() if text}
        assert failed == set() if how == "well" else failed, words
        return folder

    with ThreadPoolExecutor(len(WAITING) + 1) as pool:

        def begin(how: str, world: int) -> None:
            if (how, world) not in made:
                made[how, world] = pool.submit(make, how, world, tmp_path_factory.mktemp(f"{how}{world}"))

        def dumps(how: str, world: int) -> Path:
            begin(how, world)
            for waiting in WAITING:
                begin(*waiting)
            return made[how, world].result()

        yield dumps
