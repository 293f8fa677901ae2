"""Ranks as threads, and scripts on several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, List

import pytest

sys.path.insert(0, str(Path(__file__).parent))
HERE = Path(__file__).parent


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Runs a script's text on n processes, by `python -m libdc.run` or another launcher; returns what it printed."""

    def run(text: str, n: int = 2, launcher: List[str] = [], **environment: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(text)
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        folders = str(request.path.parent), str(HERE), str(HERE.parent), env.get("PYTHONPATH", "")
        env.update(PYTHONPATH=os.pathsep.join(folders), OMP_NUM_THREADS="1",
                   TORCHINDUCTOR_COMPILE_THREADS="1",  # its workers would be processes that import PyTorch
                   TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"), **environment)
        env.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)  # the folder is new: ranks may share what they compile
        command = [sys.executable, "-m", *(launcher or ["libdc.run", "-n", str(n)]), str(script)]
        done = subprocess.run(command, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=1200, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
