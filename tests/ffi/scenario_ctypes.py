"""The scenario of scenario.c, with nothing but ctypes: scenario_ctypes.py RANK NAME. LIBDC_LIBRARY is its path."""

from __future__ import annotations

import os
import struct
import sys
from ctypes import CDLL, CFUNCTYPE, POINTER, Structure, addressof, byref, c_char_p, c_float, c_int32, c_int64, c_size_t
from ctypes import c_uint32, c_void_p, cast, sizeof
from typing import Any, Sequence

RANKS, WEIGHTS, SHARD, GRAPH, ID, NONE, FLOAT32 = 2, 5, 3, 1, 7, 0, 1
LOG = CFUNCTYPE(None, c_int32, c_char_p, c_char_p)


class Tensor(Structure):
    _fields_ = [("struct_size", c_size_t), ("data", c_void_p), ("shape", POINTER(c_int64)),
                ("strides", POINTER(c_int64)), ("ndim", c_int32), ("dtype", c_int32), ("buffer", c_void_p)]


class ContextOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("log", LOG), ("log_user", c_char_p)]


class MemoryStats(Structure):
    _fields_ = [("struct_size", c_size_t)] + [(name, c_int64) for name in (
        "gathered_bytes", "gathered_peak_bytes", "bucket_bytes", "offload_bytes", "reload_bytes", "arena_bytes",
        "allocations", "gathers", "gather_hits", "gather_wire_bytes", "reductions", "reduce_wire_bytes", "flushes",
        "copied_d2h_bytes", "copied_h2d_bytes", "registered_params", "registered_graphs")]


dc = CDLL(os.environ["LIBDC_LIBRARY"])
dc.dc_version_string.restype = dc.dc_last_error.restype = dc.dc_status_name.restype = c_char_p
dc.dc_api_version.restype = c_uint32
dc.dc_context_destroy.argtypes = dc.dc_device_destroy.argtypes = dc.dc_comm_destroy.argtypes = [c_void_p]
for operator in (dc.dc_wait_allgather, dc.dc_reduce_grad):
    operator.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
dc.dc_allgather_param.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p]
dc.dc_release_param.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64]
dc.dc_end_backward.argtypes = [c_void_p, c_int64, c_int32]
dc.dc_init.argtypes = [c_void_p, c_void_p, c_void_p, c_int64]
dc.dc_register_z3_param.argtypes = [c_void_p, c_int64, c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_int32]
dc.dc_register_graph_z3.argtypes = [c_void_p, c_int64, c_void_p, c_int64]
dc.dc_context_params_updated.argtypes = [c_void_p, c_void_p, c_int64]


def check(status: int) -> None:
    if status != 0:
        raise SystemExit(f"{dc.dc_status_name(status).decode()}: {dc.dc_last_error().decode()}")


def show(name: str, values: Sequence[float]) -> None:
    print(name, *(struct.pack(">f", value).hex() for value in values))


def tensor(data: Any = None) -> Tensor:
    """A flat one of an array's memory, which must stay; without it, an output."""
    made = Tensor()
    dc.dc_tensor_init(byref(made), c_size_t(sizeof(made)))
    if data is not None:
        made.data, made.ndim, made.dtype = addressof(data), 1, FLOAT32
        made.shape = (c_int64 * 1)(len(data))
    return made


@LOG
def log(level: int, message: bytes, user: bytes) -> None:
    print("log", user.decode(), level, message.decode())


def step(context: c_void_p, rank: int) -> None:
    weights = (c_float * SHARD)(*((rank * SHARD + i) * 0.5 - 1 for i in range(SHARD)))
    gradient, ids, full = (c_float * SHARD)(), (c_int64 * 1)(ID), tensor()
    whole = (c_int64 * 1)(WEIGHTS)
    check(dc.dc_register_z3_param(context, ID, whole, 1, byref(tensor(weights)), byref(tensor(gradient)), 0, NONE))
    check(dc.dc_register_graph_z3(context, GRAPH, ids, 1))

    check(dc.dc_start_forward(context))
    check(dc.dc_allgather_param(context, None, GRAPH, ID, NONE, byref(full)))
    check(dc.dc_wait_allgather(context, None, GRAPH, ID))
    values = cast(full.data, POINTER(c_float))[:WEIGHTS]
    show("full", values)
    own = (c_float * WEIGHTS)(*(value * (rank + 1) for value in values))
    check(dc.dc_release_param(context, None, GRAPH, ID, 2))
    check(dc.dc_end_forward(context))  # logs that one of two users still has it
    check(dc.dc_release_param(context, None, GRAPH, ID, 2))

    check(dc.dc_start_backward(context, 1))
    check(dc.dc_reduce_grad(context, byref(tensor(own)), GRAPH, ID))
    check(dc.dc_end_backward(context, GRAPH, 0))
    show("grad", gradient[:])
    for i in range(SHARD):
        weights[i] -= 0.5 * gradient[i]
    check(dc.dc_context_params_updated(context, ids, 1))
    check(dc.dc_allgather_param(context, None, GRAPH, ID, NONE, byref(full)))
    check(dc.dc_wait_allgather(context, None, GRAPH, ID))
    show("full", cast(full.data, POINTER(c_float))[:WEIGHTS])
    check(dc.dc_release_param(context, None, GRAPH, ID, 1))

    status = dc.dc_allgather_param(context, None, GRAPH, 99, NONE, byref(full))
    print("error", status, dc.dc_status_name(status).decode(), dc.dc_last_error().decode())
    stats = MemoryStats(struct_size=sizeof(MemoryStats))
    check(dc.dc_context_get_memory_stats(context, byref(stats)))
    print("stats", stats.gathers, stats.reductions, stats.registered_params)


def main(rank: int, name: str) -> None:
    print("libdc", dc.dc_version_string().decode(), dc.dc_api_version())
    comm, device, context = c_void_p(), c_void_p(), c_void_p()
    check(dc.dc_comm_create_processes(name.encode(), rank, RANKS, None, byref(comm)))
    check(dc.dc_device_open(b"cpu", None, byref(device)))
    options = ContextOptions(sizeof(ContextOptions), log, b"mine")
    check(dc.dc_context_create(device, byref(options), byref(context)))
    check(dc.dc_init(context, comm, None, 64))
    step(context, rank)
    dc.dc_context_destroy(context)
    dc.dc_device_destroy(device)
    dc.dc_comm_destroy(comm)
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
