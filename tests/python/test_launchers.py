"""The command lines of docs/guide/several-machines.md for srun, mpirun and torchrun. Stand-ins for these start two
machines' ranks here and set what the real ones set. The ranks meet over TCP with the run's secret."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from libdc._secret import make_secret
from libdc.launch import environment_ports

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "several-machines.md"
SCRIPT = """
import os

import libdc
import numpy as np
from libdc._secret import environment_secret

comm = libdc.init_comm(timeout=600)
total = comm.all_reduce(np.full(1, comm.rank + 1.0))[0]
os.write(1, f"{comm.rank} {comm.size} {total} {len(environment_secret()) >= 16}\\n".encode())  # whole
"""
# The nodes' environment, of two nodes with one task each; for torchrun of two ranks.
NODES = {
    "srun": "SLURM_NNODES=2 SLURM_NODEID={i} SLURM_JOB_ID=77",
    "mpirun": "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK={i}",
    "torchrun": "RANK={i} LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT={port}",
}
# It exports the variables of `-x`, starts the command from `sh` or the script's name on twice, and fails if one does.
STAND_IN = """#!{python}
import os, shlex, subprocess, sys
words = sys.argv[1:]
start = words.index("sh") if "sh" in words else len(words) - 1
given = [words[i + 1] for i in range(start) if words[i] == "-x" and "=" in words[i + 1]]
command = words[start:] if words[start] == "sh" else [{python!r}, *words[start:]]
nodes = [subprocess.Popen(command, env={{**os.environ, **dict(pair.split("=", 1) for pair in
                                         given + shlex.split({node!r}.replace("{{i}}", str(i))))}}) for i in range(2)]
sys.exit(max(node.wait() for node in nodes))
"""


@pytest.mark.parametrize("launcher", NODES)
def test_the_guide_s_lines(launcher: str, tmp_path: Path, port: int) -> None:
    line = next(line for line in GUIDE.read_text().splitlines() if f"{launcher} --" in line)
    line = line.replace("-n 8", "-n 1").replace("29500", str(port)).replace("python ", f"{sys.executable} ")
    stand_in = tmp_path / launcher
    stand_in.write_text(STAND_IN.format(python=sys.executable, node=NODES[launcher].replace("{port}", str(port))))
    stand_in.chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT)
    made_before = "LIBDC_SECRET_FILE" in line
    if made_before:
        make_secret(str(tmp_path / "secret"))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LIBDC_", "SLURM_", "OMPI_"))}
    done = subprocess.run(["sh", "-c", line], text=True, capture_output=True, timeout=600, cwd=tmp_path,
                          env={**kept, "HOME": str(tmp_path), "HOST": "localhost",
                               "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 3.0 True", "1 2 3.0 True"], done.stdout + done.stderr
    left = {"train.py", launcher} | ({"secret"} if made_before else set())
    assert {entry.name for entry in tmp_path.iterdir()} == left
    assert not made_before or stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_the_ports_have_the_limits_of_the_option(monkeypatch):
    for value in ("x", "5", "5-3", "0-9", "0-0", "1-65536", "-1-5"):
        monkeypatch.setenv("LIBDC_PORTS", value)
        with pytest.raises(RuntimeError, match=f"LIBDC_PORTS={value}: must be FIRST-LAST, in 1..65535"):
            environment_ports()
    for value, ports in ("", (0, 0)), ("40000-40999", (40000, 40999)):
        monkeypatch.setenv("LIBDC_PORTS", value)
        assert environment_ports() == ports
