"""PyTorch's own ways to train on several ranks, over Gloo and over the backend libdc. Run by ranks: each case returns
numbers, which must be the same."""

from __future__ import annotations

import tempfile
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model(width: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(3)], nn.Linear(width, 5))


def batch(rank: int, width: int = 12) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(rank))


def train(net: nn.Module, rank: int, steps: int = STEPS, optimizer: Any = None) -> List[float]:
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-2)
    out = []
    for _ in range(steps):
        loss = net(batch(rank)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        out += [loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()]
    return out


def ddp(group: Any) -> List[float]:
    net = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.002)
    out = train(net, dist.get_rank(group))
    with net.no_sync():
        net(batch(7)).sum().backward()
    return out + train(net, dist.get_rank(group))


def ddp_unused_parameters(group: Any) -> List[float]:
    net = nn.Module()
    net.used, net.unused = model(), nn.Linear(3, 3)
    net.forward = net.used.forward  # type: ignore[method-assign]
    wrapped = DistributedDataParallel(net, process_group=group, find_unused_parameters=True,
                                      gradient_as_bucket_view=True)
    return train(wrapped, dist.get_rank(group))


def ddp_float16_hook(group: Any) -> List[float]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    net = DistributedDataParallel(model(), process_group=group)
    net.register_comm_hook(group, fp16_compress_hook)
    return train(net, dist.get_rank(group))


def ddp_uneven_batches(group: Any) -> List[float]:
    from torch.distributed.algorithms.join import Join

    net, rank = DistributedDataParallel(model(), process_group=group), dist.get_rank(group)
    with Join([net]):
        losses = train(net, rank, 2 + rank)
    with Join([net], divide_by_initial_world_size=False):  # by those that are left, whose number is a work's result
        return losses + train(net, rank, 2 + rank)


def pipeline(group: Any) -> List[float]:
    """Messages between stages, two of them a rank."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    blocks = [Block(12) for _ in range(2 * size)]
    stages = [PipelineStage(blocks[place], place, 2 * size, torch.device("cpu"), group=group)
              for place in (rank, rank + size)]
    schedule = ScheduleInterleaved1F1B(stages, size, loss_fn=nn.functional.mse_loss)
    losses: List[torch.Tensor] = []
    inputs = (batch(0),) if rank == 0 else ()
    outputs = {"target": batch(1), "losses": losses} if rank == size - 1 else {}
    schedule.step(*inputs, **outputs)
    norms = [p.grad.norm() for stage in stages for p in stage.submod.parameters() if p.grad is not None]
    return [each.item() for each in losses + norms]


def zero_redundancy(group: Any) -> List[float]:
    net = DistributedDataParallel(model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2)
    return train(net, dist.get_rank(group), optimizer=optimizer)


def shard(mesh: DeviceMesh, **options: Any) -> nn.Module:
    net = model()
    for block in list(net)[:3]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def fsdp2(group: Any) -> List[float]:
    mesh = DeviceMesh.from_group(group, "cpu")
    net = shard(mesh)
    out = train(net, dist.get_rank(group))
    return out + [p.full_tensor().double().sum().item() for p in net.parameters()]


def fsdp2_mixed_precision(group: Any) -> List[float]:
    mesh = DeviceMesh.from_group(group, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(shard(mesh, mp_policy=policy, reshard_after_forward=False), dist.get_rank(group))


def dtensor(group: Any) -> List[float]:
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(1)
    whole = torch.randn(7, 5)  # uneven
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    everywhere = columns.redistribute(placements=[Replicate()])
    assert torch.equal(everywhere.to_local(), whole)
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    return [rows.sum().full_tensor().item(), columns.std().full_tensor().item(), product.full_tensor().sum().item()]


def tensor_parallel(group: Any) -> List[float]:
    mesh = DeviceMesh.from_group(group, "cpu")
    net = model()
    for block in list(net)[:3]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    out = []
    for _ in range(STEPS):
        loss = net(batch(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def checkpoint(group: Any) -> List[float]:
    mesh = DeviceMesh.from_group(group, "cpu")
    net = shard(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, dist.get_rank(group), 2, optimizer)
    shared: List[Any] = [tempfile.mkdtemp() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    weights, state = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=shared[0], process_group=group)
    want = train(net, dist.get_rank(group), 2, optimizer)
    again = shard(mesh)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    weights, state = get_state_dict(again, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=shared[0], process_group=group)
    set_state_dict(again, optimizer, model_state_dict=weights, optim_state_dict=state)
    got = train(again, dist.get_rank(group), 2, optimizer)
    assert got == want, (got, want)
    return got


def functional(group: Any) -> List[float]:
    """Functional collectives, eager and compiled without a graph break."""
    size = dist.get_world_size(group)

    def step(x: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(x * 2, "sum", group)
        gathered = funcol.all_gather_tensor(x + total, 0, group)
        part = funcol.reduce_scatter_tensor(gathered, "avg", 0, group)
        swapped = funcol.all_to_all_single(gathered, None, None, group)
        return part.sum() + (swapped * torch.arange(len(swapped))[:, None]).sum() + funcol.broadcast(x, 0, group).sum()

    x = batch(dist.get_rank(group)).double()  # these sums cancel
    eager = step(x)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager)
    return [eager.item(), funcol.all_reduce(x, "max", group).sum().item(), float(size)]


CASES: List[Callable[[Any], List[float]]] = [
    ddp, ddp_unused_parameters, ddp_float16_hook, ddp_uneven_batches, pipeline, zero_redundancy, fsdp2,
    fsdp2_mixed_precision, dtensor, tensor_parallel, checkpoint, functional,
]  # fmt: skip


def numbers(backend: str) -> Dict[str, List[float]]:
    """With the backend as the default group, since PyTorch's checkpoints take no other in places."""
    dist.init_process_group(backend)
    out = {case.__name__: case(dist.group.WORLD) for case in CASES}
    if dist.get_world_size() == 4:
        out["two_dimensions"] = train(shard(_mesh_of_two()), dist.get_rank())
    dist.destroy_process_group()
    return out


def _mesh_of_two() -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def main() -> None:
    torch.set_num_threads(1)
    want, got = numbers("gloo"), numbers("libdc")
    for name, values in want.items():
        rtol = 1e-2 if "float16" in name or "mixed" in name else 2e-6  # 16-bit sums, which Gloo rounds more often
        torch.testing.assert_close(got[name], values, rtol=rtol, atol=1e-7,
                                   msg=lambda text: f"{name}: {text}")
        print(name, "as over Gloo")
