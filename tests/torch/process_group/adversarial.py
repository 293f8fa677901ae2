"""Calls that are easy to get wrong. Memory overlaps, waits come in any order and on any thread, groups have another
order, a group ends with work under way, and a process forks. Run by ranks."""

from __future__ import annotations

import datetime
import itertools
import os
import threading
import time
from typing import Any, Callable, List

import torch
import torch.distributed as dist
from libdc.torch.distributed.work import Work

from process_group.failures import fails

LARGE = 40000  # of which a part takes several rounds


def in_place(group: Any, rank: int, size: int) -> None:
    """The output of an exchange is its input: what comes must not overwrite what has not gone. Autograd hears of it."""
    for n in (2, LARGE):
        whole = torch.arange(float(n * size)) + 1000 * rank
        version = whole._version
        dist.all_to_all_single(whole, whole, group=group)
        assert whole._version > version
        want = [torch.arange(n * rank, n * (rank + 1.0)) + 1000 * r for r in range(size)]
        torch.testing.assert_close(whole, torch.cat(want), rtol=0, atol=0)


def overlapping(group: Any, rank: int, size: int) -> None:
    """The input lies in the output, but not at its place."""
    want = torch.cat([torch.arange(1.0, 5) + 100 * r for r in range(size)])
    for gather in (lambda x: dist.all_gather_into_tensor(x, x[1:5], group=group),
                   lambda x: dist.all_gather(list(x.split(4)), x[1:5], group=group)):
        whole = torch.arange(4.0 * size) + 100 * rank
        gather(whole)
        assert torch.equal(whole, want)
    whole = torch.arange(4.0 * size) + 100 * rank
    dist.scatter(whole[2:6], list(whole.split(4)) if rank == 0 else None, group=group, group_src=0)
    assert whole[2:6].tolist() == list(range(4 * rank, 4 * rank + 4))
    whole = torch.arange(4.0 * size) + 100 * rank
    dist.gather(whole[2:6], list(whole.split(4)) if rank == 0 else None, group=group, group_dst=0)
    assert rank or whole.tolist() == [2 + k + 100 * r for r in range(size) for k in range(4)]
    for n, in_lists in itertools.product((2, LARGE), (True, False)):  # memory that two storages have in common
        memory = bytearray(8 * n * (size + 1))
        whole = torch.frombuffer(memory, dtype=torch.float64, count=n * size)
        later = torch.frombuffer(memory, dtype=torch.float64, offset=8 * n)
        later.copy_(torch.arange(float(n * size)) + 1e6 * rank)
        if in_lists:
            dist.all_to_all(list(whole.split(n)), list(later.split(n)), group=group)
        else:
            dist.all_to_all_single(whole, later, group=group)
        assert torch.equal(whole, torch.cat([torch.arange(n * rank, n * (rank + 1.0)).double() + 1e6 * r
                                             for r in range(size)]))
    parts = torch.empty(4 * size)
    dist.all_gather_into_tensor(parts, torch.full((1,), float(rank)).expand(4), group=group)
    assert parts.tolist() == [r for r in range(size) for _ in range(4)]


def shapes(group: Any, rank: int, size: int) -> None:
    """No elements, no dimensions, another order of dimensions, and uneven large exchanges."""
    empty = torch.empty(0, 3)
    for call in (lambda: dist.all_reduce(empty, group=group), lambda: dist.reduce(empty, group=group, group_dst=0),
                 lambda: dist.all_reduce(empty, dist.ReduceOp.MAX, group=group),
                 lambda: dist.all_to_all_single(torch.empty(0, 3), empty, group=group),
                 lambda: dist.all_gather_into_tensor(torch.empty(0, 3), empty, group)):
        call()
    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar, group=group)
    assert scalar.item() == size * (size + 1) / 2
    values = torch.arange(120.0).view(2, 3, 4, 5) + rank
    last = values.to(memory_format=torch.channels_last)
    dist.all_reduce(last, group=group)
    dist.all_reduce(values, group=group)
    assert torch.equal(last, values) and last.is_contiguous(memory_format=torch.channels_last)
    for n in (2, LARGE):  # rows that lie apart
        rows = torch.arange(3.0 * n * size).view(3, n * size).t()
        turned, parts = torch.empty(3, n * size).t(), [torch.empty(3, n).t() for _ in range(size)]
        dist.all_to_all_single(turned, rows + 1e5 * rank, group=group)
        dist.all_to_all(parts, list((rows + 1e5 * rank).split(n)), group=group)
        want = torch.cat([rows[n * rank : n * (rank + 1)] + 1e5 * r for r in range(size)])
        assert torch.equal(turned, want) and torch.equal(torch.cat(parts), want)
    ins = [LARGE * (1 + to) if to != rank else 0 for to in range(size)]
    outs = [LARGE * (1 + rank) if source != rank else 0 for source in range(size)]
    got = torch.empty(sum(outs), dtype=torch.complex64)
    dist.all_to_all_single(got, torch.full((sum(ins),), complex(rank, 1)), outs, ins, group=group)
    assert got.tolist() == [complex(r, 1) for r in range(size) if r != rank for _ in range(LARGE * (1 + rank))]


def waits(group: Any, rank: int, size: int) -> None:
    """In the other order, by several threads, and by none but the future."""
    total = size * (size - 1) / 2
    tensors = [torch.full((n,), float(rank)) for n in (1, LARGE, 3, 5 * LARGE)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    threads = [threading.Thread(target=work.wait) for work in works for _ in range(2)]
    for thread in threads:
        thread.start()
    for work in works[::-1]:
        work.wait()
    for thread in threads:
        thread.join()
    assert all((tensor == total).all() for tensor in tensors)
    last = torch.full((2,), float(rank))
    doubled = dist.all_reduce(last, group=group, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert doubled.wait().tolist() == [2 * total] * 2


def callbacks(group: Any, rank: int, size: int) -> None:
    """A future's callback makes calls of the group and waits for them, while others are queued."""
    total = size * (size - 1) / 2

    def reduced(depth: int) -> Any:
        def again(future: Any) -> torch.Tensor:
            return future.value()[0] + (reduced(depth - 1).wait() if depth else 0)

        tensor = torch.full((LARGE,), float(rank))
        return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(again)

    for _ in range(3):
        dist.barrier(group)
        assert (reduced(2).wait() == 3 * total).all()
    first = dist.all_reduce(torch.full((LARGE,), float(rank)), group=group, async_op=True).get_future()
    second = dist.all_reduce(torch.full((3,), float(rank)), group=group, async_op=True)
    assert first.then(lambda _: second.get_future().wait()).wait()[0].tolist() == [total] * 3


def lists(group: Any, rank: int, size: int) -> None:
    """A caller may change its lists as soon as it has made the call."""
    blocked = threading.Event()
    parts = [torch.full((2,), 10.0 * rank + to) for to in range(size)]
    received, gathered, reduced = ([torch.zeros(2) for _ in range(size)] for _ in range(3))
    calls: List[Callable[[List[Any]], Any]] = [
        lambda ins: dist.all_to_all(received, ins, group=group, async_op=True),
        lambda ins: dist.reduce_scatter(reduced[0], ins, group=group, async_op=True),
        lambda outs: dist.all_gather(outs, parts[rank], group=group, async_op=True)]
    group._get_backend(torch.device("cpu"))._lane.submit(Work(blocked.wait, None), False)
    works = []
    for call, tensors in zip(calls, (list(parts), list(parts), list(gathered))):
        works.append(call(tensors))
        tensors[:] = [torch.full((2,), -1.0)] * size
    blocked.set()
    for work in works:
        work.wait()
    assert [got.tolist() for got in received] == [[10.0 * r + rank] * 2 for r in range(size)]
    assert reduced[0].tolist() == [10.0 * size * (size - 1) / 2 + rank * size] * 2
    assert [got.tolist() for got in gathered] == [[11.0 * r] * 2 for r in range(size)]


def default_device(group: Any, rank: int, size: int) -> None:
    """PyTorch's default device is for the caller's tensors."""
    tensor, other = torch.full((3, 2), float(rank)), torch.empty(2, 3 * size).t()
    with torch.device("meta"):
        dist.all_reduce(tensor, dist.ReduceOp.PRODUCT, group=group, async_op=True).wait()
        dist.all_gather_into_tensor(other, tensor, group=group, async_op=True).wait()
    assert not tensor.any() and not other.any()


def results(group: Any, rank: int, size: int) -> None:
    """A future of all_gather has the ranks' tensors, as Gloo's."""
    parts = [torch.zeros(2) for _ in range(size)]
    found = dist.all_gather(parts, torch.full((2,), float(rank)), group=group, async_op=True).get_future().wait()
    assert [part.tolist() for part in found] == [[float(r)] * 2 for r in range(size)]


def sparse(group: Any, rank: int, size: int) -> None:
    """Autograd may keep a sum's values."""
    other = torch.sparse_coo_tensor([[0]], torch.ones(1), (3 + rank,))
    try:
        dist.all_reduce(other, group=group)
        raise AssertionError("ranks have other shapes")
    except RuntimeError as error:
        assert "called all_reduce (sparse [4]" in str(error), error
    tensor = torch.sparse_coo_tensor([[0, rank + 1]], torch.tensor([1.0, 2.0]), (size + 1,))
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, dist.ReduceOp.AVG):
        try:
            dist.all_reduce(tensor, op, group=group)
            raise AssertionError(f"{op} of sparse tensors")
        except ValueError as error:
            assert "of a sparse tensor, must be SUM" in str(error), error
    dist.all_reduce(tensor, group=group)
    assert tensor.to_dense().tolist() == [size] + [2.0] * size
    (tensor.coalesce().values() * torch.ones(size + 1, requires_grad=True)).sum().backward()


def messages(group: Any, rank: int, size: int) -> None:
    """Many at once both ways between neighbours, waited for in the other order."""
    nxt, prev = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((LARGE,), 100.0 * rank + i) for i in range(5)]
    got = [torch.zeros(LARGE) for _ in range(5)]
    works = [dist.isend(tensor, group=group, group_dst=nxt) for tensor in sent]
    works += [dist.irecv(tensor, group=group, group_src=prev) for tensor in got]
    for work in works[::-1]:
        work.wait()
    assert [tensor[-1].item() for tensor in got] == [100.0 * prev + i for i in range(5)]
    wide = torch.arange(3.0 * LARGE).view(3, LARGE)
    works = [dist.isend((wide + rank).t(), group=group, group_dst=nxt) for _ in range(5)]
    filled = [torch.full((3 * LARGE,), -1.0) for _ in range(5)]  # memory that a copy of what is sent may not be in
    for _ in range(5):
        turned = torch.empty(LARGE, 3)
        dist.recv(turned, group=group, group_src=prev)
        assert torch.equal(turned.t(), wide + prev)
    for work in works:
        work.wait()
    del filled
    pair = [dist.P2POp(op, torch.empty(0), group=group, group_peer=peer)
            for op, peer in ((dist.isend, nxt), (dist.irecv, prev))]
    assert all(work.wait() for work in dist.batch_isend_irecv(pair))
    try:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), group=group, group_peer=rank)])
    except ValueError as error:
        assert "must be another rank" in str(error)
    else:
        raise AssertionError("a message to itself is no error")


def withdrawn(group: Any, rank: int, size: int) -> None:
    """A message for any source, after a recv and a send whose time was over."""
    short = dist.new_group(timeout=datetime.timedelta(seconds=5))
    got = torch.zeros(1)
    for place, call in ((0, lambda: dist.recv(got, group=short, group_src=1)),
                        (2, lambda: dist.send(got, group=short, group_dst=0))):
        if rank == place:
            try:
                call()
            except dist.DistError as error:
                assert "within 5 s" in str(error), error
            else:
                raise AssertionError("no error")
    dist.barrier()
    if rank == 1:
        dist.send(torch.full((1,), 7.0), group=short, group_dst=0)
    elif rank == 0:
        assert dist.recv(got, group=short) == 1 and got.item() == 7


def threads(group: Any, rank: int, size: int) -> None:
    """Three groups at once, each by a thread of its own, and their ranks in another order."""
    groups = [dist.new_group(list(range(size))[::-1]) for _ in range(3)]
    found: List[float] = [0.0] * 3

    def reduce(k: int) -> None:
        for _ in range(20):
            tensor = torch.full((1000,), float(rank + k))
            dist.all_reduce(tensor, group=groups[k])
            found[k] = tensor[0].item()

    running = [threading.Thread(target=reduce, args=(k,)) for k in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert found == [size * (size - 1) / 2 + k * size for k in range(3)], found


def large_objects(group: Any, rank: int, size: int) -> None:
    everyone: List[Any] = [None] * size
    dist.all_gather_object(everyone, bytes([rank]) * 3_000_000, group)
    assert [(len(item), item[-1]) for item in everyone] == [(3_000_000, r) for r in range(size)]


def coalesced(group: Any, rank: int, size: int) -> None:
    parts = [torch.full((k + 1,), float(rank)) for k in range(5)]
    outs = [torch.empty((k + 1) * size) for k in range(5)]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for out, part in zip(outs, parts):
            dist.all_gather_into_tensor(out, part, group=group)
    manager.wait()
    assert [out.tolist() for out in outs] == [[float(r) for r in range(size) for _ in range(k + 1)] for k in range(5)]


def coalesced_on_a_device(group: Any, rank: int, size: int) -> None:
    """As programs for NCCL do it, with any calls. The work has their errors."""
    def manager() -> Any:
        return dist._coalescing_manager(group=group, device=torch.device("cpu"), async_ops=True)

    total, got = torch.ones(2), torch.zeros(2)
    with manager() as works:
        dist.all_reduce(total, group=group)
        dist.irecv(got, group=group, group_src=(rank - 1) % size)
    dist.barrier(group)  # does not wait for the message
    dist.send(torch.full((2,), rank + 1.0), group=group, group_dst=(rank + 1) % size)
    works.wait()
    assert total.tolist() == [size] * 2 and got.tolist() == [(rank - 1) % size + 1] * 2
    with manager() as works:
        dist.all_gather([got] * (size + 1), total, group=group, async_op=True)
    fails(works.wait, f"{size + 1} output tensors, must be {size}", kind=ValueError)


def forked(group: Any, rank: int, size: int) -> None:
    """A child has no thread that would do the work: each call is an error, and the parent goes on."""
    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    work = dist.barrier(group, async_op=True) if rank == 0 else None  # under way: the others come later
    child = os.fork()
    if child == 0:
        calls: List[Callable[[], Any]] = [
            lambda: dist.barrier(group), lambda: dist.isend(torch.ones(1), group=group, group_dst=(rank + 1) % size),
            lambda: dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().wait(),
            *([work.wait] if work is not None else [])]
        os._exit(sum(_fails(call) for call in calls) != len(calls))
    assert os.waitpid(child, 0)[1] == 0
    if work is None:
        dist.barrier(group)
    else:
        work.wait()


def _fails(call: Callable[[], Any]) -> bool:
    try:
        call()
    except RuntimeError as error:
        return "forked this one" in str(error)
    return False


def ends_with_work(group: Any, rank: int, size: int) -> None:
    """The last case: the end of a group waits for what was called before it."""
    last = dist.new_group()
    tensor = torch.full((LARGE,), float(rank))
    works = [dist.all_reduce(tensor, group=last, async_op=True) for _ in range(3)]
    dist.destroy_process_group(last)
    assert all(work.is_completed() for work in works)
    assert tensor[0].item() == size ** 3 * (size - 1) / 2


SIXTY = datetime.timedelta(seconds=60)


def ends_with_any_source(group: Any, rank: int, size: int) -> None:
    """The end of a group waits for a message for any source that was sent before it."""
    last, got, work = dist.new_group(timeout=SIXTY), torch.zeros(1), None
    if rank == 1:
        dist.send(torch.ones(1), group=last, group_dst=0)
    elif rank == 0:
        dist.recv(got, group=last)
        work = dist.irecv(got, group=last)
        time.sleep(0.1)  # its thread asks the store every 10 ms now
    dist.barrier(last)
    if rank == 1:
        work = dist.isend(torch.full((1,), 7.0), group=last, group_dst=0)
    dist.barrier(last)
    dist.destroy_process_group(last)
    assert work is None or work.wait()
    assert rank != 0 or got.item() == 7


def aborted_by_another(group: Any, rank: int, size: int) -> None:
    """abort() ends messages between two other ranks that had messages before."""
    if size < 3:
        return
    last, got = dist.new_group(timeout=SIXTY), torch.zeros(1)
    if rank == 1:
        dist.send(torch.ones(1), group=last, group_dst=0)
    elif rank == 0:
        dist.recv(got, group=last, group_src=1)
    dist.barrier(group)
    if rank == 2:
        last.abort()
    elif rank == 0:
        try:
            dist.recv(got, group=last, group_src=1)
            raise AssertionError("no error")
        except RuntimeError as error:
            assert "abort() of the process group" in str(error), error
    dist.barrier(group)


def forked_message(group: Any, rank: int, size: int) -> None:
    """A child's refused isend leaves no mark for the parent's peers."""
    mine, got = dist.new_group(timeout=SIXTY), torch.zeros(1)
    nxt, prev = (rank + 1) % size, (rank - 1) % size
    child = os.fork()
    if child == 0:
        os._exit(not _fails(lambda: dist.isend(torch.ones(1), group=mine, group_dst=nxt)))
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier(group)
    works = [dist.irecv(got, group=mine, group_src=prev)]
    time.sleep(0.5)  # it meets the child's word
    works += [dist.isend(torch.full((1,), float(rank)), group=mine, group_dst=nxt)]
    for work in works:
        work.wait()
    assert got.item() == prev


CASES = [in_place, overlapping, shapes, waits, callbacks, lists, default_device, results, sparse, messages, withdrawn,
         threads, large_objects, coalesced, coalesced_on_a_device, forked, forked_message, aborted_by_another,
         ends_with_any_source, ends_with_work]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("libdc")
    for case in CASES:
        case(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
        print("rank", dist.get_rank(), case.__name__, "right", flush=True)
    dist.barrier()
    dist.destroy_process_group()
