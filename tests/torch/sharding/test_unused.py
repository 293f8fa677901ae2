"""shard(..., unused="zero"): ranks that take different paths through a model."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from libdc.torch.sharding.order.agreed_order import supersequence
from models import Block, bits, make
from sharded import on, one_thread  # noqa: F401
from torch.utils.checkpoint import checkpoint

_EXPERTS = 4


class Paths(nn.Module):
    """Experts, a layer that is dropped, a branch, and a weight that two modules use."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList(Block(width) for _ in range(_EXPERTS))
        self.dropped = Block(width)
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, path: int) -> torch.Tensor:
        h = self.first(x)
        experts = sorted({path % _EXPERTS, path // 2 % _EXPERTS}, reverse=path % 5 == 3)
        for k in experts:
            h = h + checkpoint(self.experts[k], h, use_reentrant=False) if path % 2 else h + self.experts[k](h)
        if path % 3:
            h = self.dropped(h)
        h = self.left(h) if path % 4 < 2 else self.right(h)
        return self.last(self.tied(h) if path % 7 else h).square().mean()


def _path(step: int, rank: int) -> int:
    """Different on the ranks, and in steps 4 and 5 the same."""
    return step if step in (4, 5) else 3 * step + 5 * rank


def _batch(step: int, rank: int) -> Tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 12, generator=generator), _path(step, rank)


_STEPS = 9


def _reference(world: int, accumulate: int) -> Tuple[List[float], Dict[str, torch.Tensor]]:
    model = make(Paths)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(_STEPS):
        for rank in range(world):
            loss = model(*_batch(step, rank))
            (loss / world).backward()
            losses.append(loss.item())
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


def _train(comm: Any, stage: int, accumulate: int, no_sync: bool, **options: Any) -> Any:
    model = make(Paths)
    dct.shard(model, stage, comm=comm, unused="zero", group_size=300, bucket_size=200, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(_STEPS):
        if no_sync and (step + 1) % accumulate:
            with dct.no_sync(model):
                loss = model(*_batch(step, comm.rank))
                loss.backward()
        else:
            loss = model(*_batch(step, comm.rank))
            loss.backward()
        losses.append(loss.item())
        if (step + 1) % accumulate == 0:
            with torch.no_grad():
                model(*_batch(step, comm.rank + 1))  # other paths than the training's
            optimizer.step()
            optimizer.zero_grad()
    return losses, dct.full_state_dict(model), dct.stats(model)


@pytest.mark.parametrize("world, accumulate, no_sync", [(3, 1, False), (2, 3, False), (3, 3, True)])
def test_losses_and_weights_are_those_of_one_process(world: int, accumulate: int, no_sync: bool) -> None:
    losses, weights = _reference(world, accumulate)
    for stage in (0, 1, 2, 3):
        ranks = libdc.run.threads(world, _train, stage, accumulate, no_sync, timeout=60)
        every = [ranks[rank][0][step] for step in range(_STEPS) for rank in range(world)]
        torch.testing.assert_close(torch.tensor(every), torch.tensor(losses), rtol=1e-4, atol=1e-5)
        for rank in ranks:
            assert bits(rank[1]) == bits(ranks[0][1])
            for name, value in weights.items():
                torch.testing.assert_close(rank[1][name], value, rtol=1e-3, atol=1e-4, msg=lambda text: name + text)
        assert stage < 3 or all(rank[2].gathered_bytes == 0 for rank in ranks)


def test_ranks_that_use_all_say_so_once_a_phase() -> None:
    def rank(comm: Any, stage: int) -> List[int]:
        model = make(Paths)
        dct.shard(model, stage, comm=comm, unused="zero")
        counts = []
        gather = libdc.Comm.all_gather
        for step in range(3):
            calls = []
            comm.all_gather = lambda *args, **kwargs: (calls.append(1), gather(comm, *args, **kwargs))
            model(*_batch(4, comm.rank)).backward()
            del comm.all_gather
            counts.append(len(calls))
        return counts[1:]

    for stage in (0, 1, 2, 3):
        assert libdc.run.threads(2, rank, stage, timeout=60) == [[2, 2] if stage == 3 else [1, 1]] * 2


def test_what_no_rank_has_used_has_no_gradient() -> None:
    def rank(comm: Any, stage: int) -> None:
        model = make(Paths)
        dct.shard(model, stage, comm=comm, unused="zero")
        called: List[str] = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: called.append(name))
        for _ in range(2):
            model.zero_grad()
            called.clear()
            model(torch.ones(2, 12), (0, 3)[comm.rank]).backward()  # experts 0; 1 and 3; left
            used = {name for name, p in model.named_parameters() if p.grad is not None}
            assert {name.split(".")[1] for name in used if name.startswith("experts")} == {"0", "1", "3"}
            assert not any(name.startswith("dropped") for name in used) and sorted(called) == sorted(used)
            assert float(model.experts[1].up.weight.grad.norm()) > 0

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_groups_of_ranks_that_have_all() -> None:
    expected = _reference(4, 1)[1]
    for rank in libdc.run.threads(4, lambda comm: _train(comm, 3, 1, False, mesh=(2, 2), prefetch=0), timeout=60):
        for name, value in expected.items():
            torch.testing.assert_close(rank[1][name], value, rtol=1e-3, atol=1e-4)


def test_a_forward_that_raises_on_all_ranks_is_over() -> None:
    def rank(comm: Any) -> bool:
        model = make(Paths)
        dct.shard(model, 3, comm=comm, unused="zero")
        for _ in range(2):
            model(*_batch(1, comm.rank)).backward()
        handle = model.left.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(*_batch(4, comm.rank))
        handle.remove()
        model.zero_grad()
        model(*_batch(1, comm.rank)).backward()
        return bool(torch.isfinite(model.first.weight.grad).all())

    assert on(2, rank) == [True, True]


class Experts(nn.ModuleList):
    """Behind a frozen layer, whose input wants a gradient."""

    def forward(self, path: Sequence[int]) -> torch.Tensor:
        h = self[0](torch.ones(1, 4, requires_grad=True))
        for k in path:
            h = self[k](h)
        return h.square().sum()


def test_sums_of_no_sync_behind_frozen_layers() -> None:
    """In the last micro-batch a rank's backward comes to none of its trained parameters, but through a frozen one."""
    models = [Experts([nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(3)]
    for each in models[1:]:
        each.load_state_dict(models[0].state_dict())
    models[2]([2]).backward()  # which rank 1 alone uses

    def rank(comm: Any) -> None:
        model = dct.shard(models[comm.rank], 3, comm=comm, unused="zero")
        with dct.no_sync(model):
            model([1 + comm.rank]).backward()
        model([] if comm.rank else [1]).backward()
        assert torch.allclose(model[2].weight.grad.full_tensor(), models[2][2].weight.grad / 2)

    libdc.run.threads(2, rank, timeout=60)


def test_without_it_the_error_names_the_parameter() -> None:
    def rank(comm: Any, stage: int) -> None:
        model = make(Paths)
        dct.shard(model, stage, comm=comm, group_size=1)
        with pytest.raises((RuntimeError, libdc.Error), match=r"where rank 0 called \w+ of parameter \d+ \(\w+"):
            model(torch.ones(2, 12), comm.rank * 3).backward()
            model(torch.ones(2, 12), comm.rank * 3).backward()

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="shard: unused = True, must be \"zero\" or None"):
        dct.shard(nn.Linear(1, 1), unused=True)  # type: ignore[arg-type]

    def compiled(comm: Any) -> None:
        model = dct.shard(nn.Linear(2, 2), comm=comm, unused="zero")
        with pytest.raises(RuntimeError, match="shard: unused = 'zero' is for models without torch.compile"):
            torch.compile(model, backend="eager")(torch.ones(1, 2))

    on(2, compiled)

    def differ(comm: Any) -> None:
        with pytest.raises(ValueError, match="shard: unused = None on rank 0, but zero on rank 1: all ranks must"):
            dct.shard(nn.Linear(2, 2), comm=comm, unused=(None, "zero")[comm.rank])

    on(2, differ)


def _orders() -> Sequence[Tuple[List[List[int]], Optional[List[int]]]]:
    return (([[1, 2, 3]] * 2, [1, 2, 3]), ([[1, 3], [1, 2, 3]], [1, 2, 3]), ([[], [5]], [5]),
            ([[1, 2, 1], [2, 1, 2]], None), ([[1, 4, 9], [1, 5, 9], [4, 5]], None))


@pytest.mark.parametrize("sequences, result", _orders())
def test_a_supersequence_has_each(sequences: List[List[int]], result: Optional[List[int]]) -> None:
    merged = supersequence(sequences)
    assert result in (None, merged) and len(merged) <= sum(map(len, sequences))
    for sequence in sequences:
        rest = iter(merged)
        assert all(operation in rest for operation in sequence)
