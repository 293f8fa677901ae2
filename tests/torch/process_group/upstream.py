"""Behaviours that PyTorch's tests of its own backend ask for: test_c10d_gloo.py and test_c10d_common.py in
test/distributed of github.com/pytorch/pytorch. Each function names the tests whose behaviour it has. Run by ranks."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
import torch.distributed as dist

OP = dist.ReduceOp
STRESS = 200


def empty_tensors(group: Any, rank: int, size: int) -> None:
    """test_empty_tensors."""
    work = group.broadcast([torch.empty(0)], dist.BroadcastOptions())
    assert work.get_future().wait()[0].numel() == 0


def allreduce_basics(group: Any, rank: int, size: int) -> None:
    """test_allreduce_basics, simple_reduce_tests, test_allreduce_overwrite: results by futures, in place."""
    cases = [(OP.SUM, rank + 1.0, size * (size + 1) / 2), (OP.PRODUCT, rank + 1.0, float(math.factorial(size))),
             (OP.MIN, rank + 1.0, 1.0), (OP.MAX, rank + 1.0, float(size)), (OP.AVG, rank + 1.0, (size + 1) / 2)]
    for i in range(4):
        ranks = range(size)
        cases.append((OP.BAND, rank | 1 << i, functools.reduce(operator.and_, [r | 1 << i for r in ranks])))
        cases.append((OP.BOR, rank * i, functools.reduce(operator.or_, [r * i for r in ranks])))
        cases.append((OP.BXOR, rank + i, functools.reduce(operator.xor, [r + i for r in ranks])))
    for op, value, want in cases:
        tensor = torch.tensor([value])
        options = dist.AllreduceOptions()
        options.reduceOp = op
        result = group.allreduce([tensor], options).get_future().wait()[0]
        assert result.tolist() == [want] and tensor.tolist() == [want], (op, result, want)
    tensor = torch.tensor([rank + 1.0])
    group.allreduce(tensor).wait()  # the interface takes one tensor, too
    assert tensor.item() == size * (size + 1) / 2


def allreduce_coalesced(group: Any, rank: int, size: int) -> None:
    """test_allreduce_coalesced_basics, test_allreduce_coalesced_async."""
    tensors = [torch.full((60 + i,), rank + 1.0 + i) for i in range(5)]
    dist.all_reduce_coalesced(tensors, group=group)
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, sum(r + 1.0 + i for r in range(size))))


def stress(group: Any, rank: int, size: int) -> None:
    """test_broadcast_stress, test_allreduce_stress, test_reduce_stress, test_gather_stress, test_scatter_stress: many
    at once, waited for later."""
    pending = []
    for i in range(STRESS):
        root, value = i % size, torch.tensor([i * size + rank])
        parts = [torch.tensor([i * size + rank + r]) for r in range(size)]
        call = i // size % 5
        if call == 0:
            pending.append((dist.broadcast(value, group=group, group_src=root, async_op=True), value, i * size + root))
        elif call == 1:
            total = sum(i * size + r for r in range(size))
            pending.append((dist.all_reduce(value, group=group, async_op=True), value, total))
        elif call == 2:
            want = sum(i * size + r for r in range(size)) if rank == root else i * size + rank
            pending.append((dist.reduce(value, group=group, group_dst=root, async_op=True), value, want))
        elif call == 3:
            work = dist.gather(value, parts if rank == root else None, group=group, group_dst=root, async_op=True)
            want = i * size + (size - 1 if rank == root else rank + size - 1)
            pending.append((work, parts[-1], want))
        else:
            work = dist.scatter(value, parts if rank == root else None, group=group, group_src=root, async_op=True)
            pending.append((work, value, i * size + root + rank))
    for place, (work, tensor, want) in enumerate(pending):
        work.wait()
        assert tensor.item() == want, (place, tensor, want)


def noncontiguous(group: Any, rank: int, size: int) -> None:
    """test_allgather_noncontiguous_input, test_gather_noncontiguous_input, test_scatter's output views."""
    mine = torch.arange(4.0 * 6).view(4, 6)[:, ::3] + rank
    parts = [torch.zeros(4, 4)[:, ::2] for _ in range(size)]
    dist.all_gather(parts, mine, group)
    for r, part in enumerate(parts):
        assert torch.equal(part, mine - rank + r)


def all_to_all_of_messages(group: Any, rank: int, size: int) -> None:
    """test_send_recv_all_to_all, test_sendrecv."""
    peers = [r for r in range(size) if r != rank]
    got = {r: torch.tensor([-1]) for r in peers}
    works = [dist.isend(torch.tensor([rank]), group=group, group_dst=r) for r in peers]
    works += [dist.irecv(got[r], group=group, group_src=r) for r in peers]
    for work in works:
        work.wait()
    assert all(got[r].item() == r for r in peers)


def gather_single(group: Any, rank: int, size: int) -> None:
    """test_gather_single, of dist.gather_single() in PyTorch 2.14: the parts in one tensor of the root."""
    root, options = size - 1, dist.GatherOptions()
    options.rootRank = root
    for dtype in (torch.float32, torch.int16, torch.complex64):
        mine = torch.full((2, 3), rank, dtype=dtype)
        out = torch.zeros((size, 2, 3), dtype=dtype) if rank == root else torch.zeros(0, dtype=dtype)
        group.gather_single(out, mine, options).wait()
        want = torch.arange(size).view(-1, 1, 1).expand(size, 2, 3)
        assert torch.equal(out, want.to(dtype) if rank == root else torch.zeros(0, dtype=dtype))
        if hasattr(dist, "gather_single"):
            again = torch.zeros_like(out)
            dist.gather_single(mine, again if rank == root else None, root, group)
            assert torch.equal(again, out)


def barrier_implies_wait(group: Any, rank: int, size: int) -> None:
    """test_barrier_implies_wait."""
    tensors = [torch.full((100, 100), float(i)) for i in range(4)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.barrier(group)
    assert all(work.is_completed() for work in works)
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, float(i * size)))


def sequence_numbers(group: Any, rank: int, size: int) -> None:
    """test_sequence_num_incremented."""
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    assert group._get_sequence_number_for_group() == before + 3


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("libdc")
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for case in (empty_tensors, allreduce_basics, allreduce_coalesced, stress, noncontiguous, all_to_all_of_messages,
                 gather_single, barrier_implies_wait, sequence_numbers):
        case(group, rank, size)
    dist.barrier()
    dist.destroy_process_group()
    print("rank", rank, "as PyTorch's tests have it")
