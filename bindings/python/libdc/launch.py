"""The communicator that a launcher's environment describes."""

from __future__ import annotations

import itertools
import os
import re
from typing import Optional, Tuple

from ._lib import ffi, lib, new_struct, text
from ._secret import environment_secret, environment_tls
from .comm import Comm
from .errors import Error, check
from .types import Launch

_num_created = itertools.count()


def get_launch() -> Launch:
    """Reads the environment of the launcher that started this process: torchrun, libdc.run, mpirun, srun or flux run,
    looked for in the order of dc_launch_get. LIBDC_LAUNCHER chooses one if the environment has several."""
    found = new_struct("dc_launch")
    check(lib.dc_launch_get(found))
    return Launch(text(found.launcher), _optional_text(found.address), _optional_text(found.group), found.rank,
                  found.world_size, found.local_rank if found.local_rank >= 0 else None, found.local_size or None,
                  found.node if found.node >= 0 else None, bool(found.uses_mpi))


def _optional_text(pointer: object) -> Optional[str]:
    return None if pointer == ffi.NULL else text(pointer)


def init_comm(timeout: Optional[float] = None) -> Comm:
    """This process's communicator, from its launcher's environment (see get_launch). It is over MPI if the launcher can
    start MPI, over shared memory if all ranks are on one machine, else over TCP. Without a launcher it is a world of
    one. Over TCP ranks meet at the launcher's address, and need a secret in LIBDC_SECRET or LIBDC_SECRET_FILE;
    LIBDC_INTERFACE and LIBDC_PORTS say where they listen, and LIBDC_TLS=1 encrypts. All ranks must call it equally
    often; each call uses another port."""
    launch = get_launch()
    if launch.world_size == 1:
        return Comm.single()
    if launch.uses_mpi and _loads_mpi(launch):
        if environment_tls():
            raise RuntimeError("init_comm: LIBDC_TLS=1, but MPI moves the data, and libdc cannot encrypt it")
        return Comm.mpi(timeout, os.environ.get("LIBDC_INTERFACE") or None, environment_ports())
    one_machine = launch.local_size == launch.world_size
    if launch.address is None and not one_machine:
        raise RuntimeError(f"init_comm: ranks of several machines ({launch.launcher}) need MASTER_ADDR and "
                           "MASTER_PORT, rank 0's machine and a free port of its")
    if launch.group is None:
        raise RuntimeError(f"init_comm: {launch.world_size} ranks ({launch.launcher}) need a name in common: set "
                           "LIBDC_GROUP, or MASTER_ADDR and MASTER_PORT")
    made = next(_num_created)
    group = f"{launch.group}.{made}"
    if launch.address is None or one_machine:
        return Comm.processes(group, launch.rank, launch.world_size, timeout)
    host, _, port = launch.address.rpartition(":")
    return Comm.tcp(f"{host}:{int(port) + made}", group, launch.rank, launch.world_size, timeout, environment_secret(),
                    os.environ.get("LIBDC_INTERFACE") or None, environment_ports(), tls=environment_tls())


def _loads_mpi(launch: Launch) -> bool:
    """Whether MPI's library loads. Under Slurm and Flux the ranks can meet without it; under others a failure is an
    error."""
    try:
        check(lib.dc_mpi_get_version(ffi.new("const char **")))
    except Error as error:
        if launch.launcher in ("slurm", "flux"):
            return False
        raise RuntimeError(f"init_comm: a launcher of MPI started this process ({launch.launcher}), but {error}; name "
                           "one in LIBDC_MPI_LIB, or start the ranks with torchrun or python -m libdc.run") from None
    return True


def read_ports(source: str, value: str) -> Tuple[int, int]:
    """The first and the last of ports for listeners, such as 40000-40999."""
    first, _, last = value.partition("-")
    if not re.fullmatch("[0-9]{1,5}-[0-9]{1,5}", value) or not 0 < int(first) <= int(last) <= 65535:
        raise ValueError(f"{source}: must be FIRST-LAST, in 1..65535")
    return int(first), int(last)


def environment_ports() -> Tuple[int, int]:
    """Those of LIBDC_PORTS; (0, 0) without: any."""
    value = os.environ.get("LIBDC_PORTS")
    try:
        return read_ports(f"LIBDC_PORTS={value}", value) if value else (0, 0)
    except ValueError as error:
        raise RuntimeError(f"init_comm: {error}") from None
