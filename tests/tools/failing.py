"""One rank of a group that fails as it is told: failing.py HOW GROUP RANK WORLD. LIBDC_DUMP_DIR has the dumps."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import List

import libdc
import numpy as np

GRAPH, STEPS, CULPRIT = 1, 5, 1
TIMEOUT = 10.0  # the busiest machine's living ranks come before that
KEPT: List[libdc.Context] = []  # to the end of the process


def step(context: libdc.Context, id: int) -> None:
    context.allgather_param(None, GRAPH, id)
    context.wait_allgather(None, GRAPH, id)
    context.release_param(None, GRAPH, id, 1)
    context.start_backward(True)
    context.reduce_grad(np.ones(12, np.float32), GRAPH, id)
    context.end_backward(GRAPH)


def fail(context: libdc.Context, comm: libdc.Comm, how: str) -> None:
    """The culprit's call where the others go on with step(context, 7)."""
    if how == "operation":
        context.start_backward(True)
        context.prefetch_params_fused(GRAPH, [7])
        context.wait_allgather(None, GRAPH, 7)
    elif how == "parameter":
        step(context, 8)
    elif how == "reduction":
        context.allgather_param(None, GRAPH, 7)
        context.wait_allgather(None, GRAPH, 7)
        context.start_backward(True)
        context.reduce_grad(np.ones(12, np.float32), GRAPH, 8)
        context.end_backward(GRAPH)
    elif how == "late":
        with contextlib.suppress(libdc.Error):
            while True:  # until the others have given up
                comm.check()
                time.sleep(0.01)
        step(context, 7)
    elif how in ("dead", "elsewhere", "at the end"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        step(context, 7)


def main() -> int:
    how, group, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    libdc.Comm.processes(group, rank, world, 100).barrier()  # an interpreter may take its time to start
    comm = libdc.Comm.processes(group + ".now", rank, world, TIMEOUT)
    context = libdc.Context()
    if how == "at the end":
        KEPT.append(context)
    try:
        context.init(comm, initial_reduce_bucket_size=1000 + (how == "init" and rank == CULPRIT))
        for id in (7, 8):
            part = np.full(-(-12 // world), rank, np.float32)
            context.register_z3_param(id, (4, 3), part, np.zeros_like(part), name="head" if id == 8 else None)
        context.register_graph_z3(GRAPH, [7, 8])
        for _ in range(STEPS):
            step(context, 7)
        if rank == CULPRIT:
            fail(context, comm, how)
        elif how in ("elsewhere", "at the end"):
            comm.barrier()  # the context learns of it when it is closed, or the process ends
        else:
            step(context, 7)
        if how == "well":
            context.trace_dump(os.environ["LIBDC_DUMP_DIR"])
    except libdc.Error as error:
        print(error, file=sys.stderr)
        if how == "elsewhere":
            context.close()
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
