"""The programs of docs/torch-frameworks.md run as they are, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

PAGE = Path(__file__).resolve().parents[2] / "docs" / "torch-frameworks.md"


def test_programs_of_the_page(launch: Callable[..., str], tmp_path: Path) -> None:
    assert launch(2, str(Path(__file__).with_name("blocks.py")), str(PAGE), folder=tmp_path).count("3 programs") == 2
    for written in ("trainer/checkpoint-8/optimizer.safetensors", "trained/model.safetensors",
                    "state/sharded_model.safetensors", "state/optimizer.safetensors", "model/model.safetensors"):
        assert (tmp_path / "build" / "frameworks" / written).is_file(), written
