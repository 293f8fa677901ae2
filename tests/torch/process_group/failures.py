"""Mistakes and deaths under the backend libdc: an error that says what happened, on every rank, and no hang. Run by
ranks."""

from __future__ import annotations

import datetime
import os
import threading
import time
from typing import Any, Callable

import libdc.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = datetime.timedelta(seconds=1)


def fails(call: Callable[[], Any], *words: str, kind: type = RuntimeError) -> None:
    try:
        call()
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in: {error}"
        return
    raise AssertionError(f"no error, must have {words}")


def sizes_differ(group: Any, rank: int) -> None:
    words = "rank 1 called all_reduce (5 elements, float32, sum)", "rank 0 called"
    fails(lambda: dist.all_reduce(torch.ones(4 + rank), group=group), *words)
    fails(lambda: dist.all_reduce(torch.ones(4), group=group), *words)  # the group is broken, and says why


def reductions_differ(group: Any, rank: int) -> None:
    op = (dist.ReduceOp.MAX, dist.ReduceOp.MIN)[rank]
    fails(lambda: dist.all_reduce(torch.ones(4), op, group=group),
          "rank 1 called all_reduce (4 elements, float32, min) where",
          "rank 0 called all_reduce (4 elements, float32, max)")
    whole = torch.ones(4, dtype=(torch.int16, torch.bool)[rank])
    fails(lambda: dist.all_reduce(whole, group=group), "rank 1 called all_reduce (4 elements, bool, sum)")
    dist.barrier(group)  # the group goes on


def calls_differ(group: Any, rank: int) -> None:
    tensor = torch.ones(8)
    calls = (lambda: dist.all_reduce(tensor, group=group), lambda: dist.broadcast(tensor, group=group, group_src=0))
    fails(calls[rank], "broadcast", "all_reduce", "DC_E_MISMATCH")


def gather_and_maximum(group: Any, rank: int) -> None:
    """A maximum begins with a gather, which is what the other rank sees. So its own rank names the call."""
    tensor = torch.ones(8)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):  # the group is broken, and says why
        calls = (lambda: dist.all_reduce(tensor, op, group),
                 lambda: dist.all_gather_into_tensor(torch.empty(16), tensor, group))
        fails(calls[rank], "rank 1 called all_gather (16 elements, float32) where rank 0 called all_gather",
              "; rank 0 called all_reduce (8 elements, float32, max), which begins with that all_gather" if rank == 0
              else "DC_E_MISMATCH")


def exchange_and_reduction(group: Any, rank: int) -> None:
    out, tensor = torch.empty(8), torch.ones(8)
    calls = (lambda: dist.all_reduce(tensor, group=group), lambda: dist.all_to_all_single(out, tensor, group=group))
    fails(calls[rank], "all_to_all", "all_reduce", "DC_E_MISMATCH")


def exchanges_differ(group: Any, rank: int) -> None:
    """Calls that send as many bytes."""
    out = torch.empty(2)
    whole = list(torch.ones(3, dtype=torch.int16).split([1, 2][:: 1 - 2 * rank]))
    fails(lambda: dist.reduce_scatter(whole[rank].clone(), whole, group=group),
          "rank 1 called reduce_scatter (3 elements in parts [2, 1], int16, sum) where", "parts [1, 2]")
    fails(lambda: dist.reduce(out, op=dist.ReduceOp.MAX, group=group, group_dst=rank),
          "rank 1 called reduce (2 elements for rank 1, float32, max) where", "for rank 0")
    dist.barrier(group)  # the group goes on


def gather_and_scatter(group: Any, rank: int) -> None:
    """Calls that send nothing."""
    empty = torch.empty(0)
    calls = (lambda: dist.gather(empty, [empty] * 2, group=group, group_dst=0),
             lambda: dist.scatter(empty, [empty] * 2, group=group, group_src=1))
    fails(calls[rank], "rank 1 called scatter (float32, root 1) where rank 0 called gather (float32, root 0)",
          "DC_E_MISMATCH")


def roots_differ(group: Any, rank: int) -> None:
    out, parts = torch.empty(2), list(torch.ones(2, 2))
    fails(lambda: dist.scatter(out, parts, group=group, group_src=rank), "scatter (float32, root 1)",
          "scatter (float32, root 0)")


def splits_differ(group: Any, rank: int) -> None:
    fails(lambda: dist.all_to_all_single(torch.empty(2), torch.ones(2), [-1, 3], [1, 1], group=group),
          "the split sizes of output are [-1, 3], must be 2, not negative, that add up to 2", kind=ValueError)
    dist.barrier(group)  # the group goes on
    fails(lambda: dist.all_to_all_single(torch.empty(4), torch.ones(3), [2, 2], [1, 2], group=group),
          "all_to_all: rank 0 sends 1 element to rank 0, which expects 2", "DC_E_MISMATCH")


def types_differ(group: Any, rank: int) -> None:
    dtype = (torch.float32, torch.int32)[rank]
    fails(lambda: dist.all_to_all_single(torch.empty(4, dtype=dtype), torch.ones(4, dtype=dtype), group=group),
          "rank 1 called all_to_all (int32) where rank 0 called all_to_all (float32)")


def message_sizes_differ(group: Any, rank: int) -> None:
    def call() -> None:
        if rank == 0:
            dist.send(torch.ones(3), group=group, group_dst=1)
        else:
            dist.recv(torch.ones(4), group=group, group_src=0)

    fails(call, "(tag 0) from rank 0 to rank 1", "12 bytes", "16 bytes")
    dist.barrier(group)


def futures(group: Any, rank: int) -> None:
    """A future has the error for C++, too: DDP's step fails, and does not use half a gradient."""
    work = dist.all_reduce(torch.ones(4 + rank), group=group, async_op=True)
    fails(lambda: work.get_future().wait(), "rank 1 called")
    assert work.is_completed() and not work.is_success() and "rank 1 called" in str(work.exception())


def ddp(group: Any, rank: int) -> None:
    net = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
    loss = net(torch.ones(1, 3)).sum()
    dist.barrier()
    if rank == 1:
        group.abort()
    fails(loss.backward, "abort() of the process group")


def aborted(group: Any, rank: int) -> None:
    if rank == 1:
        threading.Timer(0.2, group.abort).start()
    fails(lambda: dist.barrier(group) if rank == 0 else time.sleep(0) or _wait_for_abort(group),
          "abort() of the process group")


def _wait_for_abort(group: Any) -> None:
    while True:
        time.sleep(0.01)
        group.comm.check()


def waits(group: Any, rank: int) -> None:
    """wait()'s own timeout does not end the work."""
    tensor = torch.ones(2)
    if rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        fails(lambda: work.wait(datetime.timedelta(milliseconds=50)), "not done within wait's 0.05 s",
              kind=dist.DistError)
        group.get_group_store().set("go", b"")
        assert work.wait()
    else:
        group.get_group_store().wait(["go"])
        dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2, 2]


def arguments(group: Any, rank: int) -> None:
    tensor = torch.ones(4)
    fails(lambda: dist.all_reduce(tensor, dist.ReduceOp.BAND, group), "BAND of torch.float32", kind=ValueError)
    fails(lambda: dist.all_reduce(tensor.long(), dist.ReduceOp.AVG, group), "AVG of torch.int64", kind=ValueError)
    fails(lambda: dist.all_reduce(torch.ones(2, device="meta"), group=group), "must be on the CPU", kind=ValueError)
    fails(lambda: dist.all_gather_into_tensor(torch.empty(7), tensor, group), "output has 7 elements, must have 8",
          kind=ValueError)
    fails(lambda: dist.all_gather([tensor], tensor, group), "1 output tensors, must be 2", kind=ValueError)
    fails(lambda: group.allgather([[tensor.clone(), tensor.double()]], [tensor]).wait(),
          "the part of rank 1 has 4 elements of torch.float64", kind=ValueError)
    fails(lambda: dist.reduce_scatter(tensor, [torch.ones(4), torch.ones(5)][:: 1 if rank else -1], group=group),
          f"the part of rank {rank} has 5 elements", "must have 4", kind=ValueError)
    fails(lambda: group.broadcast([tensor, tensor]), "2 tensors, must be one", kind=ValueError)
    for call, outs, ins in ((group.all_gather_single_coalesced, [torch.empty(8)], [tensor] * 2),
                            (group.allgather_coalesced, [[tensor], [tensor] * 2], [tensor] * 2),
                            (group.allgather, [[tensor] * 2], [tensor] * 2),
                            (group.reduce_scatter_single_coalesced, [torch.empty(2)] * 2, [tensor]),
                            (group.reduce_scatter, [tensor] * 2, [[tensor] * 2])):
        fails(lambda: call(outs, ins), "outputs for", "inputs, must be as many", kind=ValueError)
    fails(lambda: group.send([tensor], rank, 0), "must be another rank", kind=ValueError)
    fails(lambda: group.set_timeout(SECONDS), "timeout", kind=NotImplementedError)
    fails(lambda: group._get_backend(torch.device("cuda")), "only cpu")
    dist.barrier(group)


def monitored(group: Any, rank: int) -> None:
    group.monitored_barrier()
    if rank == 0:
        fails(lambda: group.monitored_barrier(SECONDS / 2), "rank 1 not there within 0.5 s", kind=dist.DistError)
    dist.barrier(group)
    for _ in range(2):  # a call that failed does not count
        group.monitored_barrier(60 * SECONDS)


def split(group: Any, rank: int) -> None:
    part = group.split_group([rank])
    assert part.size() == 1 and part.group_name.endswith(f":{rank}")
    pair = group.split_group([1, 0])
    total = torch.ones(3) * (rank + 1)
    pair.allreduce(total).wait()
    assert pair.rank() == rank and total.tolist() == [3.0] * 3
    assert libdc.torch.comm_from_process_group(pair).size == 2
    assert group.split_group([1]) is None if rank == 0 else group.split_group([1]) is not None


def unanswered(group: Any, rank: int) -> None:
    """The end of a group, within its 30 minutes, waits for no message unless both ranks have called for it."""
    peer, got = 1 - rank, [torch.zeros(2) for _ in range(20)]
    works = [dist.irecv(torch.ones(1), group=group, group_src=peer, tag=100 + rank) for _ in range(2)]
    works += [dist.isend(torch.ones(1), group=group, group_dst=peer, tag=102 + rank)]
    called = [(dist.isend(torch.ones(2), group=group, group_dst=0, tag=tag) if rank else
               dist.irecv(got[tag], group=group, group_src=1, tag=tag)) for tag in range(len(got))]
    dist.barrier(group)
    dist.destroy_process_group(group)
    for work in called:
        work.wait()
    assert all(each.tolist() == [1.0 - rank] * 2 for each in got)
    for work, (verb, text) in zip(works, [("recv", "sent")] * 2 + [("send", "received")]):
        fails(work.wait, f"{verb} (tag", f"the process group was destroyed before anything was {text}",
              kind=dist.DistError)


def aborted_message(group: Any, rank: int) -> None:
    """Without an answer, and one rank aborts."""
    work = dist.irecv(torch.ones(1), group=group, group_src=1 - rank)
    dist.barrier()
    if rank == 1:
        group.abort()
    fails(work.wait, f"recv (tag 0) from rank {1 - rank} to rank {rank}: ", "abort() of the process group")


def sent_again(group: Any, rank: int) -> None:
    """A message whose time is over is withdrawn, and does not count for the next one."""
    def until_met(call: Callable[[], Any]) -> None:
        try:
            call()
        except dist.DistError as error:
            assert "within 5 s" in str(error), error
            until_met(call)

    got = torch.zeros(2)
    if rank == 0:
        fails(lambda: dist.send(torch.ones(2), group=group, group_dst=1), "nothing was received within 5 s",
              kind=dist.DistError)
    dist.barrier()
    until_met(lambda: dist.send(torch.full((2,), 2.0), group=group, group_dst=1) if rank == 0 else
              dist.recv(got, group=group, group_src=0))
    assert rank == 0 or got.tolist() == [2.0, 2.0]


def unanswered_again(group: Any, rank: int) -> None:
    """As unanswered(), where messages came before. Each rank has sent one, and waits for a second of the other."""
    peer, got = 1 - rank, torch.zeros(1)
    for work in (dist.isend(torch.ones(1), group=group, group_dst=peer), dist.irecv(got, group=group, group_src=peer)):
        work.wait()
    late = dist.irecv(got, group=group, group_src=peer)
    dist.barrier(group)
    began = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - began < 30
    fails(late.wait, f"recv (tag 0) from rank {peer} to rank {rank}", "destroyed its communicator")


SHORT = {"late": SECONDS, "sent_again": 5 * SECONDS, "unanswered_again": 60 * SECONDS,
         "dies": 60 * SECONDS}  # timeouts of groups


def late(group: Any, rank: int) -> None:
    if rank == 0:
        fails(lambda: dist.barrier(group), "rank 1", "DC_E_TIMEOUT")
        fails(lambda: dist.recv(torch.ones(1), group=group, group_src=1), "rank 1 to rank 0")
    dist.barrier()


def dies(group: Any, rank: int) -> None:
    """The last case."""
    if rank == 1:
        os._exit(0)
    fails(lambda: dist.recv(torch.ones(1), group=group, group_src=1), "rank 1", "DC_E_PEER_DEAD")
    fails(lambda: dist.all_reduce(torch.ones(4), group=group), "rank 1", "DC_E_PEER_DEAD")


CASES = [sizes_differ, reductions_differ, calls_differ, gather_and_maximum, exchange_and_reduction, exchanges_differ,
         gather_and_scatter, roots_differ, splits_differ, types_differ, message_sizes_differ, futures, ddp, aborted,
         waits, arguments, monitored, split, unanswered, unanswered_again, aborted_message, sent_again, late,
         dies]  # fmt: skip


def main() -> None:
    dist.init_process_group("libdc")
    rank = dist.get_rank()
    for case in CASES:
        group = dist.new_group(timeout=SHORT.get(case.__name__))
        case(group, rank)
        print("rank", rank, case.__name__, flush=True)
    if rank == 0:
        os._exit(0)  # without its peer
