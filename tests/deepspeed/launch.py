"""Installs DeepSpeed from PyPI beside .venv, each version in a folder of its own, and runs training scripts with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, NoReturn

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "deepspeed"
BENCH = HERE.parent.parent / "bench"
SEED, NEWEST = "0.18.9", "0.19.8"

sys.path.append(str(BENCH))


def install(version: str) -> List[str]:
    """Folders for PYTHONPATH."""
    packages, folder = BUILD / "packages", BUILD / version
    if not packages.exists():
        _pip(packages, "-r", str(HERE / "requirements.txt"))
    if not folder.exists():
        # Its setup imports PyTorch, so it is built where that is, and compiles nothing.
        _pip(folder, "--no-build-isolation", f"deepspeed=={version}")
    return [str(folder), str(packages), str(HERE), str(BENCH)]


def _pip(folder: Path, *arguments: str) -> None:
    partial = folder.with_name(folder.name + ".part")
    subprocess.run(["rm", "-rf", str(partial)], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target",
                    str(partial), *arguments],
                   check=True, env={**os.environ, "DS_BUILD_OPS": "0"}, stdin=subprocess.DEVNULL)
    partial.rename(folder)


def environment(version: str, **more: str) -> Dict[str, str]:
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    return {**variables, "PYTHONPATH": os.pathsep.join(install(version)), "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(BUILD / "inductor"), **more}


def start(version: str, out: Path, **options: Any) -> "subprocess.Popen[bytes]":
    """Two ranks of train.py, whose result is written to `out`; options are its arguments."""
    command = [sys.executable, "-m", "libdc.run", "-n", "2", str(HERE / "train.py"), "--out", str(out)]
    for key, value in options.items():
        command += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    with open(out.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                env=environment(version))


def run(version: str, out: Path, timeout: int = 900, **options: Any) -> Dict[str, Any]:
    """train.py's result."""
    process = start(version, out, **options)
    try:
        return finish(process, out, timeout)
    finally:
        process.terminate()


def finish(process: "subprocess.Popen[bytes]", out: Path, timeout: float) -> Dict[str, Any]:
    if process.wait(timeout) != 0:
        log = out.with_suffix(".log").read_text()
        raise RuntimeError(f"{out.stem} ended with {process.returncode}:\n{log[-4000:]}")
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def leave() -> NoReturn:
    """Ends a rank, after all others came here too. DeepSpeed keeps its process groups, so that destroy_process_group()
    does not join Gloo's threads. A thread that lets go of a tensor after the interpreter has begun to end waits for the
    GIL, where Python ends it. C++ answers that by SIGABRT: "terminate called without an active exception". A process
    that skips the interpreter's end has no such moment."""
    import torch.distributed

    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def largest_difference(one: Dict[str, Any], other: Dict[str, Any]) -> float:
    """Between the losses of two runs, over all ranks and steps."""
    return max(abs(a - b) for left, right in zip(one["ranks"], other["ranks"])
               for a, b in zip(left["losses"], right["losses"]))


def operators(result: Dict[str, Any], name: str) -> List[int]:
    """How often an operator stands in each graph, in the order of compilation."""
    return [graph.get(name, 0) for graph in result["graphs"]]
