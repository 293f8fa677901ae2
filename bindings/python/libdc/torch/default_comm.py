"""The communicators over which models are sharded, and the process's default one."""

from __future__ import annotations

import threading
from typing import Any, Optional

import libdc
import torch

from .process_group import comm_from_process_group

_lock = threading.Lock()
_default: Optional[libdc.Comm] = None
_of_environment: Optional[libdc.Comm] = None  # the default one, if it came from the environment


def init(comm: Any = None) -> libdc.Comm:
    """Returns the process's default communicator for training: a libdc.Comm, which has rank, size, barrier(),
    all_reduce(tensor) and more. comm: a libdc.Comm or a torch.distributed ProcessGroup to use from now on. None: the
    one of an earlier call, else that of the environment from torchrun or `python -m libdc.run`, else a world of one
    rank."""
    global _default, _of_environment
    with _lock:
        if comm is not None:
            _default = _wrap(comm)
        elif _default is None:
            _default = _of_environment = libdc.init_comm()
        return _default


def is_of_environment(comm: libdc.Comm) -> bool:
    """Whether it is the communicator of all ranks in the environment, and not one that the program gave."""
    return comm is _of_environment


def resolve_comm(comm: Any) -> libdc.Comm:
    """The communicator for the argument of shard(comm=...)."""
    return init() if comm is None else _wrap(comm)


def _wrap(comm: Any) -> libdc.Comm:
    if isinstance(comm, libdc.Comm):
        return comm
    if torch.distributed.is_available() and isinstance(comm, torch.distributed.ProcessGroup):
        return comm_from_process_group(comm)
    raise TypeError(f"comm = {comm!r}, must be a libdc.Comm, a torch.distributed ProcessGroup or None; a DeviceMesh of "
                    "one dimension has one: mesh.get_group()")
