"""The kit for a machine with a card, rehearsed as a whole on the simulated driver. It is packed and unpacked, and
scripts/gpu-check goes through its rows. Some of them fail, crash or hang, and a call is stopped. The programs are those
of suite gcc. The machine has no pip, and no PyTorch, so that its rows tell that. Figures of speed take a simulated card
too long."""

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
SANITIZER = """echo '[  PASSED  ] 1 test(s).'
case "$*" in *memcheck*card_step*) echo "ERROR SUMMARY: 3 errors"; exit 99;; esac
case "$*" in *initcheck*card_step*) ;; *) echo "ERROR SUMMARY: 0 errors";; esac"""


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
        venv.create(folder / "venv", with_pip=False)
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
        """The driver is where the loader looks."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")}
        return {**kept, "PATH": f"{self.tools}:/usr/bin:/bin", "CUDASIM_CARDS": "2",
                "LD_LIBRARY_PATH": str(self.programs)}

    def call(self, *arguments: Any, **more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(self.command(*arguments), env={**self.environment(), **more}, cwd=self.root, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def results(self) -> Dict[str, Any]:
        return dict(json.loads(self.report.read_text())["results"]) if self.report.exists() else {}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("kit"))


def stopped_after_a_row(kit: Kit, number: int) -> str:
    """The output of a call that gets a signal as soon as it has run another row."""
    done = kit.results().keys() | {"install"}
    process = subprocess.Popen(kit.command(*LIMITS, kit.report), env=kit.environment(), cwd=kit.root, text=True,
                               stdout=subprocess.PIPE, start_new_session=True)
    while kit.results().keys() <= done:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    said = process.communicate()[0]
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    return said


def test_every_row_is_gone_through(kit: Kit) -> None:
    for name, text in FAULTS.items():
        kit.replace(name, text)
    made_of = json.loads((kit.root / "build" / "gpu" / "kit.json").read_text())
    assert made_of["simulated"] and made_of["programs"] > 30
    said = "".join(stopped_after_a_row(kit, number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL))
    done = {name: result for name, result in kit.results().items() if name != "install"}
    assert len(done) >= 3
    first = kit.call(*LIMITS, "--seconds", 3600, kit.report)  # a busy machine takes its time
    assert first.returncode == 1
    said += first.stdout
    assert {name: kit.results()[name] for name in done} == done  # they were not run again
    status = {name: result["status"] for name, result in kit.results().items()}
    assert {name: code for name, code in status.items() if code != 0} == {
        "card_kernels_attention": 124, "card_kernels_rowops": 1, "card_linalg_eigh_errors": -signal.SIGSEGV,
        "card_linalg_matrix_functions": 1, "host cost": 124, "layer speed 512": 1}
    assert "look" in status and "card_step" in status and "card_runtime_capture" in status and "moves" not in status
    opened = (kit.report.with_name("first-logs") / "package.log").read_text()  # by the wheels
    assert f"opens the card from {kit.root}/build/gpu/package/libdc/" in opened
    for line in ("    a kernel does not end\n    its 1.0 seconds were over", "    cudasim: /nowhere cannot be read",
                 "    [  ERROR   ] --- 1 != 2"):
        assert f"{line}\n" in said
    assert "No module named" in said and str(kit.report) in first.stdout.splitlines()[-1]

    second = kit.call(*LIMITS, "--seconds", 3600, kit.report)
    status = {name: result["status"] for name, result in kit.results().items()}
    assert status["moves"] == 124 and status["nccl card_step"] == 0 and status["cards card_step"] == 0
    assert "left out, since card_linalg_matrix_functions failed: roots 1024 x 1, " in second.stdout
    assert status["torch"] == 1 and status["bounded products"] == 1
    log = kit.report.with_name("first-logs") / "torch.log"
    assert "No module named" in log.read_text()

    third = kit.call("--seconds", 3600, kit.report)
    status = {name: result["status"] for name, result in kit.results().items()}
    assert status["memcheck card_step"] == 99 and status["racecheck card_step"] == 0
    assert status["initcheck card_step"] == 1  # the sanitizer said nothing of its own
    assert "    ERROR SUMMARY: 3 errors\n" in third.stdout
    fourth = kit.call(kit.report)
    left = re.search("; left: (.*); ", fourth.stdout)
    assert left is not None and left[1].startswith("roots 1024 x 1, ")
    assert len(fourth.stdout.splitlines()) == 2  # the wheels, and nothing that is left can run


@pytest.mark.parametrize("more, text", [
    ({"CUDASIM_VERSION": "11080"}, "the NVIDIA driver is too old: it knows CUDA 11.8, 12.0 or later is needed"),
    ({"CUDASIM_VERSION": "12000"}, "install the package nvidia-cublas-cu12, or name its folder in LIBDC_CUDA_LIB_DIR"),
    ({"CUDASIM_MAJOR": "7"}, "has compute capability 7.0, must be 8.0 or more"),
    ({"CUDASIM_MIB": "2"}, "out of memory")])
def test_a_machine_that_will_not_do_is_told_why(kit: Kit, more: Dict[str, str], text: str) -> None:
    report = kit.report.with_name("other.json")
    report.unlink(missing_ok=True)
    said = kit.call("--seconds", 3600, report, **more).stdout
    assert "look: status 1" in said and text in said
    assert re.search(r"^left out, since look failed: card_kernels_elementwise, .* and \d+ more$", said, re.M)
    assert said.endswith("; what failed runs again where it is named\n")
    assert json.loads(report.read_text())["results"]["look"]["status"] == 1


def test_eight_cards_of_another_kind(kit: Kit) -> None:
    """Ranks on each of them. Cards without machine code of their own get the PTX."""
    script(kit.tools / "nvidia-smi", "for i in 1 2 3 4 5 6 7 8; do echo 'a card, 1'; done")
    rows = ["look", "package", "card_step", "nccl card_step", "cards card_step"]
    report = kit.report.with_name("eight.json")
    said = kit.call("--seconds", 3600, report, *rows, CUDASIM_CARDS="8", CUDASIM_MAJOR="12").stdout
    script(kit.tools / "nvidia-smi", f"echo '{CARDS}'")
    found = json.loads(report.read_text())["results"]
    assert {name: found[name]["status"] for name in rows} == dict.fromkeys(rows, 0), said
    assert said.splitlines()[-1].startswith("8 x a card, 1: ")


def test_programs_that_do_not_start_are_built(kit: Kit) -> None:
    library = kit.programs / "libcuda.so.1"
    library.rename(library.with_suffix(".away"))
    script(kit.tools / "meson", "echo 'no compiler here'; exit 5")
    found = kit.call(kit.report.with_name("second.json"), PATH=str(kit.tools))
    assert found.returncode == 1
    assert "the kit's programs do not start here (libcuda.so.1 => not found), so they are built; " in found.stdout
    assert re.search(r"^a build needs .*ninja.*, which this machine lacks$", found.stdout, re.M)
    assert "setup: status 5 after" in found.stdout and "    no compiler here\n" in found.stdout
    assert "left out, since build failed: look, " in found.stdout and "package: status 1" in found.stdout
