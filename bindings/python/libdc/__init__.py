"""libdc: sharded training (ZeRO 0 to 3) as operators behind one stable C ABI."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._lib import HERE as _HERE
from ._lib import ffi as _ffi
from ._lib import lib as _lib
from ._lib import mode as ffi_mode
from ._lib import text as _text
from .comm import Comm
from .context import Context
from .device import Allocator, Device, Event, Stream
from .errors import Error, check
from .external import Collectives
from .launch import get_launch, init_comm
from .tensors import Buffer, Tensor
from .types import Config, DType, Launch, LogLevel, MemoryKind, MemoryStats, Op, OpInfo, ReduceOp, Status, TraceEvent

__version__ = _text(_lib.dc_version_string())


# Imported lazily: `python -m libdc.run` must be the first to import it. Type checkers do not see __getattr__(), which
# would let them accept any name.
if TYPE_CHECKING:
    from . import run as run
else:

    def __getattr__(name: str) -> Any:
        if name == "run":
            return importlib.import_module("libdc.run")
        raise AttributeError(f"module 'libdc' has no attribute {name!r}")


def api_version() -> int:
    """Version of the library that is loaded: major * 1000000 + minor * 1000 + patch."""
    return int(_lib.dc_api_version())


def has_feature(name: str) -> bool:
    """Whether the library has a feature: "cpu", "comm.threads", "comm.processes", "avx2" (as far as the environment's
    LIBDC_CPU allows it), …"""
    return bool(_lib.dc_has_feature(name.encode()))


def crc32c(data: Any, crc: int = 0) -> int:
    """The CRC-32C of a contiguous buffer's bytes. `crc` is the checksum of the bytes before them; 0: there are none."""
    view = _ffi.from_buffer(data)
    return int(_lib.dc_crc32c(crc, view, len(view)))


def mpi_version() -> str:
    """The MPI that Comm.mpi would use: its version, its ABI and its library. Raises an Error that says why there is
    none."""
    version = _ffi.new("const char **")
    check(_lib.dc_mpi_get_version(version))
    return str(_ffi.string(version[0]).decode(errors="replace"))


def nccl_version() -> int:
    """Version of the NCCL that Comm.nccl would use: major * 10000 + minor * 100 + patch. Raises an Error that says why
    there is none."""
    version = _ffi.new("int32_t *")
    check(_lib.dc_nccl_get_version(version))
    return int(version[0])


def library_dir() -> str:
    """The folder of libdc.so.0.1."""
    return _HERE


__all__ = [
    "Allocator", "Buffer", "Collectives", "Comm", "Config", "Context", "DType", "Device", "Error", "Event", "Launch",
    "LogLevel", "MemoryKind", "MemoryStats", "Op", "OpInfo", "ReduceOp", "Status", "Stream", "Tensor", "TraceEvent",
    "api_version", "check", "crc32c", "ffi_mode", "get_launch", "has_feature", "init_comm", "library_dir",
    "mpi_version", "nccl_version",
]  # fmt: skip
