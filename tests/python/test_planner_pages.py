"""Pages of forecasts are what their commands print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script, page", [("scale.py", "scale.md"), ("published.py", "planner-published.md")])
def test_a_page_is_its_commands_output(script: str, page: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "plan" / script)], text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "docs" / page).read_text(encoding="utf-8")
