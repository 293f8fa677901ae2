"""Calls under what PyTorch has around them: works as a graph's inputs, tracing, tensors that wrap others, autocast and
torch.compile. Run by ranks."""

from __future__ import annotations

import time
from typing import Any, Callable, List

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from process_group.failures import fails

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
        wrong = dist.all_gather([torch.zeros(2)] * (size + 1), total[:2], group=group, async_op=True)
        fails(wrong.wait, "3 output tensors, must be 2", kind=ValueError)
    assert registered() == 0


def functional_results(group: Any, rank: int, size: int) -> None:
    """Results of functional collectives, which wait when they are used, as inputs and as outputs."""
    def new(n: int = 4) -> torch.Tensor:
        return funcol.all_reduce(torch.full((n,), rank + 1.0), "sum", group)

    def parts() -> List[torch.Tensor]:
        return [new() for _ in range(size)]

    calls: List[Callable[[torch.Tensor, torch.Tensor, List[torch.Tensor]], Any]] = [
        lambda out, x, _: dist.all_to_all_single(out, x, group=group),
        lambda out, _, ins: dist.reduce_scatter(out, ins, group=group),
        lambda out, _, ins: dist.scatter(out, ins if rank == 0 else None, group=group, group_src=0),
        lambda _, x, outs: dist.all_gather(outs, x, group=group),
        lambda _, x, outs: dist.gather(x, outs if rank == 0 else None, group=group, group_dst=0),
        lambda out, _, __: dist.all_reduce(out, group=group),
        lambda out, _, __: dist.broadcast(out, group=group, group_src=0),
        lambda out, x, _: dist.send(x, group=group, group_dst=1) if rank == 0 else
        dist.recv(out, group=group, group_src=0)]
    sums = {1: 6.0, 5: 6.0}  # of the calls that add
    for place, call in enumerate(calls):
        out, x, several = new(), new(), parts()
        assert type(x) is not torch.Tensor
        call(out, x, several)
        assert out.tolist() == [sums.get(place, 3.0)] * 4 and several[1].tolist() == [3.0] * 4, place


def wrappers(group: Any, rank: int, size: int) -> None:
    """Tensors without memory of their own are refused by name."""
    whole = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (size,)), [Shard(0)])
    with FakeTensorMode():
        fake = torch.ones(4)
    for tensor, name in ((whole, "DTensor"), (fake, "FakeTensor")):
        for call in (lambda: dist.all_reduce(tensor, group=group),
                     lambda: dist.all_to_all_single(torch.ones(4), tensor, group=group),
                     lambda: dist.send(tensor, group=group, group_dst=1 - rank)):
            fails(call, f"a tensor is a {name}, must have memory of its own", kind=ValueError)
    dist.barrier(group)


def traced(group: Any, rank: int, size: int) -> None:
    """A graph would lack the call."""
    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        return y

    for options in ({}, {"tracing_mode": "fake"}, {"pre_dispatch": True}):
        fails(lambda: make_fx(doubled, **options)(torch.ones(2)), "under ProxyTorchDispatchMode", "functional")
    with FakeTensorMode():
        fails(lambda: dist.send(torch.ones(2), group=group, group_dst=1 - rank), "under FakeTensorMode")
    dist.barrier(group)


def compiled(group: Any, rank: int, size: int) -> None:
    """Calls after which Dynamo breaks its graph are the interpreter's, and others are recorded as functional ones."""
    peer = 1 - rank

    def broadcast(x: torch.Tensor, out: torch.Tensor) -> None:
        dist.broadcast(x, group=group, group_src=1)

    def scatter(x: torch.Tensor, out: torch.Tensor) -> None:
        dist.scatter(out, [x, x + 1] if rank == 0 else None, group=group, group_src=0)

    def waited(x: torch.Tensor, out: torch.Tensor) -> None:
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.all_reduce(x, group=group, async_op=True).get_future().wait()

    def messages(x: torch.Tensor, out: torch.Tensor) -> None:
        works = [dist.isend(x, group=group, group_dst=peer), dist.irecv(out, group=group, group_src=peer)]
        for work in works:
            work.wait()

    def batch(x: torch.Tensor, out: torch.Tensor) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, group=group, group_peer=peer),
                                            dist.P2POp(dist.irecv, out, group=group, group_peer=peer)]):
            work.wait()

    def whole_graph(x: torch.Tensor, out: torch.Tensor) -> None:
        dist.all_reduce(x, group=group)
        dist.all_to_all_single(out, x, group=group)

    for call in (broadcast, scatter, waited, messages, batch, whole_graph):
        def step(x: torch.Tensor) -> torch.Tensor:
            x, out = x * 2, torch.zeros(2)
            call(x, out)
            return x + 10 * out

        torch._dynamo.reset()
        x = torch.arange(2.0) + rank
        want = step(x)
        assert torch.equal(torch.compile(step, backend="eager", fullgraph=call is whole_graph)(x), want), call


def modes(group: Any, rank: int, size: int) -> None:
    """The caller's autocast and dispatch modes do not change what a call computes."""
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, *_: Any) -> Any:
            raise AssertionError(func)

    halves, half = [torch.full((2,), rank + 1.0, dtype=torch.float16) for _ in range(size)], torch.zeros(2).half()
    with torch.autocast("cpu", torch.bfloat16):
        dist.reduce_scatter(half, halves, group=group)
    assert half.tolist() == [3, 3]
    work = dist.reduce_scatter(half, halves, dist.ReduceOp.MAX, group=group, async_op=True)
    with Refusing():
        work.wait()
        dist.all_reduce(halves[0], dist.ReduceOp.MAX, group=group)
    assert half.tolist() == halves[0].tolist() == [2, 2]


CASES = [in_flight, functional_results, wrappers, traced, modes, compiled]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("libdc")
    for case in CASES:
        case(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
        print("rank", dist.get_rank(), case.__name__, "right", flush=True)
    dist.barrier()
    dist.destroy_process_group()
