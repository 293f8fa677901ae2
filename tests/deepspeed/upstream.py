#!/usr/bin/env python3
"""DeepSpeed's own tests of its compile package and of its transformer layer, on libdc: upstream.py CHECKOUT [PYTEST
ARGUMENT…]. PyPI's archives have no tests, so CHECKOUT is a clone of DeepSpeed's repository. Tests and package are
copied from it. Three things are changed. In the tests, the conditions that skip them where there is no CUDA are lifted.
A flag that their ranks gather gets a dimension, without which Gloo refuses it. In the package, float16 is not refused
to a processor without instructions for it, which PyTorch does not need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from launch import BUILD, HERE, NEWEST, environment, install

FOLDERS = "tests", "deepspeed", "op_builder", "accelerator", "csrc"
SUITES = "unit/compile", "unit/v1/compile", "unit/ops/accelerators"
# AutoSP and AutoTP have operators of their own.
OTHERS = "unit/v1/compile/test_compile_autosp.py", "unit/compile/test_tp_compile.py"
# Takes 20 GB.
TOO_LARGE = ("unit/ops/accelerators/test_accelerator_forward.py::TestCUDAForward::"
             "test_forward[8-8192-128-64-3-False-True]")
CONDITIONS = ('get_accelerator().device_name() == "cpu"', "not is_deepcompile_supported()",
              "not deepspeed.ops.__compatible_ops__[TransformerBuilder.NAME]",
              "not get_accelerator().is_fp16_supported()", "not bf16_required_version_check()",
              "torch.half not in get_accelerator().supported_dtypes()")
FLAG = "torch.tensor(1 if flag else 0,"
FLOAT16 = "torch.ops.mkldnn._is_mkldnn_fp16_supported()"
TARGET, LOG, EXTENSIONS = BUILD / "upstream", BUILD / "upstream.log", BUILD / "extensions"


def copy(checkout: Path) -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    for folder in FOLDERS:
        shutil.copytree(checkout / folder, TARGET / folder, symlinks=True)
    version = (checkout / "version.txt").read_text().strip()
    installed = (BUILD / NEWEST / "deepspeed" / "git_version_info_installed.py").read_text()
    (TARGET / "deepspeed" / "git_version_info_installed.py").write_text(installed.replace(NEWEST, version))
    for path in (path for suite in SUITES for path in (TARGET / "tests" / suite).glob("*.py")):
        for condition in CONDITIONS:
            replace(path, condition, "False")
    replace(TARGET / "tests" / "unit" / "common.py", FLAG, FLAG.replace("1 if flag else 0", "[1 if flag else 0]"))
    replace(TARGET / "accelerator" / "cpu_accelerator.py", FLOAT16, "True")


def replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def main() -> int:
    install(NEWEST)
    copy(Path(sys.argv[1]).resolve())
    for lock in EXTENSIONS.glob("*/lock"):
        lock.unlink()  # of a build that was ended: PyTorch would wait for it for ever
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "--color=no", "-rs", "-W",
               "ignore", *SUITES, *(f"--ignore={path}" for path in OTHERS), f"--deselect={TOO_LARGE}", *sys.argv[2:]]
    variables = environment(NEWEST, LOCAL_SIZE="2", TORCH_EXTENSIONS_DIR=str(EXTENSIONS),
                            PYTHONPATH=os.pathsep.join([str(HERE / "every"), str(TARGET), str(BUILD / "packages")]))
    with open(LOG, "wb") as log:
        done = subprocess.run(command, cwd=TARGET / "tests", env=variables, stdout=log, stderr=subprocess.STDOUT,
                              stdin=subprocess.DEVNULL)
    text = re.sub(r"\x1b\[[0-9;]*m", "", LOG.read_text())
    print(*re.findall(r"^(?:\S+::.* (?:FAILED|ERROR)|(?:FAILED|ERROR|SKIPPED) |=+ .*(?:passed|failed)).*$", text, re.M),
          sep="\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
