"""Ranks that mpirun started: libdc.init_comm finds them, with each MPI that is here."""

import os
import re
import shutil
import subprocess
import sys
from typing import Dict, List

import libdc
import pytest
from libdc import Comm, Error, Status

RANK = """
from array import array
import libdc
comm = libdc.init_comm(60)
values = array("f", [comm.rank + 0.5])
comm.all_reduce(values)
print(f"rank {comm.rank} of {comm.size} has {values[0]} by {libdc.mpi_version()}; ", flush=True)
comm.barrier()
"""


def run_ranks(launcher: str, *options: str) -> List[str]:
    if shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not here")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    ran = subprocess.run([launcher, *options, "-n", "2", sys.executable, "-c", RANK], env=environment, timeout=120,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, ran.stdout
    return sorted(re.findall(r"rank .*?; ", ran.stdout))  # a launcher may put two ranks' lines into one


@pytest.mark.parametrize("launcher, options, name", [("mpirun.mpich", [], "MPICH"),
                                                     ("mpirun.openmpi", ["--oversubscribe"], "Open MPI")])
def test_init_comm_knows_mpirun(launcher: str, options: List[str], name: str) -> None:
    lines = run_ranks(launcher, *options)
    assert [line.split(" by ")[0] for line in lines] == [f"rank {r} of 2 has 2.0" for r in range(2)]
    assert all(name in line for line in lines)


@pytest.mark.parametrize("variables, says", [
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "(openmpi), but MPI: there is none: LIBDC_MPI_LIB"),
    ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0", "FLUX_JOB_ID": "f1", "PMI_RANK": "0", "PMI_SIZE": "2"},
     "init_comm: ranks of several machines (flux) need MASTER_ADDR and MASTER_PORT"),
])
def test_a_launcher_of_mpi_without_mpi(variables: Dict[str, str], says: str) -> None:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    ran = subprocess.run([sys.executable, "-c", RANK], text=True, capture_output=True, timeout=120,
                         env={**kept, **variables, "LIBDC_MPI_LIB": "/nowhere/libmpi.so"})
    assert ran.returncode == 1 and says in ran.stderr, ran.stderr


def test_mpi_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_FD", "PMIX_RANK", "SLURM_PROCID", "PALS_RANKID",
                "FLUX_TASK_RANK"):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(Error, match="MPI") as caught:
        Comm.mpi(timeout=5)
    assert caught.value.status == Status.E_UNSUPPORTED
    try:
        assert "by the ABI of" in libdc.mpi_version()
    except Error as error:
        assert "MPI: there is none" in str(error)
