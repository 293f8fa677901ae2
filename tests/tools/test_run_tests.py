"""scripts/run_tests.py: what counts as a test, and how it ends."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(importlib.import_module("suite"), "LOGS", tmp_path)
    return importlib.import_module("run_tests")


class Log:
    """A suite whose commands end well and have printed a text."""

    def __init__(self, text: str) -> None:
        self.said, self.commands = text, []  # type: ignore[var-annotated]

    def run(self, *command: str, **_: str) -> int:
        self.commands.append(command)
        return 0

    def text(self) -> str:
        return self.said

    def write(self, text: str) -> None:
        self.said += text


def broken(_: Any) -> Any:
    raise ValueError("its report is cut off")


@pytest.mark.parametrize("body, counts, word, log", [
    (lambda _: (0, 0, 0), (0, 1, 0), "FAILED", "no test ran"), (broken, (0, 1, 0), "FAILED", "its report is cut off"),
    (lambda _: (0, 0, 2), (0, 0, 2), "skipped", ""), (lambda _: (3, 0, 1), (3, 0, 1), "ok", "")])
def test_a_suite_is_well_if_it_ran_a_test(script: Any, capsys: pytest.CaptureFixture[str], body: Callable[[Any], Any],
                                          counts: Any, word: str, log: str) -> None:
    assert script.run_suite("x", lambda suite: script.Count(*body(suite))) == counts
    said = capsys.readouterr().out
    assert said.startswith(f"x          {word} ") and log in said, said


@pytest.mark.parametrize("text, status, counts", [
    ("[  PASSED  ] 7 test(s).", 0, (7, 0, 0)), ("[  PASSED  ] 0 test(s).", 0, (0, 1, 0)), ("well", 0, (1, 0, 0)),
    ("[  PASSED  ] 0 test(s).\n[  SKIPPED ] 2 test(s), listed below:", 0, (0, 0, 2)), ("", 77, (0, 0, 1)),
    ("[  PASSED  ] 3 test(s).", 1, (3, 1, 0))])
def test_a_program_without_tests_has_failed(script: Any, text: str, status: int, counts: Any) -> None:
    assert importlib.import_module("suite").cmocka_count(text, status) == counts


def test_a_script_that_counts_nothing_has_failed(script: Any) -> None:
    line = r"^(?P<passed>\d+) passed, (?P<failed>\d+) failed$"
    for text, status, counts in (("", 0, (0, 1, 0)), ("0 passed, 0 failed", 0, (0, 1, 0)),
                                 ("2 passed, 0 failed", 0, (2, 0, 0)), ("2 passed, 0 failed", 1, (2, 1, 0)),
                                 ("1 passed, 1 failed", 1, (1, 1, 0))):
        assert script.counted(Log(text), line, status) == counts


def test_no_files_are_no_success(script: Any) -> None:
    assert script.clang_tidy(Log("$ run-clang-tidy-14 -p build/gcc")) == (0, 1, 0)
    assert script.clang_tidy(Log("clang-tidy-14 --use-color -p=build/gcc -quiet src/base/op.c")) == (1, 0, 0)
    log = Log("")
    script.blocks(log, "README.md", "no-such-*.md")
    assert [command[-1] for command in log.commands] == ["README.md", "no-such-*.md"]
    missing = subprocess.run([sys.executable, *log.commands[1][1:]], cwd=ROOT, capture_output=True, timeout=600)
    assert missing.returncode != 0


def test_suites_wait_for_what_they_run(script: Any) -> None:
    """The simulated driver that they take is suite gcc's."""
    for name in ("python", "python-abi", "tools", "wheel", "wheel-cuda", "conformance"):
        assert not script.may_begin(name, ["gcc", name], set()) and not script.may_begin(name, [name], {"gcc"})
    assert script.may_begin("python", ["python"], set())
    assert all(need in script.SUITES for needs in script.NEEDS.values() for need in needs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_runs_ends_with_it(tmp_path: Path, number: int) -> None:
    """A suite that is named twice runs once."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    code = ("import sys; from pathlib import Path; import run_tests, suite; "
            "suite.LOGS = run_tests.LOGS = Path(sys.argv.pop(1)); ready = sys.argv.pop(1); "
            "run_tests.SUITES = {'x': lambda it: run_tests.one(it.run('sh', '-c', f'exec sleep 600 > {ready}'))}; "
            "sys.exit(run_tests.main())")
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path, ready, "x", "x"], stdout=subprocess.DEVNULL,
                               env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
                               preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))  # nohup may have changed it
    with open(ready, "rb") as end:  # the command has opened it
        process.send_signal(number)
        assert process.wait(600) == 128 + number
        assert end.read() == b""  # and has ended
    assert (tmp_path / "x.log").read_text().count("$ sh") == 1
