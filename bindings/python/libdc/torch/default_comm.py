"""The communicator of the ranks that a model is sharded over, and the default one of the process."""

from __future__ import annotations

import threading
from typing import Any, Optional

import libdc
import torch

from .process_group import comm_from_process_group

_lock = threading.Lock()
_default: Optional[libdc.Comm] = None
_of_environment: Optional[libdc.Comm] = None  # the default one, where no other was given


def init(comm: Any = None) -> libdc.Comm:
    """Returns the communicator that this process trains with: a libdc.Comm, which has rank, size, barrier(),
    all_reduce(tensor) and more. comm: a libdc.Comm or a torch.distributed ProcessGroup to train with from now on. None:
    that of an earlier call, else the one of the environment that torchrun and `python -m libdc.run` set, else one rank.
    """
    global _default, _of_environment
    with _lock:
        if comm is not None:
            _default = _wrap(comm)
        elif _default is None:
            _default = _of_environment = libdc.init_comm()
        return _default


def is_of_environment(comm: libdc.Comm) -> bool:
    """Whether it has all ranks that libdc found in the environment, and no part that the program chose."""
    return comm is _of_environment


def resolve_comm(comm: Any) -> libdc.Comm:
    """The communicator that shard(comm=...) stands for."""
    return init() if comm is None else _wrap(comm)


def _wrap(comm: Any) -> libdc.Comm:
    if isinstance(comm, libdc.Comm):
        return comm
    if torch.distributed.is_available() and isinstance(comm, torch.distributed.ProcessGroup):
        return comm_from_process_group(comm)
    raise TypeError(f"comm = {comm!r}, must be a libdc.Comm, a torch.distributed ProcessGroup or None; a DeviceMesh of "
                    "one dimension has one: mesh.get_group()")
