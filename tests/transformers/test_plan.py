"""The planner beside trainings of Hugging Face's models: every statistic of memory, and the wire bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXACT = Path(__file__).resolve().parents[2] / "bench" / "plan"


def test_memory_and_bytes_are_those_of_the_runs(monkeypatch: pytest.MonkeyPatch,
                                                capsys: "pytest.CaptureFixture[str]") -> None:
    monkeypatch.syspath_prepend(str(EXACT))
    import exact

    options = ["--ranks", "3", "--models", "llama,gpt2,hf-bert", "--stages", "3", "--transports", "threads"]
    assert exact.main(options) == 0
    assert "6 runs, the largest difference is 0 bytes" in capsys.readouterr().out
