"""The library's enumerations and structs as Python types."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Optional, Tuple

from ._lib import lib


class Status(enum.IntEnum):
    """The result of a call; see Error."""

    OK = 0
    E_INVALID = -100
    E_NOT_FOUND = -101
    E_EXISTS = -102
    E_STATE = -103
    E_STAGE = -104
    E_DTYPE = -105
    E_SHAPE = -106
    E_BUSY = -107
    E_NO_MEMORY = -108
    E_NO_DEVICE = -109
    E_UNSUPPORTED = -110
    E_BUFFER_TOO_SMALL = -111
    E_NOT_FINITE = -112
    E_NOT_SYMMETRIC = -113
    E_NOT_POSITIVE = -114
    E_NOT_CONVERGED = -115
    E_MISMATCH = -200
    E_TIMEOUT = -201
    E_PEER_DEAD = -202
    E_ABORTED = -203
    E_CALLBACK = -204
    E_SYSTEM = -205
    E_CORRUPT = -206
    E_DEVICE = -207
    E_INTERNAL = -900


class DType(enum.IntEnum):
    """Element types."""

    NONE = 0
    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    INT8 = 5
    INT32 = 6
    INT64 = 7
    UINT8 = 8
    INT16 = 9
    BOOL = 10

    @property
    def itemsize(self) -> int:
        return int(lib.dc_dtype_size(self))

    @classmethod
    def allowed(cls) -> str:
        """The names of all types, for an error message."""
        return ", ".join(item.name.lower() for item in cls if item)

    @classmethod
    def of(cls, value: Any) -> "DType":
        """Converts a DType, None, or anything that has a type's name: "bfloat16", numpy.float32, torch.float16."""
        if value is None:
            return cls.NONE
        if isinstance(value, int) and not isinstance(value, bool):
            if value in cls._value2member_map_:
                return cls(value)
            value = str(value)
        if not getattr(value, "isnative", True):  # NumPy gives such a type the native type's name
            raise TypeError(f"dtype = {value!r}, must have this machine's byte order")
        name = value if isinstance(value, str) else getattr(value, "name", None) or getattr(value, "__name__", None)
        name = str(name or value).rsplit(".", 1)[-1].upper()
        try:
            return cls[name]
        except KeyError:
            raise TypeError(f"dtype = {value!r}, must be one of {cls.allowed()}") from None


class ReduceOp(enum.IntEnum):
    SUM = 1
    MEAN = 2


class MemoryKind(enum.IntEnum):
    DEVICE = 1
    SHARED = 2
    HOST = 3


class LogLevel(enum.IntEnum):
    ERROR = 1
    WARNING = 2
    INFO = 3


class Op(enum.IntEnum):
    """The operators, for dry runs and traces."""

    NONE = 0
    ALLGATHER_PARAM = 1
    PREFETCH_PARAMS_FUSED = 2
    WAIT_ALLGATHER = 3
    RELEASE_PARAM = 4
    REDUCE_GRAD = 5
    FREE_TENSORS = 6
    OFFLOAD_TENSOR = 7
    RELOAD_TENSOR = 8
    WAIT_OFFLOAD = 9
    WAIT_RELOAD = 10
    OFFLOAD_PARAMETER = 11
    RELOAD_PARAMETER = 12
    END_BACKWARD = 13
    TAKE_PARAM = 14
    SET_PERSISTENT = 15
    REGISTER_GRAPH = 16
    INIT = 17
    GRADS_FINITE = 18
    COMM_ALL_GATHER = 32
    COMM_REDUCE_SCATTER = 33
    COMM_ALL_REDUCE = 34
    COMM_BROADCAST = 35
    COMM_BARRIER = 36
    COMM_SPLIT = 37
    COMM_ALL_TO_ALL = 38
    COMM_GATHER = 39
    COMM_SCATTER = 40


class Config(NamedTuple):
    """The `compile` keys of dc_config; 0 selects each key's default."""

    symmetric_memory: int = 0
    double_buffer: int = 0
    free_activation_threshold: int = 0
    sync_before_reduce: int = 0
    sync_after_reduce: int = 0
    sync_before_allgather: int = 0
    sync_after_allgather: int = 0
    check_finite: int = 0
    replicas: int = 0


class MemoryStats(NamedTuple):
    """Bytes that a context holds and has moved on this rank; see dc_memory_stats."""

    gathered_bytes: int
    gathered_peak_bytes: int
    bucket_bytes: int
    offload_bytes: int
    reload_bytes: int
    arena_bytes: int
    allocations: int
    gathers: int
    gather_hits: int
    gather_wire_bytes: int
    reductions: int
    reduce_wire_bytes: int
    flushes: int
    copied_d2h_bytes: int
    copied_h2d_bytes: int
    registered_params: int
    registered_graphs: int


class Launch(NamedTuple):
    """A process's place among the ranks, as its launcher gives it; see dc_launch. None: the launcher does not say."""

    launcher: str
    address: Optional[str]
    group: Optional[str]
    rank: int
    world_size: int
    local_rank: Optional[int]
    local_size: Optional[int]
    node: Optional[int]
    uses_mpi: bool


class OpInfo(NamedTuple):
    """The result of a call, and the memory that it would take. shape is None if the operator returns no tensor of its
    own."""

    shape: Optional[Tuple[int, ...]]
    dtype: DType
    host: bool
    device_bytes: int
    wire_bytes: int


class TraceEvent(NamedTuple):
    """One piece of work that ran. Times are in nanoseconds. lane: 0 the caller, 1 gather, 2 reduce, 3 offload, 4
    reload."""

    begin_ns: int
    end_ns: int
    graph_id: int
    id: int
    bytes: int
    op: Op
    lane: int
