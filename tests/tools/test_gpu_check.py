"""scripts/gpu-check without a card: what it would build and run, what it reads in a program's output, what it
writes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu-check"))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    loader.exec_module(module)
    monkeypatch.setattr(module, "BUILD", tmp_path)
    monkeypatch.setattr(module, "card", lambda: "a card")
    monkeypatch.setattr(module.shutil, "which", lambda program, path=None: program)
    return module


def said(script: Any, text: str, status: int = 0, seconds: float = 60, left: float = 60) -> Dict[str, Any]:
    program = ["sh", "-c", 'echo "$0"; test $1 != 124 || exec sleep 600; exit $1', text, str(status)]
    result: Dict[str, Any] = script.run(script.Row("a row", program, seconds), left)
    return result


def test_its_programs_are_those_of_the_build(script: Any) -> None:
    built = (ROOT / "tests" / "card" / "meson.build").read_text()
    folders = re.findall(r"^ +'(\w+)': \[([^]]*)\]", built, re.M)
    cases = {f"{folder}_{stem}" for folder, stems in folders for stem in re.findall(r"'(\w+)'", stems)}
    rows = script.rows()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.needs for row in rows} - {""} <= {row.name for row in (*rows, *script.build())}
    assert cases == set(script.NOT_CONFORMANCE) and "'moves'" in built
    assert set(script.NOT_ON_NCCL) <= set(script.conformance())
    assert set(script.SANITIZED) <= {*script.NOT_CONFORMANCE, *script.conformance()}
    for row in rows:
        assert all((ROOT / word).exists() for word in row.command if word.endswith(".py"))


def test_it_counts_what_passed_and_keeps_what_failed(script: Any) -> None:
    assert said(script, "[  PASSED  ] 7 test(s).") == {"status": 0, "seconds": pytest.approx(0, abs=60), "passed": 7,
                                                       "text": "[  PASSED  ] 7 test(s).\n"}
    assert said(script, "12 passed in 3.1s")["passed"] == 12
    assert said(script, "a warning\n{\"ratio\": 1.5}")["figures"] == {"ratio": 1.5}
    failed = said(script, "it broke", 3)
    assert failed["status"] == 3 and failed["text"] == "it broke\n"
    assert script.run(script.Row("a row", ["./no-such-program"], 1), 1)["status"] == 127
    over = said(script, "so far", 124, 4)
    assert over["status"] == 124 and over["text"].startswith("so far") and "4 seconds were over" in over["text"]
    assert said(script, "", 124, 60, 0.5)["status"] is None  # it would have had more time


@pytest.mark.parametrize("name, text, status", [
    ("card_step", "", 1), ("card_step", "[  PASSED  ] 0 test(s).", 1), ("card_step", "[  PASSED  ] 1 test(s).", 0),
    ("torch", "3 skipped, 2 deselected in 1.0s", 1), ("moves", "a card", 1), ("moves", "{\"kib\": 1}", 0),
    ("memcheck card_step", "[  PASSED  ] 7 test(s).", 1), ("racecheck card_step", "RACECHECK SUMMARY: 0 hazards", 1),
    ("memcheck card_step", "[  PASSED  ] 7 test(s).\n========= ERROR SUMMARY: 0 errors", 0), ("package", "libdc", 0)])
def test_a_row_that_shows_no_work_has_failed(script: Any, name: str, text: str, status: int) -> None:
    result = script.run(script.Row(name, ["echo", text], 60), 60)
    assert result["status"] == status and ("error: it ended well" in result["text"]) == (status == 1)


def test_a_row_gets_no_settings_of_another(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEVICE", "RANKS", "COMM"):
        monkeypatch.setenv(f"LIBDC_TEST_{name}", "1")
    own = {name: value for name, value in script.environment().items() if name.startswith("LIBDC_TEST_")}
    assert own == {"LIBDC_TEST_DEVICE": "cuda"}


def test_what_was_carried_comes_first(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "cmocka" / "usr" / "lib" / "libcmocka.so.0"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(script, "CARRIED", tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.delenv("PKG_CONFIG_PATH", raising=False)
    found = script.environment()
    assert found["LD_LIBRARY_PATH"].split(":")[-2:] == [str(library.parent), "/mine"]
    assert found["PKG_CONFIG_PATH"] == str(library.parent / "pkgconfig")
    assert found["CMAKE_PREFIX_PATH"] == str(tmp_path / "cmocka" / "usr") and found["LIBDC_TEST_DEVICE"] == "cuda"


def call(script: Any, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu-check", *map(str, arguments)])
    monkeypatch.setattr(script, "BEGUN", time.monotonic())
    return int(script.main())


def test_a_run_goes_on_where_the_last_one_ended(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """Every row is noted instead of run; one takes all the time, and one fails."""
    ran: List[str] = []
    slow = True

    def run(row: Any, left: float) -> Dict[str, Any]:
        ran.append(row.name)
        if row.name == "look" and slow:
            return {"status": None}
        return {"status": int(row.name == "card_step"), "seconds": 0.0, "passed": 1}

    monkeypatch.setattr(script, "run", run)
    file = tmp_path / "out" / "report.json"
    assert call(script, monkeypatch, file) == 1
    assert ran[:5] == ["setup", "build", "install", "look", "card_kernels_elementwise"]
    report = json.loads(file.read_text())
    assert report["card"] == "a card" and "layer speed 512" in report["results"] and "look" not in report["results"]
    assert "failed: card_step; left: look, host cost, moves, " in capsys.readouterr().out
    slow, ran = False, []
    assert call(script, monkeypatch, file) == 1 and ran == ["setup", "build", "install", "look"]
    ran = []
    assert call(script, monkeypatch, file) == 1 and ran[2:4] == ["install", "moves"] and "torch" in ran
    assert not any("check card_" in name for name in ran) and "nccl host cost" not in ran
    ran = []
    assert call(script, monkeypatch, file) == 1 and ran[3:4] == ["memcheck card_kernels_elementwise"]
    ran = []
    assert call(script, monkeypatch, file, "memcheck *", "torch") == 1
    assert sorted(ran[3:]) == sorted(["torch", *(f"memcheck card_{name}" for name in script.SANITIZED)])
    ran = []
    assert call(script, monkeypatch, "--seconds", 0, tmp_path / "new.json") == 1 and ran == []
    monkeypatch.setattr(script, "run", lambda row, left: {"status": 0, "seconds": 0.0, "passed": 1})
    assert [call(script, monkeypatch, tmp_path / "fine.json") for _ in range(3)] == [1, 1, 0]  # a part each
    monkeypatch.setattr(script, "run", lambda row, left: {"status": None})
    assert call(script, monkeypatch, tmp_path / "fine.json", "torch") == 1  # what it was before counts no more
    assert "; left: torch; " in capsys.readouterr().out


def test_a_report_is_of_one_machine(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are not said to be another card's. Where there was no card, one may have come."""
    monkeypatch.setattr(script, "run", lambda row, left: {"status": 0, "seconds": 0.0, "passed": 1})
    monkeypatch.setattr(script, "card", lambda: "no card")
    assert [call(script, monkeypatch, tmp_path / "report.json") for _ in range(3)] == [1, 1, 1]
    monkeypatch.setattr(script, "card", lambda: "a card")
    assert call(script, monkeypatch, tmp_path / "report.json") == 0
    whole = (tmp_path / "report.json").read_text()
    for other in ("another card", "no card"):
        report = tmp_path / f"{other}.json"
        report.write_text(whole)
        monkeypatch.setattr(script, "card", lambda: other)
        with pytest.raises(SystemExit, match=f"has results of 'a card', and here is '{other}'; name another file"):
            call(script, monkeypatch, report)
        assert report.read_text() == whole


def test_nothing_is_run_that_was_not_built(script: Any, tmp_path: Path, capsys: Any,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's rows have the wheels. The next call tries the build again."""
    monkeypatch.setattr(script, "run", lambda row, left: {"status": int(row.name in ("setup", "build")), "seconds": 0.0,
                                                          "passed": 0})
    report = tmp_path / "report.json"
    assert call(script, monkeypatch, report) == 1
    assert list(json.loads(report.read_text())["results"]) == ["setup", "build", "install", "package"]
    assert "left out, since build failed: look, card_kernels_elementwise, " in capsys.readouterr().out
    assert call(script, monkeypatch, report) == 1
    assert {"torch", "torch stages"} <= set(json.loads(report.read_text())["results"])
    monkeypatch.setattr(script, "run", lambda row, left: {"status": 0, "seconds": 0.0, "passed": 0})
    assert call(script, monkeypatch, report) == 1
    assert {"look", "card_step"} <= set(json.loads(report.read_text())["results"])


def test_a_row_that_fails_or_hangs_tells_why_and_the_rest_runs(script: Any, tmp_path: Path, capsys: Any,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    fails = "echo begun; echo '[  ERROR   ] --- 3 != 4'; for i in 1 2 3 4 5 6 7 8; do echo after $i; done; exit 3"
    rows = [script.Row("a fails", ["sh", "-c", fails], 60),
            script.Row("b hangs", ["sh", "-c", "echo on; sleep 600"], 5),
            script.Row("c is fine", ["sh", "-c", "echo '[  PASSED  ] 2 test(s).'"], 60),
            script.Row("d is absent", ["./no-such-program"], 60),
            script.Row("e needs a", ["echo", "1 passed"], 60, True, {}, "a fails")]
    monkeypatch.setattr(script, "build", lambda: [script.Row("build", ["true"], 60)])
    monkeypatch.setattr(script, "rows", lambda: rows)
    assert call(script, monkeypatch, tmp_path / "report.json") == 1
    said_there = capsys.readouterr().out
    assert "    [  ERROR   ] --- 3 != 4\n" in said_there and "    after" not in said_there
    assert "    on\n    its 5 seconds were over\n" in said_there and "No such file" in said_there
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert {name: result["status"] for name, result in results.items()} == {
        "build": 0, "a fails": 3, "b hangs": 124, "c is fine": 0, "d is absent": 127}
    assert "after 8" in results["a fails"]["text"] and "text" not in results["c is fine"]
    assert (tmp_path / "report-logs" / "a_fails.log").read_text().startswith("begun\n")
    assert (tmp_path / "report-logs" / "c_is_fine.log").read_text() == "[  PASSED  ] 2 test(s).\n"
    assert "left out, since a fails failed: e needs a\n" in said_there and "left: e needs a;" in said_there
    assert call(script, monkeypatch, tmp_path / "report.json", "e needs a") == 1  # it runs where it is named
    assert json.loads((tmp_path / "report.json").read_text())["results"]["e needs a"]["status"] == 0


def test_what_cannot_go_well_is_told_before_a_row_runs(script: Any, tmp_path: Path, capsys: Any,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "run", lambda row, left: pytest.fail(f"{row.name} ran"))
    (tmp_path / "a file").write_text("")
    (tmp_path / "torn.json").write_text('{"date": "2026-')
    for arguments, text in (([tmp_path / "a file" / "report.json"], "must be in folders that can be written"),
                            ([tmp_path / "torn.json"], "is no report of an earlier call"),
                            ([tmp_path / "report.json", "card_none"], "no row is called card_none; there are look"),
                            (["card_*"], "FILE = card_*, must end in .json"),
                            (["--limit", "moves", tmp_path / "report.json"], "--limit moves, must be ROW=N")):
        with pytest.raises(SystemExit) as left:
            call(script, monkeypatch, *arguments)
        assert text in f"{left.value}{capsys.readouterr().err}"
    assert (tmp_path / "torn.json").read_text() == '{"date": "2026-'


def test_two_calls_do_not_write_one_report(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = script.Report(tmp_path / "report.json")
    with pytest.raises(SystemExit, match="another call writes"):
        script.Report(tmp_path / "report.json")
    first.close()
    script.Report(tmp_path / "report.json").close()


def test_a_killed_call_leaves_nothing_on_the_card(script: Any, tmp_path: Path) -> None:
    """The row's program ends with the call, which has no time to end it."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    pid = os.fork()
    if pid == 0:
        try:
            script.run(script.Row("a row", ["sh", "-c", f"exec sleep 600 > {ready}"], 60), 60)
        finally:
            os._exit(0)
    with open(ready, "rb") as end:  # the program has opened it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert end.read() == b""  # and has ended


def has_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, visible: Optional[str] = None) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize("smi, text", [
    ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", "could not communicate"),
    ("true", "nvidia-smi names none"), ("exec sleep 600", "timed out after 1 seconds")])
def test_no_card_is_told(script: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, smi: str,
                         text: str) -> None:
    has_smi(tmp_path, monkeypatch, smi)
    monkeypatch.setattr(script, "SMI_SECONDS", 1)
    assert script.ask_for_cards() == "no card" and text in capsys.readouterr().out


@pytest.mark.parametrize("visible, cards", [
    (None, "abc"), ("0,1,2", "abc"), ("2, 0", "ca"), ("1", "b"), ("1,7,2", "b"), ("GPU-8932f937,GPU-4", "aa"),
    ("MIG-GPU-1/0/0", "a")])
def test_cards_that_cuda_does_not_show_are_not_counted(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       visible: Optional[str], cards: str) -> None:
    has_smi(tmp_path, monkeypatch, "echo a; echo b; echo c", visible)
    assert script.ask_for_cards() == "\n".join(cards)


@pytest.mark.parametrize("visible", ["", "-1", "3", "NoDevFiles"])
def test_hidden_cards_are_none(script: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch,
                               visible: str) -> None:
    has_smi(tmp_path, monkeypatch, "echo a; echo b; echo c", visible)
    assert script.ask_for_cards() == "no card"
    assert capsys.readouterr().out == "no card: CUDA_VISIBLE_DEVICES leaves none\n"


def test_cards_of_one_kind_are_counted(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "card", lambda: "\n".join(["NVIDIA H100, 550.54"] * 8))
    report = script.Report(tmp_path / "report.json")
    assert script.summary(report).startswith("8 x NVIDIA H100, 550.54: 0 tests passed; failed: nothing; left: nothing;")
    report.close()
