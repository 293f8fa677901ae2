"""The communicator that a launcher's environment describes."""

from __future__ import annotations

import itertools
import os
from typing import Optional, Tuple

from ._secret import environment_secret
from .comm import Comm

_num_created = itertools.count()


def init_comm(timeout: Optional[float] = None) -> Comm:
    """This process's communicator, from RANK and WORLD_SIZE as `python -m libdc.run` and torchrun set them. Without
    them it is over MPI if mpirun started the process (OMPI_COMM_WORLD_SIZE or PMI_SIZE), else a world of one. Ranks of
    several machines meet over TCP at MASTER_ADDR, on the port after MASTER_PORT, and need a secret in LIBDC_SECRET or
    LIBDC_SECRET_FILE. LIBDC_INTERFACE and LIBDC_PORTS say where they listen, and LIBDC_TLS=1 encrypts. Ranks that call
    it more than once must do so equally often; each call takes another port."""
    if "WORLD_SIZE" not in os.environ and int(_mpi_size()) > 1:
        if environment_tls():
            raise RuntimeError("init_comm: LIBDC_TLS=1, but MPI moves the data, and libdc cannot encrypt it")
        return Comm.mpi(timeout, os.environ.get("LIBDC_INTERFACE") or None, environment_ports())
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Comm.single()
    spread = int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world
    if spread and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise RuntimeError("init_comm: ranks of several machines (LOCAL_WORLD_SIZE is not WORLD_SIZE) need MASTER_ADDR "
                           "and MASTER_PORT")
    rank, group, made = int(os.environ["RANK"]), _group_name(), next(_num_created)
    if not spread:
        return Comm.processes(f"{group}.{made}", rank, world, timeout)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1 + made
    return Comm.tcp(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", f"{group}.{made}", rank, world, timeout,
                    environment_secret(), os.environ.get("LIBDC_INTERFACE") or None, environment_ports(),
                    tls=environment_tls())


def _mpi_size() -> str:
    """How many ranks a launcher of MPI says that it started: Open MPI's, or MPICH's and Intel's."""
    return os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or "1"


def environment_ports() -> Tuple[int, int]:
    """LIBDC_PORTS, such as 40000-40999."""
    text = os.environ.get("LIBDC_PORTS") or "0-0"
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit()):
        raise RuntimeError(f"init_comm: LIBDC_PORTS={text}: must be FIRST-LAST")
    return int(first), int(last)


def environment_tls() -> bool:
    """Whether ranks encrypt what they send over TCP: LIBDC_TLS."""
    text = os.environ.get("LIBDC_TLS") or "0"
    if text not in ("0", "1"):
        raise RuntimeError(f"init_comm: LIBDC_TLS={text}: must be 0 or 1")
    return text == "1"


def _group_name() -> str:
    """Unlike any other group's that may be under way."""
    group = os.environ.get("LIBDC_GROUP")
    if group:
        return group
    parts = [os.environ.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
                                                 "TORCHELASTIC_RESTART_COUNT")]
    if not parts[1]:
        raise RuntimeError("init_comm: WORLD_SIZE > 1 needs LIBDC_GROUP, or MASTER_ADDR and MASTER_PORT")
    import hashlib  # here, since `import libdc` shall be quick

    return "libdc-" + hashlib.sha256(":".join(parts).encode()).hexdigest()[:32]
