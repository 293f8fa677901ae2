"""scripts/setup.sh on machines that lack something; stand-ins for id and apt-get tell it which machine it is on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("user", ["0", "1000"])
def test_a_python_that_no_package_makes_newer(tmp_path: Path, user: str) -> None:
    """The distribution's python3 is installed, and older than 3.11."""
    for name, text in (("id", f"echo {user}"), ("apt-get", "exit 0"), ("python", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
                   "PYTHON": str(tmp_path / "python")}
    done = subprocess.run([str(ROOT / "scripts" / "setup.sh"), "build"], text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, env=environment, timeout=600)
    assert done.returncode == 1, done.stdout
    assert f"Python 3.11 or later is needed, not {tmp_path / 'python'}; PYTHON=path names one" in done.stderr
