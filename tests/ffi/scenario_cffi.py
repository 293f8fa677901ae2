"""The scenario of scenario.c, with the Python package: scenario_cffi.py RANK NAME."""

from __future__ import annotations

import sys

import libdc
import numpy as np

RANKS, WEIGHTS, SHARD, GRAPH, ID = 2, 5, 3, 1, 7


def show(name: str, values: np.ndarray) -> None:
    print(name, *(f"{bits:08x}" for bits in values.view(np.uint32)))


def main(rank: int, name: str) -> None:
    print(f"libdc {libdc.__version__} {libdc.api_version()}")
    comm = libdc.Comm.processes(name, rank, RANKS)
    context = libdc.Context(log=lambda level, message: print(f"log mine {level} {message}"))
    context.init(comm, initial_reduce_bucket_size=64)
    weights = np.arange(rank * SHARD, (rank + 1) * SHARD, dtype=np.float32) * np.float32(0.5) - np.float32(1)
    gradient = np.empty(SHARD, np.float32)
    context.register_z3_param(ID, [WEIGHTS], weights, gradient)
    context.register_graph_z3(GRAPH, [ID])

    context.start_forward()
    full = context.wait_allgather(context.allgather_param(None, GRAPH, ID), GRAPH, ID).numpy()
    show("full", full)
    own = full * np.float32(rank + 1)
    context.release_param(None, GRAPH, ID, 2)
    context.end_forward()  # logs that one of two users still has it
    context.release_param(None, GRAPH, ID, 2)

    context.start_backward(True)
    context.reduce_grad(own, GRAPH, ID)
    context.end_backward(GRAPH)
    show("grad", gradient)
    weights -= np.float32(0.5) * gradient
    context.params_updated([ID])
    show("full", context.wait_allgather(context.allgather_param(None, GRAPH, ID), GRAPH, ID).numpy())
    context.release_param(None, GRAPH, ID)

    try:
        context.allgather_param(None, GRAPH, 99)
    except libdc.Error as error:
        print("error", error.status, error.name, error.text)
    stats = context.get_memory_stats()
    print("stats", stats.gathers, stats.reductions, stats.registered_params)
    context.close()
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
