"""The kit for a machine with a card, rehearsed as a whole on the simulated driver. It is packed and unpacked, and
scripts/gpu-check goes through its rows. Some of them fail, crash or hang, and a call is stopped. The programs are those
of suite gcc. There is no PyTorch, so that its rows tell that. Figures of speed take a simulated card too long."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any, Dict, List

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ["--limit", "card_kernels_attention=1", "--limit", "moves=1", "--limit", "*host cost=1"]
CARDS = "a simulated card, 1\na simulated card, 1"
FAULTS = {"card_kernels_attention": "echo 'a kernel does not end'; sleep 600",
          "card_kernels_rowops": "CUDASIM_PTX=/nowhere exec {real}",
          "card_linalg_eigh_errors": "kill -SEGV $$",
          "card_linalg_matrix_functions": "echo '[  ERROR   ] --- 1 != 2'; exit 1"}
SLOW = ("linalg_eigh", "linalg_per_sample", "transformer_layer", "sums", "buckets", "optim_kfac")
SANITIZER = 'case "$*" in *memcheck*card_step*) echo "ERROR SUMMARY: 3 errors"; exit 99;; esac'


def script(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


class Kit:
    def __init__(self, folder: Path) -> None:
        archive = folder / "kit.tar"
        subprocess.run([sys.executable, "scripts/card_kit.py", "build/gcc", archive, "--simulated"], cwd=ROOT,
                       check=True)
        subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
        self.root, self.tools = folder / "libdc-card-kit", folder / "tools"
        self.programs = self.root / "build" / "gpu" / "tests" / "card"
        self.python = folder / "venv" / "bin" / "python"
        self.report = folder / "out" / "first.json"
        self.tools.mkdir()
        venv.create(folder / "venv")
        script(self.tools / "nvidia-smi", f"echo '{CARDS}'")
        script(self.tools / "compute-sanitizer", SANITIZER)
        self.replace("card_look", "exec {real} 64")
        for name in SLOW:  # suite gcc has run them
            self.replace(f"card_{name}", "echo '[  PASSED  ] 1 test(s).'")

    def replace(self, name: str, text: str) -> None:
        real = self.programs / f"{name}.real"
        if not real.exists():
            shutil.move(self.programs / name, real)
        script(self.programs / name, text.format(real=real))

    def command(self, *arguments: Any) -> List[str]:
        return [str(self.python), str(self.root / "scripts" / "gpu-check"), *map(str, arguments)]

    def environment(self) -> Dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
        return {**kept, "PATH": f"{self.tools}:/usr/bin:/bin", "CUDASIM_CARDS": "2"}

    def call(self, *arguments: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(self.command(*arguments), env=self.environment(), cwd=self.root, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def results(self) -> Dict[str, Any]:
        return dict(json.loads(self.report.read_text())["results"]) if self.report.exists() else {}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("kit"))


def stopped_after_a_row(kit: Kit) -> str:
    """The output of a call that is stopped as soon as a row is done."""
    process = subprocess.Popen(kit.command(*LIMITS, kit.report), env=kit.environment(), cwd=kit.root, text=True,
                               stdout=subprocess.PIPE, start_new_session=True)
    while not kit.results():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM
    return said


def test_every_row_is_gone_through(kit: Kit) -> None:
    for name, text in FAULTS.items():
        kit.replace(name, text)
    made_of = json.loads((kit.root / "build" / "gpu" / "kit.json").read_text())
    assert made_of["simulated"] and made_of["programs"] > 30
    said = stopped_after_a_row(kit)
    done = kit.results()
    first = kit.call(*LIMITS, "--seconds", 3600, kit.report)  # a busy machine takes its time
    assert first.returncode == 1
    said += first.stdout
    assert {name: kit.results()[name] for name in done} == done  # they were not run again
    status = {name: result["status"] for name, result in kit.results().items()}
    assert {name: code for name, code in status.items() if code != 0} == {
        "card_kernels_attention": 124, "card_kernels_rowops": 1, "card_linalg_eigh_errors": -signal.SIGSEGV,
        "card_linalg_matrix_functions": 1, "host cost": 124, "layer speed 512": 1}
    assert "look" in status and "card_step" in status and "card_runtime_capture" in status and "moves" not in status
    for line in ("    a kernel does not end\n    its 1.0 seconds were over", "    cudasim: /nowhere cannot be read",
                 "    [  ERROR   ] --- 1 != 2"):
        assert f"{line}\n" in said
    assert "No module named" in said and str(kit.report) in first.stdout.splitlines()[-1]

    second = kit.call(*LIMITS, "--seconds", 3600, kit.report)
    status = {name: result["status"] for name, result in kit.results().items()}
    assert status["moves"] == 124 and status["nccl card_step"] == 0 and status["cards card_step"] == 0
    assert "roots 1024 x 1: left out, since card_linalg_matrix_functions failed\n" in second.stdout
    assert status["torch"] == 1 and status["bounded products"] == 1
    log = kit.report.with_name("first-logs") / "torch.log"
    assert "No module named" in log.read_text()

    third = kit.call("--seconds", 3600, kit.report)
    status = {name: result["status"] for name, result in kit.results().items()}
    assert status["memcheck card_step"] == 99 and status["racecheck card_step"] == 0
    assert "    ERROR SUMMARY: 3 errors\n" in third.stdout
    fourth = kit.call(kit.report)
    left = re.search("; left: (.*); ", fourth.stdout)
    assert left is not None and left[1].startswith("roots 1024 x 1, ")
    assert len(fourth.stdout.splitlines()) == 1  # nothing that is left can run


def test_programs_that_do_not_start_are_built(kit: Kit) -> None:
    library = kit.programs / "libcuda.so.1"
    library.rename(library.with_suffix(".away"))
    script(kit.tools / "meson", "echo 'no compiler here'; exit 5")
    found = kit.call(kit.report.with_name("second.json"))
    assert found.returncode == 1
    assert "the kit's programs do not start here (libcuda.so.1 => not found), so they are built\n" in found.stdout
    assert "setup: status 5 after" in found.stdout and "    no compiler here\n" in found.stdout
    assert "card_step: status" not in found.stdout
