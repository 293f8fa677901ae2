"""The same bits at every stage, in eager mode, whatever the ranks, buckets, prefetch and accumulation."""

from __future__ import annotations

import math
from typing import Any, List

import libdc.run
import libdc.torch as dct
import pytest
import torch
from models import Plain, Run, adamw, data, make, reference, train, trainable
from sharded import on, one_thread  # noqa: F401

UNLIMITED = 1 << 40


def ranks(world: int, *args: Any, **kwargs: Any) -> List[Run]:
    return libdc.run.threads(world, lambda comm: train(comm, *args, **kwargs), timeout=60)


def told(runs: List[Run]) -> Any:
    """Values that must not differ: each rank's losses, and the weights, which all ranks have alike."""
    assert len({run.weights for run in runs}) == 1
    return [run.losses for run in runs], runs[0].weights


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_same_bits_at_every_stage(world: int, accumulate: int) -> None:
    expected = told(ranks(world, 0, accumulate=accumulate))
    for bucket_size in (1, 1 << 18, UNLIMITED):
        assert told(ranks(world, 0, accumulate=accumulate, bucket_size=bucket_size)) == expected
        for stage, prefetch in ((1, 0), (1, 2), (2, 1), (2, 3), (3, 0), (3, 1), (3, 2), (3, 3)):
            got = ranks(world, stage, accumulate=accumulate, bucket_size=bucket_size, prefetch=prefetch, group_size=300)
            assert told(got) == expected, (stage, bucket_size, prefetch)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_against_one_process(world: int, accumulate: int) -> None:
    losses, weights = reference(world, 10, accumulate)

    def rank(comm: Any) -> Any:
        return train(comm, 3, 10, accumulate).losses

    got = torch.tensor(libdc.run.threads(world, rank, timeout=60), dtype=torch.float64).mean(0)
    torch.testing.assert_close(got, torch.tensor(losses, dtype=torch.float64), rtol=2e-5, atol=0)


@pytest.mark.parametrize("world", [2, 3])
def test_clipping_has_the_same_bits(world: int) -> None:
    expected = told(ranks(world, 0, 6, clip=0.5))
    assert told(ranks(world, 0, 6)) != expected
    for stage in (1, 2, 3):
        assert told(ranks(world, stage, 6, clip=0.5)) == expected


@pytest.mark.parametrize("kind", [2.0, 1.0, 3.0, float("inf")])
def test_norm_is_torchs(kind: float) -> None:
    model = make()
    model(*data(0, 0)).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, kind)
    grads = [p.grad.clone() for p in trainable(model)]

    def rank(comm: Any) -> Any:
        net = make()
        dct.shard(net, 3, comm=comm)
        net(*data(0, 0)).backward()
        norm = dct.clip_grad_norm_(net, 0.5, kind)
        return norm, [p.grad.to_local().clone() for p in trainable(net)]

    results = libdc.run.threads(2, rank, timeout=60)
    for norm, _ in results:
        torch.testing.assert_close(norm, expected.double(), rtol=1e-5, atol=0)
    for k, grad in enumerate(grads):
        whole = torch.cat([parts[k] for _, parts in results])[: grad.numel()].view(grad.shape)
        torch.testing.assert_close(whole, grad, rtol=1e-4, atol=1e-7)


def test_norms_that_are_none() -> None:
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm = .*, must be >= 0"):
            dct.clip_grad_norm_(make(), wrong)
    for kind in (0.0, -2.0, math.nan):
        with pytest.raises(ValueError, match="norm_type = .*, must be > 0"):
            dct.clip_grad_norm_(make(), 1.0, kind)


@pytest.mark.parametrize("world", [1, 2])
def test_no_sync_sums_locally(world: int) -> None:
    expected = told(ranks(world, 0, 6, 3, quiet=True))
    for stage in (1, 2, 3):
        runs = ranks(world, stage, 6, 3, quiet=True)
        assert told(runs) == expected
        assert runs[0].stats.reductions == runs[0].stats.reductions // 6 * 6
    reductions = {ranks(2, 2, 6, k, quiet=True)[0].stats.reductions for k in (1, 3)}
    assert len(reductions) == 1  # of the last micro-batch alone
    assert ranks(2, 2, 6, 3)[0].stats.reductions == 3 * reductions.pop()


@pytest.mark.parametrize("stage", range(4))
def test_zero_grad_drops_what_no_sync_has_summed(stage: int) -> None:
    """The model's and a module's, and an optimizer's for its own parameters."""

    def rank(comm: Any) -> None:
        shared = torch.nn.Linear(4, 3)
        model = dct.shard(torch.nn.ModuleList([torch.nn.Sequential(shared), torch.nn.Linear(4, 3)]), stage, comm=comm)
        others = torch.optim.SGD([shared.weight], lr=0.1)
        for zero, bias, of_second in ((model.zero_grad, 2.0, 2.0), (lambda: model.zero_grad(False), 2.0, 2.0),
                                      (others.zero_grad, 10.0, 10.0), (shared.zero_grad, 2.0, 10.0),
                                      (model[0].zero_grad, 2.0, 10.0)):
            model.zero_grad()
            with dct.no_sync(model):
                for _ in range(2):
                    (4 * (model[0](torch.ones(1, 4)) + model[1](torch.ones(1, 4))).sum()).backward()
                    zero()
            (model[0](torch.ones(2, 4)) + model[1](torch.ones(2, 4))).sum().backward()
            got = [p.grad.full_tensor() if stage else p.grad for p in model.parameters()]
            for grad, expected in zip(got, (2.0, bias, of_second, of_second)):
                assert torch.equal(grad, torch.full_like(grad, expected))

    on(2, rank)


def test_checkpointing_and_wide_groups() -> None:
    expected = told(ranks(2, 0, 6))
    for stage in (0, 1, 3):
        for prefetch in (0, 2):
            got = ranks(2, stage, 6, prefetch=prefetch, group_size=UNLIMITED, model={"checkpointed": True})
            assert told(got) == expected


def test_wire_bytes_are_the_formula() -> None:
    width, layers = 16, 4

    def rank(comm: Any, stage: int) -> Any:
        model = make(Plain, width=width, layers=layers)
        dct.shard(model, stage, comm=comm)
        optimizer = adamw(model)
        for step in range(4):
            if step == 3:
                dct.stats(model, reset=True)
            # Without a gradient for x, backward would not need the first weight again.
            model(torch.randn(8, width, requires_grad=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dct.stats(model)

    size = 4 * layers * width * width
    for world in (1, 2, 3):
        for stage, times in ((1, 2), (2, 2), (3, 3)):
            stats = libdc.run.threads(world, rank, stage, timeout=60)
            moved = sum(s.gather_wire_bytes + s.reduce_wire_bytes for s in stats)
            assert moved == times * size * (world - 1), (world, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_steady_memory(stage: int) -> None:
    """No allocation by the library in a steady step, and nothing that grows."""

    def rank(comm: Any) -> Any:
        model = make()
        dct.shard(model, stage, comm=comm, group_size=300)
        optimizer = adamw(model)
        seen = []
        for step in range(200):
            if step == 3:
                dct.stats(model, reset=True)
            model(*data(step % 7, comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(dct.stats(model))
        return seen

    for seen in libdc.run.threads(2, rank, timeout=120):
        assert seen[-1].allocations == 0
        assert {s.arena_bytes for s in seen[3:]} == {seen[3].arena_bytes}
        assert {s.bucket_bytes for s in seen[3:]} == {seen[3].bucket_bytes}


def peak(layers: int, **options: Any) -> int:
    def rank(comm: Any) -> Any:
        model = make(Plain, width=32, layers=layers)
        dct.shard(model, 3, comm=comm, **options)
        for step in range(3):
            dct.stats(model, reset=True)
            loss = model(torch.randn(4, 32))
            assert dct.stats(model).gathered_bytes == 0  # nothing is kept for backward
            loss.backward()
            assert dct.stats(model).gathered_bytes == 0
            model.zero_grad()
        return dct.stats(model).gathered_peak_bytes

    return max(libdc.run.threads(2, rank, timeout=60))


def test_window_does_not_grow_with_layers() -> None:
    one = 32 * 32 * 4
    for prefetch in (0, 1, 3):
        few, many = (peak(layers, prefetch=prefetch, group_size=1) for layers in (6, 24))
        assert few == many <= (prefetch + 2) * one


@pytest.mark.parametrize("odd", [{}, {"checkpointed": True}])
def test_nothing_stays_gathered(odd: Any) -> None:
    def rank(comm: Any) -> Any:
        model = make(**odd)
        dct.shard(model, 3, comm=comm, group_size=300)
        seen = []
        for step in range(3):
            loss = model(*data(step, comm.rank))
            seen.append(dct.stats(model).gathered_bytes)
            loss.backward()
            seen.append(dct.stats(model).gathered_bytes)
        return seen

    assert libdc.run.threads(2, rank, timeout=60) == [[0] * 6] * 2


def test_group_of_torch_distributed(launch: Any) -> None:
    text = """
import torch, torch.distributed as dist
from models import train
import libdc
torch.set_num_threads(1)
dist.init_process_group("gloo")
group = dist.group.WORLD
import libdc.torch as dct
ours = dct.init()
runs = []
for comm in (ours, dct.comm_from_process_group(group)):
    for stage in (0, 3):
        runs.append(train(comm, stage, 6))
assert len({tuple(run.losses) for run in runs}) == 1 and len({run.weights for run in runs}) == 1
print("equal", dist.get_rank())
"""
    for launcher in (["libdc.run", "-n", "2"], ["torch.distributed.run", "--nproc-per-node=2", "--standalone"]):
        assert launch(text, launcher=launcher).count("equal") == 2
