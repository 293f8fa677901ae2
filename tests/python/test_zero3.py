"""ZeRO-3 round trips over every transport, against plain arithmetic."""

from __future__ import annotations

import hashlib
import os
import threading

import libdc
import libdc.run
import numpy as np
import pytest
from conftest import on_ranks

SHAPES = {1: (5, 3), 2: (7,), 3: (1,), 4: (16, 16)}


def weights(id: int) -> np.ndarray:
    return np.random.default_rng(id).standard_normal(SHAPES[id]).astype(np.float32)


def gradient(id: int, rank: int) -> np.ndarray:
    return np.random.default_rng(1000 * rank + id).standard_normal(SHAPES[id]).astype(np.float32)


def shard(full: np.ndarray, rank: int, world: int) -> np.ndarray:
    length = -(-full.size // world)
    padded = np.zeros(length * world, full.dtype)
    padded[: full.size] = full.ravel()
    return padded[rank * length : (rank + 1) * length].copy()


def train_step(context: libdc.Context, rank: int, world: int) -> str:
    """Two steps of plain descent; checks gathers and gradients on the way; a digest of the weights."""
    shards = {id: shard(weights(id), rank, world) for id in SHAPES}
    grads = {id: np.full_like(part, np.nan) for id, part in shards.items()}
    for id, shape in SHAPES.items():
        context.register_z3_param(id, shape, shards[id], grads[id], persistent=id == 3)
    context.register_graph_z3(9, list(SHAPES))
    expected = {id: weights(id) for id in SHAPES}
    for _ in range(2):
        context.start_forward()
        context.prefetch_params_fused(9, list(SHAPES))
        for id in SHAPES:
            full = context.wait_allgather(context.allgather_param(None, 9, id), 9, id)
            np.testing.assert_array_equal(full.numpy(), expected[id])
            del full
            context.release_param(None, 9, id, 1)
        context.end_forward()
        context.start_backward(True)
        for id in SHAPES:
            context.reduce_grad(gradient(id, rank), 9, id)
        context.end_backward(9, True)
        for id in SHAPES:
            mean = sum(gradient(id, r).astype(np.float64) for r in range(world)) / world
            np.testing.assert_allclose(grads[id], shard(mean.astype(np.float32), rank, world), rtol=2e-6, atol=1e-6)
            shards[id] -= grads[id]
        context.params_updated()
        for id in SHAPES:
            context.allgather_param(None, 9, id)
            context.wait_allgather(None, 9, id)
            expected[id] = context.take_param(9, id).numpy().copy()
            np.testing.assert_array_equal(shard(expected[id], rank, world), shards[id])
    digest = hashlib.sha256(b"".join(expected[id].tobytes() for id in SHAPES))
    context.unregister_graph(9)
    return digest.hexdigest()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_over_threads(world):
    digests = on_ranks(world, lambda context, comm: train_step(context, comm.rank, comm.size))
    assert len(set(digests)) == 1


def test_grads_finite():
    def rank(comm):
        context = libdc.Context()
        context.init(comm, {"check_finite": True}, 8)
        grads = {id: np.zeros(4, np.float32) for id in (3, 8)}
        for id, grad in grads.items():
            context.register_param(id, (4,), None, grad if comm.rank == 0 else grad[:0], 0)
        context.register_graph_z2(9, list(grads))
        with pytest.raises(libdc.Error, match="no backward with update = 1 has ended") as error:
            context.grads_finite()
        assert error.value.status == libdc.Status.E_STATE
        answers = []
        for odd in (1, np.nan, np.inf):
            context.start_backward(True)
            for id in (8, 3):
                last = odd if comm.rank == 1 and id == 8 else 0
                context.reduce_grad(np.array([1, 2, 3, last], np.float16 if id == 8 else np.float32), 9, id)
            context.end_backward(9)
            answers.append(context.grads_finite())
        return answers

    assert libdc.run.threads(2, rank) == [[(True, None), (False, 8), (False, 8)]] * 2


PROCESS = """
import sys
sys.path[:0] = {path!r}
import libdc
from test_zero3 import train_step
comm = libdc.init_comm(timeout=600)
with libdc.Context() as context:
    context.init(comm, initial_reduce_bucket_size=4096)
    print("digest", train_step(context, comm.rank, comm.size))
"""


@pytest.mark.parametrize("world", [2, 3])
def test_over_processes_as_over_threads(world, launch):
    threads = on_ranks(world, lambda context, comm: train_step(context, comm.rank, comm.size))
    done = launch(PROCESS.format(path=[os.path.dirname(__file__)]), n=world)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["digest", threads[0]] * world


class Barrier(libdc.Collectives):
    """A transport of Python's own, over threads: every rank writes its part, then every rank reads all."""

    def __init__(self, world: int, rank: int, shared: dict, log: list) -> None:
        self.world, self.rank, self.shared, self.log = world, rank, shared, log
        self.copies = 0

    def _exchange(self, data) -> list:
        slots = self.shared.setdefault("slots", [None] * self.world)
        slots[self.rank] = bytes(data)
        self.shared["barrier"].wait(20)
        everyone = list(slots)
        self.shared["barrier"].wait(20)
        return everyone

    def all_gather(self, send, recv, dtype):
        recv[:] = b"".join(self._exchange(send))

    def reduce_scatter(self, send, recv, dtype):
        kind = np.dtype(dtype.name.lower())
        blocks = [np.frombuffer(data, kind).reshape(self.world, -1) for data in self._exchange(send)]
        recv[:] = sum(block[self.rank] for block in blocks).tobytes()

    def broadcast(self, data, root):
        data[:] = self._exchange(data)[root]

    def barrier(self):
        self._exchange(b"")

    def dup(self):
        self.copies += 1
        shared = self.shared.setdefault(f"copy {self.copies}", {"barrier": threading.Barrier(self.world)})
        return Barrier(self.world, self.rank, shared, self.log)

    def abort(self):
        self.shared["barrier"].abort()

    def close(self):
        self.log.append(self.rank)


def test_over_the_caller_s_own_transport():
    log, shared = [], {"barrier": threading.Barrier(2)}
    for key in range(1, 5):
        shared[f"copy {key}"] = {"barrier": threading.Barrier(2)}

    def rank(placeholder: libdc.Comm) -> str:
        comm = libdc.Comm.external(Barrier(2, placeholder.rank, shared, log), placeholder.rank, 2, timeout=60)
        with comm, libdc.Context() as context:
            context.init(comm, initial_reduce_bucket_size=4096)
            return train_step(context, comm.rank, comm.size)

    digests = libdc.run.threads(2, rank)
    assert digests[0] == digests[1]
    assert log.count(0) == log.count(1) >= 1, "every user pointer's close() is called once"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lower_stages_average(stage):
    def rank(context: libdc.Context, comm: libdc.Comm) -> None:
        full = weights(4)
        part = np.zeros(256 if stage == 0 else 128, np.float32)
        context.register_param(4, full.shape, full, part, 0 if stage == 0 else 128 * comm.rank)
        getattr(context, f"register_graph_z{stage}")(1, [4])
        context.start_backward(True)
        context.reduce_grad(gradient(4, comm.rank), 1, 4)
        context.end_backward(1)
        mean = ((gradient(4, 0) + gradient(4, 1)) / 2).ravel()
        np.testing.assert_array_equal(part, mean if stage == 0 else np.split(mean, 2)[comm.rank])

    on_ranks(2, rank)


def test_dry_run_stats_and_trace():
    def rank(context: libdc.Context, comm: libdc.Comm) -> None:
        context.register_z3_param(1, (6, 2), shard(np.ones((6, 2), np.float32), comm.rank, 2), None)
        context.register_graph_z3(1, [1])
        info = context.dry_run(libdc.Op.ALLGATHER_PARAM, 1, 1, "bfloat16")
        assert (info.shape, info.dtype, info.wire_bytes) == ((6, 2), libdc.DType.BFLOAT16, 12)
        assert context.get_memory_stats().gathers == 0
        context.trace_start(100)
        context.allgather_param(None, 1, 1, "bfloat16")
        context.wait_allgather(None, 1, 1)
        context.release_param(None, 1, 1, 1)
        stats = context.get_memory_stats()
        assert (stats.gathers, stats.gather_wire_bytes) == (1, 12)
        comm.barrier()
        events = context.trace_read()
        assert any(event.op is libdc.Op.ALLGATHER_PARAM and event.id == 1 for event in events), events
        assert all(event.end_ns >= event.begin_ns for event in events)
        context.reset_stats()
        assert context.get_memory_stats().gathers == 0

    on_ranks(2, rank)
