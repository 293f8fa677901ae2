"""The checks of scripts/checks look at all that they are for, and the manual has no page of what is gone."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest


def test_a_tarball_has_the_files_that_no_build_has_made(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                        ) -> None:
    monkeypatch.setattr(script("check_english"), "ROOT", tmp_path)
    for name in ("mine/my file é.c", "build/gcc/b.c", ".venv/lib/c.py", "mine/__pycache__/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert script("check_english").tracked_files() == ["mine/my file é.c"]
    monkeypatch.setattr(script("check_commits"), "ROOT", tmp_path)
    assert script("check_commits").main() == 0  # it has no commits


def test_a_git_that_fails_is_not_taken_for_none(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").write_text("no repository\n")
    for name in ("check_english", "check_commits"):
        monkeypatch.setattr(script(name), "ROOT", tmp_path)
    for body in (script("check_english").tracked_files, script("check_commits").main):
        with pytest.raises(subprocess.CalledProcessError):
            body()


def test_sources_of_each_kind_have_a_width(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_english", "check_checklist"):
        monkeypatch.setattr(script(name), "ROOT", tmp_path)
    names = ("a.c", "a.cpp", "a.cu", "a.h", "a.py", "a.rs")
    for name in names:
        (tmp_path / name).write_text("x" * 121)
    assert sorted(script("check_checklist").long_files()) == [
        f"{name}:1 has 121 columns, at most 120 are allowed" for name in names]


def test_an_include_needs_no_blank(script: Any, tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text('#include"comm/shm/heap.h"\n#  include <math.h>\n/* includes */\n')
    assert list(script("check_arrows").includes(source)) == [(1, '"comm/shm/heap.h"', "comm/shm/heap.h"),
                                                             (2, "<math.h>", "math.h")]


def test_a_family_that_is_not_found_is_missed(script: Any, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    check = script("check_ptx")
    monkeypatch.setattr(check, "FAMILIES", check.FAMILIES[1:])
    assert check.main() == 1 and "the sources of elementwise have changed" in capsys.readouterr().out


def test_locks_without_offsets_hold_nothing(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, model = script("check_manual"), script("manual").read()
    assert list(check.check_layout(model)) == []
    monkeypatch.setattr(script("manual"), "ROOT", tmp_path)
    assert list(check.check_layout(model)) == ["there is no tests/abi/layout_*.c"]
    (tmp_path / "tests" / "abi").mkdir(parents=True)
    (tmp_path / "tests" / "abi" / "layout_0.c").write_text("_Static_assert(sizeof(dc_tensor) == 64);\n")
    assert list(check.check_layout(model)) == ["layout_0.c has no offsets"]


def test_the_manual_has_no_page_of_what_is_gone(script: Any, tmp_path: Path) -> None:
    for name in ("dc_before.3", "dc_before.7", "mine.3"):
        (tmp_path / name).touch()
    script("make_docs").make_man(script("manual").read(), "3", tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"dc_before.7", "mine.3", "dc_init.3", "dc_tensor.3"} and "dc_before.3" not in names
