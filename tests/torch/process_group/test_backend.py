"""The torch.distributed backend libdc: its collectives beside Gloo's, PyTorch's training over it, and its errors."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, List

import pytest

import libdc.torch
import torch
import torch.distributed as dist
from libdc.torch.distributed import LibdcProcessGroup, rendezvous
from libdc.torch.distributed.pairs import _Channel
from libdc.torch.distributed.tensors import flat_alias, flat_output, flattened
from libdc.torch.distributed.work import Lane, Work

RUN = """import warnings
warnings.simplefilter("ignore")
import libdc.torch
from process_group import {0}
{0}.main()
"""
# Ranks 0 and 1, 2 and 3 believe that they are on a machine each.
SPREAD = """import os
from libdc.torch.distributed import rendezvous
rendezvous._machine = lambda: f"machine{int(os.environ['RANK']) // 2}"
"""


@pytest.mark.parametrize("head, ranks", [("", 4), (SPREAD, 3)], ids=["memory", "tcp"])
def test_collectives_have_the_values_of_gloo(launch: Callable[..., str], head: str, ranks: int) -> None:
    out = launch(head + RUN.format("against_gloo"), ranks, MASTER_ADDR="127.0.0.1")
    assert out.count("has the values of Gloo") == ranks


def test_training_has_the_losses_of_gloo(launch: Callable[..., str]) -> None:
    out = launch(RUN.format("training"), 4)
    assert out.count("as over Gloo") == 4 * 13, out


def test_behaviours_of_pytorchs_own_tests(launch: Callable[..., str]) -> None:
    assert launch(RUN.format("upstream"), 3).count("as PyTorch's tests have it") == 3


@pytest.mark.parametrize("head, ranks", [("", 2), (SPREAD, 3)], ids=["memory", "tcp"])
def test_calls_that_are_easy_to_get_wrong(launch: Callable[..., str], head: str, ranks: int) -> None:
    out = launch(head + RUN.format("adversarial"), ranks, MASTER_ADDR="127.0.0.1")
    assert out.count("right") == 20 * ranks, out


def test_what_pytorch_has_around_calls(launch: Callable[..., str]) -> None:
    out = launch(RUN.format("surroundings"))
    assert out.count("right") == 6 * 2, out


def test_tensors_of_a_card_go_to_nccl(launch: Callable[..., str]) -> None:
    out = launch(RUN.format("card"))
    assert out.count("NCCL's place was taken") == 2, out


def test_failures_are_errors_on_every_rank(launch: Callable[..., str]) -> None:
    out = launch(RUN.format("failures"))
    assert "rank 0 dies" in out and "rank 1 late" in out


@pytest.mark.parametrize("method", ["env", "file"])
def test_launchers_and_stores(launch: Callable[..., str], tmp_path: Path, method: str) -> None:
    text = f"""
import os, libdc.torch, torch, torch.distributed as dist
where = dict(env={{}}, file=dict(init_method="file://{tmp_path}/store", rank=int(os.environ["RANK"]), world_size=3))
dist.init_process_group("libdc", **where["{method}"])
assert dist.get_backend() == "libdc" and dist.is_initialized()
groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 2])]
tensor = torch.ones(3)
dist.all_reduce(tensor)
for ranks, group in zip(([0, 2], [1, 2]), groups):
    if dist.get_rank() in ranks:
        dist.all_reduce(tensor, group=group, async_op=True).wait()
os.write(1, f"sum {{tensor.tolist()}}\\n".encode())
dist.barrier()
if dist.get_rank() != 1:  # a process may end without it
    dist.destroy_process_group()
"""
    out = launch(text, 3, launcher=["torch.distributed.run", "--nproc-per-node", "3", "--master-port", "0",
                                    "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"])
    assert sorted(line for line in out.splitlines() if line.startswith("sum")) == [
        "sum [6.0, 6.0, 6.0]", "sum [9.0, 9.0, 9.0]", "sum [9.0, 9.0, 9.0]"], out


@pytest.fixture
def alone() -> LibdcProcessGroup:
    dist.init_process_group("libdc", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_shard_takes_the_group(alone: LibdcProcessGroup) -> None:
    net = torch.nn.Linear(3, 3)
    libdc.torch.shard(net, 3, comm=alone)
    net(torch.ones(1, 3)).sum().backward()
    assert libdc.torch.comm_from_process_group(alone).shares_memory


def test_one_rank(alone: LibdcProcessGroup) -> None:
    tensor = torch.arange(3.0)
    dist.all_reduce(tensor)
    out, parts = torch.empty(3), [torch.empty(3)]
    dist.all_to_all_single(out, tensor)
    dist.all_gather(parts, tensor)
    assert out.tolist() == parts[0].tolist() == [0, 1, 2] and alone.name() == "libdc"
    for op in (dist.ReduceOp.AVG, dist._make_nccl_premul_sum(torch.tensor([0.5]))):
        with pytest.raises(ValueError, match="all_reduce: .* of torch.float8_e4m3fn: must be of float16, bfloat16"):
            dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn), op)
    for dtype in (torch.float8_e4m3fn, torch.uint32):
        with pytest.raises(ValueError, match=f"all_reduce: MAX of {dtype}: PyTorch has none on CPUs, must be"):
            dist.all_reduce(torch.ones(2).to(dtype), dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="broadcast: a tensor is quantized .torch.quint8., whose scale would not go"):
        dist.broadcast(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), 0)
    alone.shutdown()
    with pytest.raises(dist.DistError, match="closed"):
        dist.all_reduce(tensor)


def test_sparse_tensors_of_another_device(alone: LibdcProcessGroup) -> None:
    place = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="all_reduce: a tensor is on meta, must be on the CPU"):
        dist.all_reduce(torch.sparse_coo_tensor(place, torch.zeros(2, device="meta"), (4,)))


def test_a_rank_that_never_comes() -> None:
    with pytest.raises(dist.DistStoreError, match="rank 0 waited 0.2 s for rank 1 of 2"):
        LibdcProcessGroup(dist.HashStore(), 0, 2, timedelta(seconds=0.2))


def test_a_rank_that_never_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    machines, store = itertools.count(), dist.HashStore()
    monkeypatch.setattr(rendezvous, "_machine", lambda: f"machine{next(machines)}")
    store.set_timeout(timedelta(seconds=20))  # longer than the group's
    with futures.ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda r: rendezvous.Rendezvous(store, r, 2, timedelta(seconds=3)), range(2)))
    with pytest.raises(dist.DistStoreError, match="rank 1 waited 3 s for rank 0 of 2 to tell in the store where"):
        ranks[1].pair("message.0", 0, 1)


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_groups_after_one_another_in_one_store(tmp_path: Path, kind: str) -> None:
    shared = dist.HashStore()

    def rank(r: int) -> None:
        for k in range(3):
            store = shared if kind == "hash" else dist.FileStore(f"{tmp_path}/store", 2)
            group = LibdcProcessGroup(store, r, 2, timedelta(seconds=60))
            if k % 2 == r:
                time.sleep(0.1)  # the other one may be ahead
            part = group.split_group([0, 1])
            for each in (group, part):
                each.monitored_barrier()
                each.allreduce(tensor := torch.ones(2)).wait()
                assert tensor.tolist() == [2, 2]
            part.shutdown()
            group.shutdown()

    with futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))  # raises what a rank raised


def test_blocks() -> None:
    whole = torch.arange(10.0)
    parts = list(whole.split([3, 3, 4]))
    block = flat_alias(parts)
    assert block is not None and block.data_ptr() == whole.data_ptr() and block.numel() == 10
    assert flat_alias(parts[::-1]) is None and flattened(parts[::-1]).tolist() == [6, 7, 8, 9, 3, 4, 5, 0, 1, 2]
    assert flat_alias([whole.view(2, 5).t(), whole]) is None
    with flat_output(parts[::-1]) as block:
        block.copy_(torch.arange(10.0))
    assert whole.tolist() == [7, 8, 9, 4, 5, 6, 0, 1, 2, 3]


def test_a_waiter_does_what_the_thread_has_not_begun() -> None:
    lane, done = Lane(), []
    lane._state.servers = 1  # which never begins
    works = [lane.submit(Work(lambda i=i: done.append((i, threading.get_ident())), None), False) for i in range(3)]
    assert not done and works[1].wait() and done == [(i, threading.get_ident()) for i in range(2)]
    with pytest.raises(dist.DistError, match="not done within wait's 0.01 s"):  # with a timeout it only waits
        works[2].wait(timedelta(seconds=0.01))
    assert works[2].wait() and len(done) == 3


def test_a_process_with_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without a thread is not made; a future's callbacks run although no other thread can serve."""
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lane, done, go = Lane(), [], threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            lane.submit(Work(lambda: done.append("refused"), None), False)
    lane.submit(Work(lambda: done.append("made"), None), False).wait()
    assert done == ["made"]
    first = lane.submit(Work(go.wait, None), False)
    future = first.get_future()
    second = lane.submit(Work(lambda: done.append("behind"), None), False)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        go.set()
        future.wait()
        second.wait()
    assert done == ["made", "behind"]
    lane.close()


def test_a_lane_that_is_closed_while_a_caller_works() -> None:
    lane, begun, go = Lane(), threading.Event(), threading.Event()
    lane.submit(Work(lambda: None, None), False).wait()  # starts the thread
    caller = threading.Thread(target=lambda: lane.submit(Work(lambda: (begun.set(), go.wait()), None), True))
    caller.start()
    begun.wait()
    lane._state.close()
    go.set()
    lane.close()  # waits for the thread
    caller.join()


def test_a_lane_without_a_thread_ends_behind_a_caller_at_work() -> None:
    lane, begun, go = Lane(), threading.Event(), threading.Event()
    caller = threading.Thread(target=lambda: lane.submit(Work(lambda: (begun.set(), go.wait()), None), True))
    caller.start()
    begun.wait()
    assert not lane.end()
    go.set()
    caller.join()
    assert lane.end() and not lane._state.threads


@pytest.mark.parametrize("blocking", [True, False])
def test_a_lane_ends_in_its_own_work(blocking: bool) -> None:
    """As where a signal's handler destroys the group in a receive: it waited for the receive below it."""
    lane, ended = Lane(), []
    lane.submit(Work(lambda: ended.append(lane.end()), None), blocking).wait()
    assert ended == [True]
    lane.close()


def test_a_first_message_is_in_the_store_when_its_call_returns() -> None:
    class Store:  # as a TCPStore, which answers check() alone
        def __init__(self) -> None:
            self.sent, self.has = {}, {}

        def set(self, key: str, value: str) -> None:
            self.sent[key] = value

        def check(self, keys: List[str]) -> bool:
            self.has.update(self.sent)
            return all(key in self.has for key in keys)

    store = Store()
    _Channel(SimpleNamespace(store=store, rank=1), lambda: None, "message.0", 1, 0, "").announce()
    assert store.has == {"first/message.0/1/0/1": "waits"}


def test_messages_that_are_waited_for_take_no_thread() -> None:
    """dist.send waits at once, so its caller does the work. isend may be waited for later."""
    store = dist.HashStore()

    def rank(r: int) -> List[int]:
        group, found = LibdcProcessGroup(store, r, 2, timedelta(seconds=60)), []
        for tag, call in enumerate((dist.send, lambda *a, **k: dist.isend(*a, **k).wait())):
            tensor = torch.full((3,), 1.0 - r)
            if r == 0:
                call(tensor, group=group, group_dst=1, tag=tag)
            else:
                dist.irecv(tensor, group=group, group_src=0, tag=tag).wait()
            assert tensor.tolist() == [1, 1, 1]
            found.append(len(group._pairs._channels[f"message.{tag}", 0, 1].lane._state.threads))
        group.shutdown()
        return found

    with futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [[0, 1], [1, 1]]


def test_the_store_does_not_grow() -> None:
    shared = dist.HashStore()

    def rank(r: int) -> List[int]:
        group, sizes = LibdcProcessGroup(shared, r, 3, timedelta(seconds=60)), []
        for _ in range(4):
            for _ in range(50):
                if r == 0:
                    group.send([torch.ones(1)], 1).wait()
                elif r == 1:
                    group.recv_anysource([torch.zeros(1)]).wait()
            group.monitored_barrier()
            group.barrier().wait()
            key = "sent/1/0"
            sizes.append(shared.num_keys() + (len(group._store.get(key)) if group._store.check([key]) else 0))
            group.barrier().wait()
        group.shutdown()
        return sizes[1:]  # the first rounds make the keys

    with futures.ThreadPoolExecutor(3) as pool:
        assert all(len(set(sizes)) == 1 for sizes in pool.map(rank, range(3)))


def test_an_interrupt_in_other_work_reaches_the_waiter() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt  # as a signal's handler does, when the library's call returns to Python

    lane = Lane()
    lane._state.servers = 1  # which never begins
    first, second = (lane.submit(Work(run, None), False) for run in (interrupted, lambda: None))
    with pytest.raises(KeyboardInterrupt):
        second.wait()
