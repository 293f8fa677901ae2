"""NCCL underneath a group. Gloo stands in for NCCL, and tensors of float64 for a card's. Run by ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, List

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from libdc.torch.distributed import LibdcProcessGroup
from libdc.torch.distributed.card import is_of_card, route_calls

made: List[Any] = []


class Options:
    """Of the stand-in."""


class StandIn(dist.ProcessGroupGloo):
    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        made.append(options)


StandIn.Options = Options


class Group(LibdcProcessGroup):
    """A group whose card is the CPU."""

    def card_group(self) -> dist.ProcessGroup:
        first = self._card is None
        group = super().card_group()
        if first:
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.NCCL,
                                    group._get_backend(torch.device("cuda")))
        return group


def _is_float64(value: Any) -> bool:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64


route_calls(Group, _is_float64)


def collectives(group: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    def full(value: float, count: int = 2) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype)

    total, ranks = size * (size + 1) / 2, [float(r) for r in range(size)]
    x = full(rank + 1.0)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [total] * 2
    work = dist.all_reduce(x := full(rank + 1.0), dist.ReduceOp.MAX, group, async_op=True)
    work.wait()
    assert x.tolist() == [size] * 2
    dist.reduce(x := full(rank + 1.0), group_dst=1, group=group)
    assert rank != 1 or x.tolist() == [total] * 2
    dist.broadcast(x := full(rank), group_src=1, group=group)
    assert x.tolist() == [1.0] * 2
    parts = [full(0) for _ in range(size)]
    dist.all_gather(parts, full(rank), group=group)
    assert [part[0].item() for part in parts] == ranks
    dist.all_gather_into_tensor(x := full(0, 2 * size), full(rank), group=group)
    assert x[::2].tolist() == ranks
    dist.reduce_scatter_tensor(x := full(0), full(rank, 2 * size), group=group)
    assert x.tolist() == [sum(ranks)] * 2
    dist.reduce_scatter(x := full(0), [full(rank) for _ in range(size)], group=group)
    assert x.tolist() == [sum(ranks)] * 2
    dist.all_to_all_single(x := full(0, size), full(rank, size), group=group)
    assert x.tolist() == ranks
    dist.all_to_all(parts, [full(rank) for _ in range(size)], group=group)
    assert [part[0].item() for part in parts] == ranks
    dist.gather(full(rank), parts if rank == 1 else None, group=group, group_dst=1)
    assert [part[0].item() for part in parts] == ranks
    dist.scatter(x := full(0), [full(r) for r in range(size)] if rank == 0 else None, group=group, group_src=0)
    assert x.tolist() == [rank] * 2


def ddp(group: Any, rank: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(rank)  # so the first rank's weights must be sent
    net = DistributedDataParallel(torch.nn.Linear(3, 2).to(dtype), process_group=group)
    net(torch.full((1, 3), rank + 1.0, dtype=dtype)).sum().backward()
    return net.module.weight.grad


def main() -> None:
    setattr(dist, "ProcessGroupNCCL", StandIn)
    dist.Backend.register_backend("over", Group.create, extended_api=True, devices=["cpu"])
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("over")  # as libdc.torch does for libdc
    dist.init_process_group("over", timeout=timedelta(seconds=50), pg_options=Options())
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    collectives(group, rank, size, torch.float32)
    assert not made, "tensors of the CPU need no NCCL"
    try:
        group._get_backend(torch.device("cuda"))
    except RuntimeError as error:
        assert "from the first collective" in str(error)
    collectives(group, rank, size, torch.float64)
    assert len(made) == 1 and made[0]._timeout == timedelta(seconds=50)
    assert made[0].global_ranks_in_group == [] and made[0].group_name == group.group_name  # [] is all ranks
    assert isinstance(group._get_backend(torch.device("cuda")), dist.ProcessGroupGloo)
    assert ddp(group, rank, torch.float64).tolist() == ddp(group, rank, torch.float32).tolist() == [[1.5] * 3] * 2
    part = dist.new_group([1])
    whole = group.split_group([0, 1])
    if rank == 1:
        dist.all_reduce(torch.ones(1, dtype=torch.float64), group=part)
        assert made[-1].global_ranks_in_group == [1] and len(made) == 2
        dist.destroy_process_group(part)
    collectives(whole, rank, size, torch.float64)
    assert made[-1].global_ranks_in_group == [0, 1]
    whole.shutdown()
    assert not is_of_card(torch.ones(1)) and not is_of_card([[]]) and is_of_card(torch.device("cuda"))
    dist.destroy_process_group()
    print(f"rank {rank}: NCCL's place was taken", flush=True)
