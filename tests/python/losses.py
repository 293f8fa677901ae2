"""A small training whose losses have the same bits on every transport, at every stage and with replicas. Prints the
table of them, a line for each transport and a column for each stage:

    .venv/bin/python tests/python/losses.py [TRANSPORT...]"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from typing import Callable, Dict, List, Optional, Tuple

import libdc
import libdc.run
import numpy as np

RANKS, STEPS, ROWS, SHAPE = 4, 6, 3, (5, 37)
NUMEL = SHAPE[0] * SHAPE[1]
COLUMNS: Dict[str, Tuple[int, int]] = {"0": (0, 1), "1": (1, 1), "2": (2, 1), "3": (3, 1), "2, 2 replicas": (2, 2),
                                       "3, 2 replicas": (3, 2)}  # stages and replicas


def loss_and_gradient(weights: np.ndarray, rank: int, step: int) -> Tuple[np.ndarray, np.ndarray]:
    data = np.random.default_rng([rank, step])
    x = data.standard_normal((ROWS, SHAPE[1]), np.float32)
    error = x @ weights.T - data.standard_normal((ROWS, SHAPE[0]), np.float32)
    return np.array([np.square(error).mean()], np.float32), np.ascontiguousarray(error.T @ x / np.float32(ROWS))


def train(comm: libdc.Comm, stage: int, replicas: int) -> str:
    """The hash of all steps' mean losses."""
    size = comm.size // replicas
    group = comm.split(comm.rank // size)
    counts = [max(0, min(-(-NUMEL // size), NUMEL - r * -(-NUMEL // size))) for r in range(size)]
    begin, count = sum(counts[:group.rank]), counts[group.rank]
    whole = np.random.default_rng(7).standard_normal(NUMEL, np.float32)
    own = whole[begin:begin + count].copy()
    grad, losses = np.zeros(count if stage else NUMEL, np.float32), hashlib.sha256()
    with group, libdc.Context() as context:
        context.init(comm, {"replicas": replicas}, initial_reduce_bucket_size=4096)
        if stage == 3:
            context.register_z3_param(1, SHAPE, own, grad)
        else:
            context.register_param(1, SHAPE, whole.reshape(SHAPE), grad, begin if stage else 0)
        getattr(context, f"register_graph_z{stage}")(1, [1])
        for step in range(STEPS):
            context.start_backward(True)
            weights = whole.reshape(SHAPE)
            if stage == 3:
                context.allgather_param(None, 1, 1)
                weights = context.take_param(1, 1).numpy()
            loss, gradient = loss_and_gradient(weights, comm.rank, step)
            context.reduce_grad(gradient, 1, 1)
            context.end_backward(1)
            own -= np.float32(0.1) * (grad if stage else grad[begin:begin + count])
            group.all_gather(own, whole, counts)
            context.params_updated()
            losses.update(comm.all_reduce(loss, libdc.ReduceOp.MEAN).tobytes())
    return losses.hexdigest()[:16]


def train_all(comm: libdc.Comm) -> List[str]:
    return [train(comm, *setting) for setting in COLUMNS.values()]


# ---- the ranks, as processes

def open_comm(transport: str) -> libdc.Comm:
    if transport in ("tcp", "two-level"):
        rank, host, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        node = f"machine {rank // 2}" if transport == "two-level" else ""
        return libdc.Comm.tcp(f"{host}:{port}", "losses", rank, RANKS, timeout=300, node=node)
    if transport == "gloo":
        import torch.distributed
        from libdc.torch import comm_from_process_group

        torch.distributed.init_process_group("gloo")
        return comm_from_process_group(torch.distributed.group.WORLD)
    return libdc.init_comm(timeout=300)


def be_rank(transport: str) -> None:
    with open_comm(transport) as comm:
        found = train_all(comm)
        if comm.rank == 0:
            print(transport, *found, flush=True)
        comm.barrier()


# ---- the table

def launched(transport: str, *launcher: str) -> Callable[[], Optional[List[str]]]:
    def run() -> Optional[List[str]]:
        """None: there is no such launcher."""
        if shutil.which(launcher[0]) is None:
            return None
        kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        kept.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1")
        arguments = ["-n", str(RANKS)] + ([sys.executable] if "mpirun" in launcher[0] else [])
        done = subprocess.run([*launcher, *arguments, __file__, "--rank", transport], text=True, capture_output=True,
                              env=kept, timeout=600)
        line = next((line for line in done.stdout.splitlines() if line.startswith(transport)), "")
        if done.returncode != 0 or not line:
            raise RuntimeError(f"{transport}: {done.stdout}{done.stderr}")
        return line.split()[1:]

    return run


RUN = (sys.executable, "-m", "libdc.run")
TRANSPORTS: Dict[str, Callable[[], Optional[List[str]]]] = {
    "threads": lambda: libdc.run.threads(RANKS, train_all, timeout=300)[0],
    "processes": launched("processes", *RUN),
    "tcp": launched("tcp", *RUN),
    "two-level": launched("two-level", *RUN),
    "mpich": launched("mpich", "mpirun.mpich"),
    "openmpi": launched("openmpi", "mpirun.openmpi", "--oversubscribe"),
    "gloo": launched("gloo", *RUN),
}


def main(transports: List[str]) -> int:
    """1 if bits differ."""
    print("losses of", RANKS, "ranks at stage")
    print(f"{'':<10}", *(f"{name:<16}" for name in COLUMNS))
    seen = set()
    for transport in transports or list(TRANSPORTS):
        found = TRANSPORTS[transport]()
        print(f"{transport:<10}", *(["not here"] if found is None else found), flush=True)
        seen |= set(found or [])
    print("all the same bits" if len(seen) == 1 else f"{len(seen)} different ones")
    return int(len(seen) != 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]))
