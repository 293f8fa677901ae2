"""test_ops.py and test_ops_fakes.py over the Python kernels, which a process has instead of the compiled ones."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys


def test_ops_by_python_kernels() -> None:
    here = pathlib.Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here / "test_ops.py"),
         str(here / "test_ops_fakes.py")],
        env={**os.environ, "LIBDC_TORCH_OPS": "python"}, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
