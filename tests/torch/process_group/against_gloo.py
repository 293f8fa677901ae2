"""Each collective of the backend libdc beside Gloo's, on the same random tensors. Run by ranks."""

from __future__ import annotations

import random
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.distributed as dist

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.int8, torch.uint8, torch.int32, torch.int64]
OP = dist.ReduceOp
LENGTHS = [0, 1, 7, 1000, 40000]


def values(rng: torch.Generator, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums and products no type rounds."""
    drawn = torch.randint(0, 2 if dtype is torch.bool else 4, shape, generator=rng)
    return drawn.to(dtype)


class Pair:
    """The same call on both backends."""

    def __init__(self, gloo: Any, libdc: Any, seed: int) -> None:
        self.groups = (gloo, libdc)
        self.rank, self.size = dist.get_rank(libdc), dist.get_world_size(libdc)
        self.common = random.Random(seed)  # the same on all ranks
        self.rng = torch.Generator().manual_seed(1000 * seed + self.rank)

    def compare(self, what: str, make: Callable[[], List[Any]], call: Callable[[Any, List[Any]], Any],
                outputs: Callable[[List[Any]], Any], want: Optional[Any] = None) -> None:
        """make: the arguments; call: the collective; outputs: the tensors to compare. want: where Gloo has no such
        call."""
        first = make()
        arguments = [first, [_copy(value) for value in first]]
        results = []
        for group, values in zip(self.groups, arguments):
            if want is not None and group is self.groups[0]:
                results.append(want)
                continue
            work = call(group, values)
            if work is not None:
                work.wait()
            results.append(outputs(values))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def _part(whole: torch.Tensor, n: int, place: int) -> torch.Tensor:
    return whole[place * n : (place + 1) * n]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_copy(item) for item in value] if isinstance(value, list) else value


def reductions(pair: Pair) -> None:
    by_dtype: Dict[torch.dtype, List[Any]] = {dtype: [OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX] for dtype in FLOATS + WHOLE}
    for dtype in WHOLE:
        by_dtype[dtype] += [OP.BAND, OP.BOR, OP.BXOR]
    for dtype, ops in by_dtype.items():
        for op in ops:
            n = pair.common.choice(LENGTHS)
            root, waits = pair.common.randrange(pair.size), pair.common.random() < 0.5
            what = f"{op} of {n} {dtype}"
            pair.compare("all_reduce " + what, lambda: [values(pair.rng, (n,), dtype)],
                         lambda g, a: dist.all_reduce(a[0], op, g, async_op=waits), lambda a: a)
            pair.compare("reduce " + what, lambda: [values(pair.rng, (n,), dtype)],
                         lambda g, a: dist.reduce(a[0], group=g, op=op, group_dst=root, async_op=waits),
                         lambda a: a if pair.rank == root else [])
            if op is not OP.PRODUCT or dtype not in FLOATS:
                pair.compare("reduce_scatter_tensor " + what,
                             lambda: [torch.zeros(n, dtype=dtype), values(pair.rng, (n * pair.size,), dtype)],
                             lambda g, a: dist.reduce_scatter_tensor(a[0], a[1], op, g, waits), lambda a: a[0])
                for place in range(pair.size):  # into the input itself
                    pair.compare(f"reduce_scatter_tensor in place {place} {what}",
                                 lambda: [values(pair.rng, (n * pair.size,), dtype)],
                                 lambda g, a: dist.reduce_scatter_tensor(_part(a[0], n, place), a[0], op, g, waits),
                                 lambda a: _part(a[0], n, place))


def reductions_beyond(pair: Pair) -> None:
    """Types and reductions that Gloo lacks: bool, 16-bit whole numbers, scaled sums, complex parts."""
    size = pair.size
    ranks = torch.arange(size)
    for op, want in ((OP.SUM, size > 1), (OP.MAX, size > 1), (OP.PRODUCT, size == 1), (OP.BAND, size == 1),
                     (OP.BOR, size > 1)):
        flags = torch.tensor([pair.rank > 0 or size == 1 and want])
        dist.all_reduce(flags, op, pair.groups[1])
        assert flags.item() == want, (op, flags)
    for dtype in FLOATS:
        mean = torch.full((5,), float(pair.rank), dtype=dtype)
        dist.all_reduce(mean, OP.AVG, pair.groups[1])
        torch.testing.assert_close(mean, ranks.double().mean().to(dtype).expand(5))
        scaled = torch.full((5,), float(pair.rank), dtype=dtype)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5), pair.groups[1])
        torch.testing.assert_close(scaled, (ranks * 0.5).sum().to(dtype).expand(5))
        whole = torch.full((size,), float(pair.rank), dtype=dtype)
        dist.reduce_scatter_tensor(scaled[:1], whole, dist._make_nccl_premul_sum(torch.tensor([0.5])), pair.groups[1])
        torch.testing.assert_close(scaled, (ranks * 0.5).sum().to(dtype).expand(5))
    short = torch.full((3,), pair.rank, dtype=torch.int16)
    dist.all_reduce(short, group=pair.groups[1])
    assert short.tolist() == [int(ranks.sum())] * 3
    for dtype in (torch.complex64, torch.complex128):
        numbers = torch.full((4,), complex(1, pair.rank), dtype=dtype)
        dist.all_reduce(numbers, group=pair.groups[1])
        assert numbers.tolist() == [complex(size, int(ranks.sum()))] * 4
        whole, part = torch.full((4 * size,), complex(1, pair.rank), dtype=dtype), torch.empty(4, dtype=dtype)
        dist.reduce_scatter_tensor(part, whole, group=pair.groups[1])
        assert part.tolist() == [complex(size, int(ranks.sum()))] * 4
    uneven = [torch.arange(r + 1.0) + pair.rank for r in range(size)]
    mine = torch.empty(pair.rank + 1)
    dist.reduce_scatter(mine, uneven, group=pair.groups[1])
    torch.testing.assert_close(mine, torch.arange(pair.rank + 1.0) * size + ranks.sum())


def moves(pair: Pair) -> None:
    size = pair.size
    for dtype in FLOATS + WHOLE + [torch.bool, torch.complex64]:
        n, waits = pair.common.choice(LENGTHS), pair.common.random() < 0.5
        root = pair.common.randrange(size)
        if dtype not in (torch.bool, torch.complex64):
            _common_moves(pair, dtype, n, root, waits)
        sent = values(pair.rng, (n,), dtype)
        everyone = [torch.empty_like(sent) for _ in range(size)]
        dist.all_gather_object(objects := [None] * size, sent, pair.groups[1])
        dist.all_gather(everyone, sent, pair.groups[1])
        torch.testing.assert_close(everyone, objects, rtol=0, atol=0)
        dist.broadcast(sent, group=pair.groups[1], group_src=root)
        torch.testing.assert_close(sent, objects[root], rtol=0, atol=0)
    uneven = [torch.empty(r, 3) for r in range(size)]
    dist.all_gather(uneven, torch.full((pair.rank, 3), float(pair.rank)), pair.groups[1])
    assert [part.tolist() for part in uneven] == [[[float(r)] * 3] * r for r in range(size)]


def _common_moves(pair: Pair, dtype: torch.dtype, n: int, root: int, waits: bool) -> None:
    size = pair.size
    new = lambda: values(pair.rng, (n,), dtype)
    empty = lambda: torch.full((n,), 9).to(dtype)
    what = f"{n} {dtype} of {size} ranks"
    pair.compare("broadcast " + what, lambda: [new()],
                 lambda g, a: dist.broadcast(a[0], group=g, group_src=root, async_op=waits), lambda a: a)
    pair.compare("all_gather " + what, lambda: [[empty() for _ in range(size)], new()],
                 lambda g, a: dist.all_gather(a[0], a[1], g, waits), lambda a: a[0])
    pair.compare("all_gather_into_tensor " + what, lambda: [torch.zeros(n * size, dtype=dtype), new()],
                 lambda g, a: dist.all_gather_into_tensor(a[0], a[1], g, waits), lambda a: a[0])
    pair.compare("gather " + what, lambda: [[empty() for _ in range(size)], new()],
                 lambda g, a: dist.gather(a[1], a[0] if pair.rank == root else None, group=g, group_dst=root,
                                          async_op=waits), lambda a: a[0])
    pair.compare("scatter " + what, lambda: [empty(), [new() for _ in range(size)]],
                 lambda g, a: dist.scatter(a[0], a[1] if pair.rank == root else None, group=g, group_src=root,
                                           async_op=waits), lambda a: a[0])
    pair.compare("all_to_all_single " + what, lambda: [torch.zeros(n * size, dtype=dtype),
                                                       values(pair.rng, (n * size,), dtype)],
                 lambda g, a: dist.all_to_all_single(a[0], a[1], group=g, async_op=waits), lambda a: a[0])
    rows = [[pair.common.randrange(4) for _ in range(size)] for _ in range(size)]  # from row to column
    ins, outs = rows[pair.rank], [row[pair.rank] for row in rows]
    pair.compare("uneven all_to_all_single " + what,
                 lambda: [torch.zeros(sum(outs), 5, dtype=dtype), values(pair.rng, (sum(ins), 5), dtype)],
                 lambda g, a: dist.all_to_all_single(a[0], a[1], outs, ins, group=g, async_op=waits), lambda a: a[0])
    sent = [values(pair.rng, (count, 2), dtype) for count in ins]
    got = [torch.zeros(count, 2, dtype=dtype) for count in outs]
    dist.all_to_all(got, sent, group=pair.groups[1])
    dist.all_gather_object(everyone := [None] * size, sent, pair.groups[0])
    torch.testing.assert_close(got, [parts[pair.rank] for parts in everyone], rtol=0, atol=0)


def _to_first() -> Any:
    opts = dist.GatherOptions()
    opts.rootRank = 0
    return opts


def strided(pair: Pair) -> None:
    """Tensors that are not contiguous."""
    make = lambda: values(pair.rng, (6, 4), torch.float32).t()
    pair.compare("all_reduce of a transpose", lambda: [make()], lambda g, a: dist.all_reduce(a[0], group=g),
                 lambda a: a)
    pair.compare("broadcast of a transpose", lambda: [make()], lambda g, a: dist.broadcast(a[0], group=g, group_src=0),
                 lambda a: a)
    for n in (3, 40000):  # of which gather sends a copy
        whole = torch.zeros(pair.size, n)
        dist.gather((torch.arange(2.0 * n) + pair.rank)[::2], list(whole) if pair.rank == 0 else None,
                    group=pair.groups[1], group_dst=0)
        flat = torch.zeros(pair.size * n)
        pair.groups[1].gather_single(flat, (torch.arange(2.0 * n) + pair.rank)[::2], _to_first()).wait()
        want = torch.arange(0, 2.0 * n, 2) + torch.arange(float(pair.size))[:, None]
        assert pair.rank or torch.equal(whole, want) and torch.equal(flat, want.view(-1))
    if pair.size > 1:
        whole = torch.zeros(4, 12)
        view, rank = whole[:, ::2], pair.rank
        if rank == 0:
            dist.send(make(), group=pair.groups[1], group_dst=1)
        elif rank == 1:
            dist.recv(view, group=pair.groups[1], group_src=0)
            assert not whole[:, 1::2].any() and view.any()


def modes(pair: Pair) -> None:
    """Leaves that require gradients, and tensors of inference mode, on the caller's thread and the group's."""
    group, total = pair.groups[1], float(sum(range(pair.size)))
    for waits in (False, True):
        leaf = torch.full((3, 2), float(pair.rank)).t().requires_grad_()
        work = dist.all_reduce(leaf, dist.ReduceOp.MAX, group, waits)
        assert work is None or work.wait()
        assert leaf.grad_fn is None and leaf.tolist() == [[pair.size - 1.0] * 3] * 2
        with torch.inference_mode():
            mine, parts = torch.full((2, 3), float(pair.rank)), [torch.empty(3, 2).t() for _ in range(pair.size)]
            work = dist.all_gather(parts, mine, group, waits)
            assert work is None or work.wait()
            assert sum(part.sum().item() for part in parts) == 6 * total


def messages(pair: Pair) -> None:
    rank, size, group = pair.rank, pair.size, pair.groups[1]
    if size == 1:
        return
    # Both directions, two tags, received in another order.
    nxt, prev = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(torch.full((tag + 1,), 10 * rank + tag), group=group, group_dst=nxt, tag=tag)
             for tag in (0, 1)]
    got = [torch.zeros(tag + 1, dtype=torch.int64) for tag in (0, 1)]
    for tag in (1, 0):
        dist.recv(got[tag], group=group, group_src=prev, tag=tag)
    for send in sends:
        send.wait()
    assert [part.tolist() for part in got] == [[10 * prev], [10 * prev + 1] * 2]
    back = torch.zeros(3)
    ops = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), group=group, group_peer=prev),
           dist.P2POp(dist.irecv, back, group=group, group_peer=nxt)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert back.tolist() == [float(nxt)] * 3
    # Rank 0 takes two from each other rank, of any and of one it names.
    if rank == 0:
        named = torch.zeros(1)
        dist.recv(named, group=group, group_src=size - 1, tag=5)
        assert named.item() == size - 1
        sources = []
        for _ in range(2 * (size - 1) - 1):
            number = torch.zeros(1)
            work = group.recv_anysource([number], 5)
            work.wait()
            assert number.item() == work._source_rank(), (number, work._source_rank())
            sources.append(int(number))
        assert sorted(sources) == sorted([r for r in range(1, size)] * 2)[:-1] if size > 1 else True, sources
    else:
        for _ in range(2):
            dist.send(torch.full((1,), float(rank)), group=group, group_dst=0, tag=5)


def objects(pair: Pair) -> None:
    group, size = pair.groups[1], pair.size
    mine = {"rank": pair.rank, "text": "x" * (1 + 1000 * pair.rank)}
    everyone: List[Any] = [None] * size
    dist.all_gather_object(everyone, mine, group)
    assert [item["rank"] for item in everyone] == list(range(size))
    shared: List[Any] = [mine if pair.rank == 0 else None]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    assert shared[0]["rank"] == 0
    gathered: Any = [None] * size if pair.rank == size - 1 else None
    dist.gather_object(mine, gathered, group=group, group_dst=size - 1)
    assert gathered is None or [item["rank"] for item in gathered] == list(range(size))
    part: List[Any] = [None]
    dist.scatter_object_list(part, [{"for": r} for r in range(size)] if pair.rank == 0 else None, group=group,
                             group_src=0)
    assert part[0] == {"for": pair.rank}
    if size > 1:
        if pair.rank == 0:
            dist.send_object_list([mine, 7], group=group, group_dst=1)
        elif pair.rank == 1:
            dist.recv_object_list(both := [None, None], group=group, group_src=0)
            assert both[1] == 7


def sparse(pair: Pair) -> None:
    rank, size = pair.rank, pair.size
    def make() -> List[Any]:
        rows = torch.tensor([[rank, size]])
        return [torch.sparse_coo_tensor(rows, torch.ones(2, 3) * (rank + 1), (size + 1, 3))]
    pair.compare("all_reduce of a sparse tensor", make, lambda g, a: dist.all_reduce(a[0], group=g),
                 lambda a: a[0].to_dense())


def pending(pair: Pair) -> None:
    """Work that has not been waited for keeps its order, whatever is called in between."""
    group = pair.groups[1]
    total = pair.size * (pair.size - 1) // 2
    tensors = [torch.full((n,), float(pair.rank)) for n in (1, 1000, 3, 100000, 2)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    last = torch.full((4,), float(pair.rank))
    dist.all_reduce(last, group=group)
    assert all(work.is_completed() for work in works) and last.tolist() == [total] * 4
    dist.barrier(group)
    for work, tensor in zip(works, tensors):
        assert work.wait() and work.is_success() and work.result()[0] is tensor
        assert work.get_future().wait()[0] is tensor and tensor.tolist() == [float(total)] * len(tensor)


ALL = [reductions, reductions_beyond, moves, strided, modes, messages, objects, sparse, pending]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in range(1, world + 1):
        groups = [dist.new_group(list(range(size)), backend=backend) for backend in ("gloo", "libdc")]
        if rank < size:
            assert dist.get_backend(groups[1]) == "libdc"
            for place, case in enumerate(ALL):
                case(Pair(groups[0], groups[1], 10 * size + place))
        dist.barrier()
    dist.destroy_process_group()
    print("rank", rank, "has the values of Gloo")
