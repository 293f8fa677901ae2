"""torch.distributed's process groups as libdc's transport."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading
import time
from typing import Any, Callable

import pytest

import torch
from libdc.torch import process_group

RANK = """
import os, sys, torch, torch.distributed as dist
rank, size, path, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=size)
from torch._subclasses.fake_tensor import FakeTensorMode
from libdc.torch import dc, ops, process_group
CONFIG = dict(symmetric_memory=False, double_buffer=True, free_activation_threshold=16, sync_before_reduce=False,
              sync_after_reduce=False, sync_before_allgather=False, sync_after_allgather=False)
D = torch.ops.dc
dc.init(dist.group.WORLD, CONFIG, initial_reduce_bucket_size=8)
token = torch.empty(0)
dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
full = [torch.arange(7.0).to(dtype) * (i + 1) for i, dtype in enumerate(dtypes)]
length = -(-7 // size)
padded = [torch.cat([f, f.new_zeros(length * size - 7)]) for f in full]
grads = [torch.zeros(length, dtype=dtype) for dtype in dtypes]
for i, dtype in enumerate(dtypes):
    dc.register_z3_param(i, [7], padded[i][rank * length:(rank + 1) * length].clone(), grads[i], i == 3)
with FakeTensorMode():  # as a compiler's passes do
    dc.register_graph_z3(9, [0, 1, 2, 3])

def step(token):
    D.prefetch_params_fused(9, [token, token], [1, 2])
    out = []
    for i in range(4):
        w = D.wait_allgather(D.allgather_param(token, 9, i), 9, i)
        out.append(w * 2)
        D.release_param(token, 9, i, 1)
        D.reduce_grad(w + 0 * out[-1], 9, i)
    D.end_backward(9)
    return out

call = step if kind == "eager" else torch.compile(step, backend="aot_eager", fullgraph=True)
for _ in range(3):
    dc.start_backward(True)
    for got, want, grad, pad in zip(call(token), full, grads, padded):
        assert torch.equal(got, want * 2), (got, want)
        assert torch.equal(grad, pad[rank * length:(rank + 1) * length]), (grad, pad)
if kind == "eager":
    whole = process_group.comm_from_process_group(dist.group.WORLD)
    part = whole.split(None if rank == 1 else 3, -rank)  # ranks 2 and 0, in this order
    if part is not None:
        assert (part.rank, part.size) == (1 if rank == 0 else 0, 2)
        copy = part.dup()
        for dtype in dtypes + [torch.int8, torch.int64]:
            values = torch.full((9,), rank + 1).to(dtype)
            copy.all_reduce(values)  # nine over two ranks: parts that differ
            assert values.tolist() == [4] * 9, values
    whole.barrier()
    class Failing(Exception):
        pass
    def fail(*args, **kwargs):
        raise Failing("the wire broke")
    process_group._GlooCollectives._gather = fail
    dc.params_updated()
    try:
        D.wait_allgather(D.allgather_param(token, 9, 0), 9, 0)
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "all_gather returned" in str(error), error
dc.cleanup()
dist.destroy_process_group()
print("done", rank)
"""


@pytest.mark.parametrize("kind, size", [("eager", 3), ("compiled", 2)])
def test_process_group(tmp_path: pathlib.Path, kind: str, size: int) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(size), str(tmp_path / "store"), kind],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(size)]
    try:
        for rank, process in enumerate(ranks):
            out = process.communicate(timeout=600)[0]
            assert process.returncode == 0 and f"done {rank}" in out, out
    finally:
        for process in ranks:
            process.kill()


def test_process_group_of_one(launch: Any) -> None:
    out = launch("""
import torch, torch.distributed as dist
from libdc.torch import dc
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dc.init(dist.group.WORLD, {key: 0 for key in dc._KEYS}, 8)
print(dc.is_profiling())
dc.cleanup()
dist.destroy_process_group()
""", n=1)
    assert out == "False\n"


def hold(tensor: torch.Tensor, wait: Callable[[], Any]) -> threading.Thread:
    """Keeps what a backend keeps of a tensor: its memory, by a tensor that has no other name in Python."""
    def sleep(view: torch.Tensor) -> None:
        wait()

    thread = threading.Thread(target=sleep, args=(tensor.detach().view(-1),))
    thread.start()
    return thread


def test_waits_until_a_backend_has_let_go() -> None:
    memory = memoryview(bytearray(64))
    start = time.monotonic()
    with process_group._until_released(torch.frombuffer(memory, dtype=torch.float32)) as (tensor,):
        holder = hold(tensor, lambda: time.sleep(0.2))
    assert time.monotonic() - start >= 0.2 and tensor._use_count() == 1
    holder.join()


def test_waits_not_for_ever(monkeypatch: Any) -> None:
    monkeypatch.setattr(process_group, "_RELEASE_SECONDS", 0.05)
    let_go = threading.Event()
    with process_group._until_released(torch.zeros(4)) as (tensor,):
        holder = hold(tensor, let_go.wait)
    assert holder.is_alive()
    let_go.set()
    holder.join()


def test_a_process_may_end_right_after_a_collective(launch: Any) -> None:
    # Gloo's thread lets go of the memory of a finished work late; without a wait for it one process in ten aborted.
    text = """
import threading, torch.distributed as dist, libdc
from libdc.torch.process_group import _Collectives
dist.init_process_group("gloo")
transport = _Collectives(dist.group.WORLD)
def gather():
    for _ in range(40):
        transport.all_gather(memoryview(bytearray(64)), memoryview(bytearray(128)), libdc.DType.FLOAT32)
thread = threading.Thread(target=gather)
thread.start()
thread.join()
print("gathered")
"""
    for _ in range(3):
        assert launch(text).count("gathered") == 2


def test_models_come_and_go(launch: Any) -> None:
    """Copies of a group that are made after others went; each rank lets go of them when it likes."""
    text = """
import gc, time, torch, torch.distributed as dist, libdc.torch as dct
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.new_group([1, 0])
gc.disable()
for group in (dist.group.WORLD, ranks):
    for k in range(5):
        model = dct.shard(torch.nn.Linear(3, 2), comm=group)
        model(torch.full((1, 3), float(rank))).sum().backward()
        whole = dct.full_state_dict(model)
        if k % 2 == rank:
            time.sleep(0.05)
        del model
print("gone")
dist.destroy_process_group()
"""
    assert launch(text).count("gone") == 2


def test_copies_have_the_groups_timeout(launch: Any) -> None:
    out = launch("""
import datetime, torch.distributed as dist
import libdc.torch
from libdc.torch import process_group
seconds = []
made = process_group._GlooCollectives.__init__
def init(self, *args):
    made(self, *args)
    seconds.append(self.gloo.options._timeout.total_seconds())
process_group._GlooCollectives.__init__ = init
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=77))
copy = process_group.comm_from_process_group(dist.group.WORLD).dup()
again = copy.dup()
print(seconds)
dist.destroy_process_group()
""", n=1)
    assert out == "[77.0, 77.0]\n"


def test_the_deadline_is_that_of_the_group(launch: Any) -> None:
    """Waits for NCCL, which stands on the group's collectives on a card, end by libdc's deadline alone."""
    out = launch("""
import datetime, torch.distributed as dist, libdc
from libdc.torch import process_group
external = libdc.Comm.external
def noted(*args, timeout):
    print(timeout)
    return external(*args, timeout=timeout)
libdc.Comm.external = noted
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=77))
process_group.comm_from_process_group(dist.group.WORLD).barrier()
dist.destroy_process_group()
""", n=1)
    assert 77 < float(out) < 300
