#!/usr/bin/env python3
"""DeepSpeed's own tests of its compile package on libdc: upstream.py CHECKOUT [PYTEST ARGUMENT…]. PyPI's archives have no
tests, so CHECKOUT is a clone of DeepSpeed's repository. Tests and package are copied from it; in the tests, the conditions
that skip them where there is no CUDA are lifted, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from launch import BUILD, NEWEST, environment

FOLDERS = "tests", "deepspeed", "op_builder", "accelerator", "csrc"
SUITES = "unit/compile", "unit/v1/compile"
# AutoSP and AutoTP have operators of their own.
OTHERS = "unit/v1/compile/test_compile_autosp.py", "unit/compile/test_tp_compile.py"
CONDITIONS = 'get_accelerator().device_name() == "cpu"', "not is_deepcompile_supported()"


def copy(checkout: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for folder in FOLDERS:
        shutil.copytree(checkout / folder, target / folder, symlinks=True)
    version = (checkout / "version.txt").read_text().strip()
    installed = (BUILD / NEWEST / "deepspeed" / "git_version_info_installed.py").read_text()
    (target / "deepspeed" / "git_version_info_installed.py").write_text(installed.replace(NEWEST, version))
    for path in (target / "tests" / "unit" / "v1" / "compile").glob("*.py"):
        text = path.read_text()
        for condition in CONDITIONS:
            text = text.replace(condition, "False")
        path.write_text(text)


def main() -> int:
    checkout, target = Path(sys.argv[1]).resolve(), BUILD / "upstream"
    variables = environment(NEWEST, LIBDC_DEEPSPEED="1", LOCAL_SIZE="2")
    copy(checkout, target)
    variables["PYTHONPATH"] = os.pathsep.join([str(target), str(BUILD / "packages")])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-rs", "-W", "ignore", *SUITES,
               *(f"--ignore={path}" for path in OTHERS), *sys.argv[2:]]
    done = subprocess.run(command, cwd=target / "tests", env=variables, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    (BUILD / "upstream.log").write_text(text)
    for line in re.findall(r"^(?:\S+::.*(?:FAILED|ERROR|SKIPPED).*|FAILED .*|SKIPPED .*|=+ .*(?:passed|failed).*)$", text, re.M):
        print(line)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
