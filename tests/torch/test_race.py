"""`make optimizers` as a user starts it, and one seed of its gates (49 of the second-order conformance list)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=env, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1200)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_49_all_train_both_models(tmp_path: Path) -> None:
    out = run(tmp_path, "-m", "libdc.run", "-n", "2", str(ROOT / "examples/optimizers/train.py"), "--plain",
              "--digits-steps", "12", "--gpt-steps", "4", "--out", "run")
    assert "step    12/12  SGD" in out and "step     4/4  SGD" in out and "AdamW" in out and "K-FAC" in out
    for task in ("digits", "gpt"):
        courses = json.loads((tmp_path / "run" / f"{task}.json").read_text())
        assert list(courses) == ["sgd", "adamw", "muon", "shampoo", "soap", "kfac"]
        assert len({course["loss"][0] for course in courses.values()}) == 1  # the same weights, the same batch
        assert all(course["loss"][-1] < course["loss"][0] for course in courses.values())
        for picture in ("steps", "seconds"):
            assert (tmp_path / "run" / f"{task}-{picture}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_49_gates_of_one_seed(tmp_path: Path) -> None:
    out = run(tmp_path, str(ROOT / "bench/optim/gates.py"), "--seeds", "1", "--known", "--only", "muon", "shampoo",
              "adamw")
    assert out.count("holds: ") == 4 and "NOT" not in out
