"""Calls under what PyTorch has around them: works as a graph's inputs, tracing, tensors that wrap others, autocast and
torch.compile. Run by ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

LARGE = 1_000_000
registered = torch._C._distributed_c10d._get_work_registry_size


def in_flight(group: Any, rank: int, size: int) -> None:
    """wait_tensor() waits for a work that the caller has dropped, and for each work of several in one memory."""
    peer, wait_tensor = 1 - rank, torch.ops._c10d_functional.wait_tensor
    with funcol.allow_inflight_collective_as_graph_input_ctx():
        total, parts = torch.full((LARGE,), rank + 1.0), [torch.zeros(2) for _ in range(size)]
        time.sleep(0.2 * rank)
        dist.all_reduce(total, group=group, async_op=True)
        dist.all_gather(parts, torch.full((2,), float(rank)), group=group, async_op=True)
        assert wait_tensor(total)[0].item() == 3 and wait_tensor(parts[1]).tolist() == [1, 1]
        wait_tensor(parts[0])
        got = torch.zeros(2, 3)
        first, second = (dist.irecv(got[tag], group=group, group_src=peer, tag=tag) for tag in range(2))
        sent = [dist.isend(torch.full((3,), 5.0), group=group, group_dst=peer, tag=0)]
        first.wait()  # and not the second one, whose message comes later
        sent += [dist.isend(torch.full((3,), 6.0), group=group, group_dst=peer, tag=1)]
        assert wait_tensor(got).tolist() == [[5.0] * 3, [6.0] * 3]
        for work in (second, *sent):
            work.wait()
    assert registered() == 0


CASES = [in_flight]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("libdc")
    for case in CASES:
        case(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
        print("rank", dist.get_rank(), case.__name__, "right", flush=True)
    dist.barrier()
    dist.destroy_process_group()
