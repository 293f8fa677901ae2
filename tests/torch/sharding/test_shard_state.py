"""Precision, saved state and figures of sharded models."""

from __future__ import annotations

import weakref
from typing import Any, Dict, List

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from models import Odd, Plain, adamw, bits, data, make
from sharded import alone, on, one_thread, sharded  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode


# Precision


def test_autocast() -> None:
    def rank(comm: Any, stage: int) -> Any:
        model = make()
        dct.shard(model, stage, comm=comm)
        optimizer = adamw(model)
        losses = []
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*data(step, comm.rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, bits(dct.full_state_dict(model))

    expected = libdc.run.threads(2, rank, 0, timeout=60)
    for stage in (1, 3):
        assert libdc.run.threads(2, rank, stage, timeout=60) == expected


class Casts(TorchDispatchMode):
    """Notes the copies of another type that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: List[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.seen.append(weakref.ref(result))
        return result


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_autocast_keeps_no_casts_of_earlier_forwards(stage: int, grads: bool) -> None:
    """Its cache had one of each weight of each forward, until its block ended."""

    def rank(comm: Any) -> None:
        model = dct.shard(nn.Linear(4, 4), stage, comm=comm)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grads), Casts() as casts:
            for _ in range(2):
                result = model(torch.ones(1, 4))
                assert result.dtype is torch.bfloat16
                del result
            assert len(casts.seen) >= 4 and all(cast() is None for cast in casts.seen)

    on(2, rank)


class Cast(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.layers[0].weight.dtype)).float()


@pytest.mark.parametrize("backend", [None, "libdc"])
@pytest.mark.parametrize("options", [{"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.float64},
                                     {"reduce_dtype": torch.bfloat16},
                                     {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}])
def test_types(options: Any, backend: Any) -> None:
    """Of weights and of reductions: the same bits at every stage, also when some backwards only sum."""
    used = options.get("param_dtype", torch.float32)
    world = 2 if backend is None else 1

    def rank(comm: Any, stage: int) -> Any:
        model = make(Cast)
        dct.shard(model, stage, comm=comm, group_size=1, **options)
        call = model if backend is None else torch.compile(model, backend=backend)
        with torch.no_grad():
            assert model.layers[0](torch.ones(2, 16, dtype=used)).dtype == used
        optimizer = adamw(model)
        losses = []
        for step in range(5):
            if step == 3:
                with dct.no_sync(model):
                    call(torch.ones(2, 16) * (comm.rank + 2)).backward()
            loss = call(torch.ones(2, 16) * (comm.rank + 1))
            loss.backward()
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, bits(dct.full_state_dict(model))

    torch._dynamo.reset()
    expected = libdc.run.threads(world, rank, 0, timeout=120)
    for losses, _ in expected:
        assert losses[-1] < losses[0]
    for stage in (1, 3):
        torch._dynamo.reset()
        assert libdc.run.threads(world, rank, stage, timeout=120) == expected


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_sync_sums_in_the_reductions_type(stage: int) -> None:
    """Sixteen gradients of 16 bits, summed in 32."""
    micros = 16
    plain = make(Plain).bfloat16()
    exact = [torch.zeros(p.shape) for p in plain.parameters()]
    for micro in range(micros):
        plain.zero_grad()
        plain(inputs(micro)).backward()
        for total, p in zip(exact, plain.parameters()):
            total += p.grad.float()

    def rank(comm: Any) -> Any:
        model = make(Plain)
        dct.shard(model, stage, comm=comm, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with dct.no_sync(model):
            for micro in range(micros - 1):
                model(inputs(micro)).backward()
        model(inputs(micros - 1)).backward()
        return [p.grad.clone() for p in model.parameters()]

    for grads, total in zip(on(1, rank)[0], exact):
        torch.testing.assert_close(grads.view(total.shape), total, rtol=1e-6, atol=1e-9)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).bfloat16()


@pytest.mark.parametrize("used", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_mean_of_16_bit_gradients_is_not_rounded_to_16_bits(stage: int, used: torch.dtype) -> None:
    """The reference is float64. A sum in the weights' type would be rounded to 16 bits first."""
    world = 2
    plain = make(Plain).to(used)
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in plain.parameters()]
    for rank in range(world):
        plain.zero_grad()
        plain(inputs(rank).to(used)).backward()
        for total, p in zip(exact, plain.parameters()):
            total += p.grad.double() / world

    def work(comm: Any) -> Any:
        model = make(Plain)
        dct.shard(model, stage, comm=comm, param_dtype=used)
        model(inputs(comm.rank).to(used)).backward()
        return [p.grad.full_tensor() if stage else p.grad.clone() for p in model.parameters()]

    assert any(not torch.equal(mean, mean.to(used).double()) for mean in exact)
    for grads in on(world, work):
        for grad, mean in zip(grads, exact):
            assert grad.dtype == torch.float32 and torch.equal(grad.double(), mean)


def test_types_that_are_none() -> None:
    for name in ("param_dtype", "reduce_dtype"):
        for wrong in (torch.int32, "bfloat16", {nn.LayerNorm: torch.float32}):
            with pytest.raises(TypeError, match=f"{name} = .*, must be a floating-point torch.dtype or None"):
                dct.shard(make(Plain), 3, **{name: wrong})


# State


def test_state_round_trips() -> None:
    """Whole weights and optimizer states move between stages and numbers of ranks; flat ones between equal runs."""
    saved: Dict[str, Any] = {}

    def first(comm: Any) -> Any:
        model = sharded(comm)
        optimizer = adamw(model)
        for step in range(3):
            model(*data(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        whole, states = dct.full_state_dict(model), dct.full_optimizer_state_dict(model, optimizer)
        only = dct.full_state_dict(model, rank0_only=True)
        assert bits(only) == bits(whole) if comm.rank == 0 else only == {}
        again = sharded(comm)
        again.load_state_dict(model.state_dict())
        assert bits(dct.full_state_dict(again)) == bits(whole)
        if comm.rank == 0:
            saved.update(weights=whole, states=states)
        return further(model, optimizer)

    def further(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        losses = []
        for step in range(3, 6):
            loss = model(*data(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = on(2, first)[0]
    assert {name: value.shape for name, value in saved["weights"].items()} == {
        name: value.shape for name, value in make().state_dict().items()}
    plain = make()
    plain.load_state_dict(saved["weights"])
    assert saved["states"]["state"]["emb.weight"]["exp_avg"].shape == (37, 13)

    def second(comm: Any, stage: int) -> Any:
        model = sharded(comm, stage)
        model(*data(9, 0)).backward()  # gathers the old weights
        model.zero_grad()
        optimizer = adamw(model)
        dct.load_full_state_dict(model, saved["weights"])
        dct.load_full_optimizer_state_dict(model, optimizer, saved["states"])
        return further(model, optimizer)

    # Ranks have the same data, so that their number matters for rounding alone, and here not even for that.
    for world, stage in ((1, 3), (1, 0), (2, 1), (2, 3)):
        for losses in libdc.run.threads(world, second, stage, timeout=60):
            assert losses == expected

    def wrong(model: Odd) -> None:
        with pytest.raises(ValueError, match="scale has shape"):
            dct.load_full_state_dict(model, {**saved["weights"], "scale": torch.zeros(3)})

    alone(wrong)


def test_ranks_start_with_rank_0s_weights() -> None:
    def rank(comm: Any) -> Any:
        model = make()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(comm.rank)
        dct.shard(model, 3, comm=comm)
        return bits(dct.full_state_dict(model))

    assert set(on(3, rank)) == {bits(make().state_dict())}


def test_trace_and_stats() -> None:
    def rank(comm: Any) -> None:
        model = sharded(comm)
        dct.trace_start(model, 1000)
        model(*data(0, 0)).backward()
        events = dct.trace_read(model)
        assert {"allgather_param", "reduce_grad"} & {event.op for event in events}
        assert dct.stats(model).registered_params == len(list(model.parameters()))

    on(2, rank)


def test_ends_of_models_free_the_library() -> None:
    def rank(comm: Any) -> None:
        import gc
        import weakref

        model = sharded(comm)
        model(*data(0, 0)).backward()
        root = weakref.ref(model.__dict__["_dc"].root)
        del model
        gc.collect()
        assert root() is None

    on(1, rank)


@pytest.mark.parametrize("stage, of", [(1, "model"), (3, "model"), (3, "optimizer")])
def test_load_state_dict_on_one_rank_alone(stage: int, of: str) -> None:
    """The whole was a mixture of new and old parts."""
    whole = {name: torch.ones_like(value) for name, value in make().state_dict().items()}

    def rank(comm: Any) -> str:
        model = sharded(comm, stage)
        optimizer = adamw(model)
        model.load_state_dict(whole)
        model(*data(0, 0)).backward()
        assert all(value.eq(1).all() for value in dct.full_state_dict(model).values())
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        model(*data(0, 0))
        if comm.rank == 0 and of == "model":
            model.load_state_dict(whole)
        elif comm.rank == 0:
            optimizer.load_state_dict(state)
        with pytest.raises(RuntimeError) as caught:
            model(*data(0, 0)).backward()
        return str(caught.value)

    first, second = on(2, rank)
    assert "rank 0 is in all_gather where rank 1 is in" in second
    assert "load_state_dict() was called on this rank" in first and "every rank must call it" in first
