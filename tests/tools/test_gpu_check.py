"""scripts/gpu-check without a card: what it would build and run, what it reads in a program's output, what it writes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> Any:
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu-check"))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def said(text: str, status: int = 0) -> List[str]:
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})"]


def test_its_targets_are_those_of_the_build(script: Any) -> None:
    built = (ROOT / "tests" / "card" / "meson.build").read_text()
    names = [Path(target).name for target in script.targets()]
    assert set(script.NOT_ON_NCCL) <= set(names) and len(names) == len(set(names))
    assert all(f"'{name[len('card_'):]}'" in built for name in script.NOT_ON_NCCL[:7])
    assert script.library().startswith("libdc.so.0.")


def test_it_counts_what_passed_and_keeps_what_failed(script: Any) -> None:
    assert script.run(said("[  PASSED  ] 7 test(s).")) == {"status": 0, "seconds": pytest.approx(0, abs=60), "passed": 7}
    assert script.run(said("12 passed in 3.1s"))["passed"] == 12
    assert script.run(said("a warning\n{\"ratio\": 1.5}"))["figures"] == {"ratio": 1.5}
    failed = script.run(said("it broke", 3))
    assert failed["status"] == 3 and failed["text"] == "it broke\n"
    assert script.run(["./no-such-program"])["status"] == 127
    script.SECONDS = 0
    over = script.run([sys.executable, "-c", "import time; time.sleep(60)"])
    assert over["status"] == 124 and "seconds were over" in over["text"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_without_a_card(script: Any, broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture) -> None:
    """Every command is noted instead of run; the order is that of the report."""
    commands: List[List[str]] = []

    def run(command: List[str], **more: str) -> Dict[str, Any]:
        commands.append([*command, *(["on NCCL"] if more.get("DC_TEST_COMM") == "nccl" else [])])
        return {"status": int(broken and "pytest" in command), "seconds": 0.0, "passed": 1}

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script, "BUILD", tmp_path)
    monkeypatch.setattr(script, "card", lambda: "a card")
    monkeypatch.setattr(script.shutil, "which", lambda _: "compute-sanitizer")
    monkeypatch.setattr(sys, "argv", ["gpu-check", str(tmp_path / "out" / "report.json")])
    assert script.main() == int(broken)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["card"] == "a card" and "layer speed 512" in report["results"]
    programs = [Path(command[0]).name for command in commands if command[-1] == "on NCCL"]
    assert programs and not set(programs) & set(script.NOT_ON_NCCL) and len(programs) == len(set(programs))
    alone = [Path(command[0]).name for command in commands if len(command) == 1]
    assert sorted(alone) == sorted(Path(target).name for target in script.targets())
    assert ("failed: torch" if broken else "failed: nothing") in capsys.readouterr().out
