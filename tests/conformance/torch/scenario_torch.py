"""The scenario of tests/ffi/scenario.c by the operators torch.ops.dc: scenario_torch.py RANK NAME."""

from __future__ import annotations

import re
import sys

import libdc
import torch
from libdc.torch import ops

RANKS, WEIGHTS, SHARD, GRAPH, ID = 2, 5, 3, 1, 7


def show(name: str, values: torch.Tensor) -> None:
    print(name, *(f"{bits & 0xffffffff:08x}" for bits in values.view(torch.int32).tolist()))


def main(rank: int, name: str) -> None:
    print(f"libdc {libdc.__version__} {libdc.api_version()}")
    ops.load()
    dc, token = torch.ops.dc, torch.empty(0)
    comm = libdc.Comm.processes(name, rank, RANKS)
    context = libdc.Context(log=lambda level, message: print(f"log mine {level} {message}"))
    context.init(comm, initial_reduce_bucket_size=64)
    ops.set_context(context)
    weights = torch.arange(rank * SHARD, (rank + 1) * SHARD, dtype=torch.float32) * 0.5 - 1
    gradient = torch.empty(SHARD)
    context.register_z3_param(ID, [WEIGHTS], weights, gradient)
    context.register_graph_z3(GRAPH, [ID])

    context.start_forward()
    full = dc.wait_allgather(dc.allgather_param(token, GRAPH, ID), GRAPH, ID)
    show("full", full)
    own = full * (rank + 1)
    dc.release_param(token, GRAPH, ID, 2)
    context.end_forward()  # logs that one of two users still has it
    dc.release_param(token, GRAPH, ID, 2)

    context.start_backward(True)
    dc.reduce_grad(own, GRAPH, ID)
    dc.end_backward(GRAPH)
    show("grad", gradient)
    weights -= 0.5 * gradient
    context.params_updated([ID])
    show("full", dc.wait_allgather(dc.allgather_param(token, GRAPH, ID), GRAPH, ID))
    dc.release_param(token, GRAPH, ID, 1)

    try:
        dc.allgather_param(token, GRAPH, 99)
    except RuntimeError as error:  # PyTorch hands on the text alone
        text = re.search(r"dc_allgather_param: .*", str(error))
        print("error", int(libdc.Status.E_NOT_FOUND), "DC_E_NOT_FOUND", text[0] if text else error)
    stats = context.get_memory_stats()
    print("stats", stats.gathers, stats.reductions, stats.registered_params)
    ops.set_context(None)
    context.close()
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
