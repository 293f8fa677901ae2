"""Scripts of the project that could say that all is well where they looked at nothing, or spoil what is there."""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_names_of_no_mutant_are_refused(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("mutants").main(["base/bool", "runtime/gahter"]) == 2
    assert "no name begins with runtime/gahter; they are paths below " in capsys.readouterr().err


def test_a_source_that_is_not_there_misses_lines(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    coverage = script("coverage")
    report = f"{ROOT}/src/base/op.c:\n    1|      0|  return;\n    2|      3|  done;\n{ROOT}/src/base/map.c:\n"
    monkeypatch.setattr(coverage, "llvm_cov", lambda *_: report)
    assert coverage.missed("src/base/op.c") == "    1|      0|  return;" and coverage.missed("base/map.c") == ""
    with pytest.raises(SystemExit, match="--lines base/po.c: no source has this name"):
        coverage.missed("base/po.c")


@pytest.mark.parametrize("text, faults", [
    ("```sh\ntrue\n```\n", 0), ("```c++\nint x;\n```\n\n```sh\nfalse\n```\n", 1),
    ("```sh\ntrue\n```\n\n  ```sh\n  false\n  ```\n", 1), ("~~~sh\nfalse\n~~~\n", 1)])
def test_no_block_is_missed(script: Any, tmp_path: Path, text: str, faults: int) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    found = script("run_blocks").blocks(page)
    assert len(found) == faults and all("which are ends of blocks" in fault for fault in found), found


def test_a_page_leaves_no_training_behind(script: Any, tmp_path: Path) -> None:
    """Nor does it touch the folder of one that runs meanwhile."""
    line = f'cd "{ROOT}/examples/gpt" && "{sys.executable}" -c "import options; print(options.RUNS)"'
    said = script("run_blocks").sh(line, tmp_path)
    assert (said.output.splitlines()[-1], said.fault) == (str(tmp_path), "")
    assert "LIBDC_TRAIN_RUNS" not in os.environ


def test_a_packages_folder_may_have_others(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, folder = script("card_package"), tmp_path / "site"
    monkeypatch.setattr(package, "WHEELS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["card_package.py", str(folder)])
    for name in package.NAMES:
        with zipfile.ZipFile(tmp_path / f"{name}-1-any.whl", "w") as wheel:
            wheel.writestr(f"libdc/{name}.so", "new")
    for other in ("mine/notes.py", "libdc/gone.py", "libdc-0.dist-info/METADATA"):
        (folder / other).parent.mkdir(parents=True, exist_ok=True)
        (folder / other).write_text("old")
    package.main()
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "libdc/libdc.so", "libdc/libdc_cuda.so", "mine/notes.py"]


def test_a_kit_is_whole_or_that_of_before(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit, archive = script("card_kit"), tmp_path / "kit.tar"
    archive.write_text("that of before")
    monkeypatch.setattr(sys, "argv", ["card_kit.py", str(tmp_path), str(archive)])
    monkeypatch.setattr(kit, "fill", lambda folder, *_: folder.mkdir())
    with monkeypatch.context() as stopped:
        stopped.setattr(tarfile.TarFile, "add", lambda *_: sys.exit("stopped"))
        with pytest.raises(SystemExit, match="stopped"):
            kit.main()
    assert archive.read_text() == "that of before"
    assert kit.main() == 0 and tarfile.open(archive).getnames() == [kit.NAME]
    assert list(tmp_path.iterdir()) == [archive]
