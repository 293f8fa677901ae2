"""The conformance tests of the PyTorch adapter stand on the world of one of tests/torch/operators.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Iterator

import pytest

ROOT = Path(__file__).resolve().parents[3]
for folder in ("tests/torch", "tests/ffi", "abi-check"):
    sys.path.insert(0, str(ROOT / folder))

from libdc.torch import dc  # noqa: E402
from operators import Run  # noqa: E402


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    dc.cleanup()


@pytest.fixture(scope="session")
def library() -> Path:
    """The build of suite gcc."""
    path = ROOT / "build" / "gcc" / "libdc.so"
    assert path.exists(), f"{path} is not there: run suite gcc first"
    return path
