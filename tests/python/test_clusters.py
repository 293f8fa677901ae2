"""The files of examples/clusters start two machines' ranks, which meet. Stand-ins for srun and Ray start them here, and
set the variables of the real ones; the pods' commands run with those of Kubernetes."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import yaml  # myst-parser needs it

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
SCRIPT = """
import os, sys
import libdc
import numpy as np
comm = libdc.init_comm(timeout=600)
launch = libdc.get_launch()
total = comm.all_reduce(np.full(1, comm.rank + 1.0))[0]
line = f"{launch.launcher} {comm.rank} {comm.size} {total} {launch.local_size} {sys.argv[1:]}\\n"
os.write(1, line.encode())  # whole
"""
# Two nodes with two tasks each, as --nodes and --ntasks-per-node of a small job have them.
SRUN = """#!{python}
import os, subprocess, sys
assert not any(os.environ[key] in " ".join(sys.argv) for key in os.environ if key.startswith("LIBDC_SECRET"))
command = sys.argv[next(i for i in range(1, len(sys.argv)) if not sys.argv[i].startswith("-")):]
tasks = []
for rank in range(4):
    step = dict(SLURM_PROCID=rank, SLURM_LOCALID=rank % 2, SLURM_NODEID=rank // 2, SLURM_STEP_ID=0,
                SLURM_STEP_NUM_TASKS=4, SLURM_STEP_NUM_NODES=2, SLURM_STEP_TASKS_PER_NODE="2(x2)",
                SLURM_STEP_NODELIST="localhost,other", PMIX_RANK=rank)
    tasks.append(subprocess.Popen(command, env={{**os.environ, **{{key: str(step[key]) for key in step}}}}))
sys.exit(max(task.wait() for task in tasks))
"""
RAY = """
import os
import threading

class Reference:
    def __init__(self, function, arguments):
        self.thread = threading.Thread(target=lambda: setattr(self, "value", function(*arguments)))
        self.thread.start()

class Method:
    def __init__(self, function):
        self.function = function
    def remote(self, *arguments):
        return Reference(self.function, arguments)

class Handle:
    def __init__(self, actor):
        self.actor = actor
    def __getattr__(self, name):
        return Method(getattr(self.actor, name))

class Class:
    def __init__(self, kind):
        self.kind = kind
    def options(self, num_cpus, scheduling_strategy):
        assert scheduling_strategy.placement_group.bundles[0] == {"CPU": num_cpus}
        return self
    def remote(self):
        return Handle(self.kind())

def init():
    pass
def remote(kind):
    return Class(kind)
def get(found):
    if isinstance(found, list):
        return [get(one) for one in found]
    if isinstance(found, Reference):
        found.thread.join()
        return found.value
    return found
"""
RAY_UTIL = {
    "__init__.py": "def get_node_ip_address():\n    return '127.0.0.1'\n",
    "placement_group.py": "class placement_group:\n    def __init__(self, bundles, strategy):\n"
                          "        assert strategy == 'STRICT_SPREAD'\n        self.bundles = bundles\n"
                          "    def ready(self):\n        return True\n",
    "scheduling_strategies.py": "class PlacementGroupSchedulingStrategy:\n"
                                "    def __init__(self, placement_group, placement_group_bundle_index):\n"
                                "        self.placement_group = placement_group\n",
}


@pytest.fixture
def environment(tmp_path: Path) -> Dict[str, str]:
    """Without the variables of a launcher; `python` is this one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    prefixes = ("LIBDC_", "SLURM_", "OMPI_", "PMI", "FLUX_", "RANK", "WORLD_SIZE", "MASTER_")
    return {**{key: value for key, value in os.environ.items() if not key.startswith(prefixes)},
            "HOME": str(tmp_path), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


def check_output(done: "subprocess.CompletedProcess[str]", launcher: str, local: int, arguments: List[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = 2 * local
    total = ranks * (ranks + 1) / 2
    expected = [f"{launcher} {rank} {ranks} {total} {local} {arguments}" for rank in range(ranks)]
    assert sorted(done.stdout.splitlines()) == expected, done.stdout + done.stderr


def test_slurm(environment: Dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN.format(python=sys.executable))
    (tmp_path / "srun").chmod(0o755)
    job = free_slurm_job()
    batch = {**environment, "SLURM_JOB_ID": str(job), "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    done = subprocess.run(["sh", str(CLUSTERS / "slurm.sh"), "train.py", "--steps", "1"], text=True, timeout=600,
                          capture_output=True, cwd=tmp_path, env=batch)
    check_output(done, "slurm", 2, ["--steps", "1"])
    assert not list(tmp_path.glob(".libdc-secret*"))


def free_slurm_job() -> int:
    """A job whose port is free."""
    while True:
        job = secrets.randbelow(4000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 61440 + job))
                return job
            except OSError:
                pass


def run_pods(pods: List[Dict[str, Any]], given: List[Dict[str, str]], environment: Dict[str, str], folder: Path,
             replaced: Dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Runs the pods' commands beside each other."""
    secret, started = secrets.token_hex(16), []
    for pod, variables in zip(pods, given):
        (container,) = pod["containers"]
        (own,) = container["env"]
        assert own == {"name": "LIBDC_SECRET", "valueFrom": {"secretKeyRef": {"name": "libdc", "key": "secret"}}}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        (line,) = container["args"]
        for old, new in {"-n 8": "-n 1", **replaced}.items():
            line = line.replace(old, new)
        started.append(subprocess.Popen([*container["command"], line], text=True, cwd=folder, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT,
                                        env={**environment, **variables, "LIBDC_SECRET": secret}))
    outputs = [process.communicate(timeout=600)[0] for process in started]
    return subprocess.CompletedProcess([], max(process.returncode for process in started), "".join(outputs), "")


def test_jobset(environment: Dict[str, str], tmp_path: Path, port: int) -> None:
    job_set = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], job_set["metadata"]["name"]
    assert job["completions"] == job["parallelism"] == 2 and job["completionMode"] == "Indexed"
    first_pod = f"{name}-{replicated['name']}-0-0.{name}:29500"
    assert first_pod in job["template"]["spec"]["containers"][0]["args"][0]
    done = run_pods([job["template"]["spec"]] * 2, [{"JOB_COMPLETION_INDEX": str(i)} for i in range(2)], environment,
                    tmp_path, {first_pod: f"localhost:{port}"})
    check_output(done, "environment", 1, [])


def test_pytorchjob(environment: Dict[str, str], tmp_path: Path, port: int) -> None:
    replicas = yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text())["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == replicas["Worker"]["replicas"] == 1
    pods = [replicas[kind]["template"]["spec"] for kind in ("Master", "Worker")]
    assert all(pod["containers"][0]["name"] == "pytorch" for pod in pods)  # or the operator refuses it
    done = run_pods(pods, [{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(i),
                            "PET_NODE_RANK": str(i), "PET_NNODES": "2"} for i in range(2)], environment, tmp_path, {})
    check_output(done, "environment", 1, [])


def test_ray(environment: Dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ray" / "util").mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text("from . import util\n" + RAY)
    for name, text in RAY_UTIL.items():
        (tmp_path / "ray" / "util" / name).write_text(text)
    done = subprocess.run([sys.executable, str(CLUSTERS / "ray_ranks.py"), "--nodes", "2", "-n", "2", "train.py", "-v"],
                          text=True, capture_output=True, timeout=600, cwd=tmp_path,
                          env={**environment, "PYTHONPATH": str(tmp_path)})
    check_output(done, "environment", 2, ["-v"])
