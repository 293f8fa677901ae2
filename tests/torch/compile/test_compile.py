"""torch.compile over sharded models: the operators stand in the graphs, and the bits are the same at every stage."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from compared import record_graphs
from models import Plain, adamw, bits, data, make, train
from torch._dynamo.utils import counters

dc, rt = torch.ops.dc, torch.ops.dc_rt


@pytest.fixture(autouse=True)
def fresh() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.set_num_threads(before)


def alone(function: Callable[..., Any], *args: Any) -> Any:
    return libdc.run.threads(1, function, *args, timeout=120)[0]


def breaks() -> int:
    return sum(counters["graph_break"].values())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """The graphs that backend="libdc" runs, as lists of (operator, arguments)."""
    return record_graphs(monkeypatch)


@pytest.mark.parametrize("backend", ["libdc", "aot_eager", "eager"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_bits_of_eager(backend: str, accumulate: int) -> None:
    for stage in (0, 1, 2, 3):
        torch._dynamo.reset()
        eager = alone(train, stage, 6, accumulate)
        counters.clear()
        compiled = alone(train, stage, 6, accumulate, None, backend)
        assert compiled.losses == eager.losses and compiled.weights == eager.weights
        assert breaks() == 0 and counters["stats"]["unique_graphs"] == 1
        assert stage < 3 or compiled.stats.gathered_bytes == 0


@pytest.mark.parametrize("backend", ["libdc", "eager"])
def test_hooks_of_the_root_see_whole_weights(backend: str) -> None:
    def rank(comm: Any, backend: Any) -> Any:
        model = make(Plain)

        def halve(module: Any, args: Any) -> Any:
            return (args[0] * module.layers[0].weight.sum(),)

        model.register_forward_pre_hook(halve)
        dct.shard(model, 3, comm=comm)
        model.register_forward_hook(lambda module, args, output: output * module.layers[1].weight.square().mean())
        call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        loss = call(torch.ones(2, 16))
        loss.backward()
        return loss.item(), bits({name: p.grad for name, p in model.named_parameters()})

    expected = alone(rank, None)
    torch._dynamo.reset()
    assert alone(rank, backend) == expected


def test_inductor(launch: Any) -> None:
    """The same bits at every stage, near those of eager mode, no graph breaks, and a window of gathered weights."""
    text = """
import torch
from models import Plain, make, train
from torch._dynamo.utils import counters
import libdc.torch as dct
torch.set_num_threads(1)
comm = dct.init()
found = set()
for stage in (0, 3):
    torch._dynamo.reset()
    run = train(comm, stage, 6, backend="inductor", group_size=300, model={"layers": 1})
    assert not sum(counters["graph_break"].values())
    found.add((tuple(run.losses), run.weights))
assert run.stats.gathered_bytes == 0
assert len(found) == 1, [(losses[-1], weights[:8]) for losses, weights in found]
eager = train(comm, 3, 6, model={"layers": 1})
losses = next(iter(found))[0]
torch.testing.assert_close(torch.tensor(losses), torch.tensor(eager.losses), rtol=1e-3, atol=0)

model = make(Plain, width=32, layers=8)
dct.shard(model, 3, comm=comm, group_size=1)
call = torch.compile(model)
for _ in range(2):
    call(torch.randn(4, 32)).backward()
stats = dct.stats(model)
assert stats.gathered_bytes == 0 and stats.gathered_peak_bytes <= 3 * 32 * 32 * 4, stats
print("equal", comm.rank)
"""
    assert launch(text).count("equal") == 2


def test_ranks_as_processes(launch: Any) -> None:
    text = """
import torch
from models import train
import libdc.torch as dct
torch.set_num_threads(1)
comm = dct.init()
found = set()
for stage in (0, 3):
    for options in ({}, {"backend": "libdc"}, {"backend": "libdc", "accumulate": 1, "prefetch": 3, "group_size": 1}):
        torch._dynamo.reset()
        run = train(comm, stage, 6, **options)
        found.add((tuple(run.losses), run.weights))
assert len(found) == 1
for quiet in ("eager", "libdc"):
    torch._dynamo.reset()
    run = train(comm, 3, 4, 3, quiet=True, backend=None if quiet == "eager" else quiet)
    print(quiet, "reductions", run.stats.reductions)
print("equal", comm.rank)
"""
    assert launch(text, n=3).count("equal") == 3


def test_operators_in_the_graphs(graphs: List[Any]) -> None:
    def rank(comm: Any) -> Any:
        model = make()
        dct.shard(model, 3, comm=comm, group_size=1)
        return [(entry.id, entry.names[0]) for entry in model.__dict__["_dc"].root.group.entries], torch.compile(
            model, backend="libdc", fullgraph=True)(*data(0, 0)).backward()

    alone(rank)
    forward, backward = graphs
    assert forward[0][0] is rt.begin_forward.default
    for graph in graphs:
        gathers = [args[2] for target, args in graph if target is dc.allgather_param.default]
        waits = [args[2] for target, args in graph if target is dc.wait_allgather.default]
        releases = [args[2] for target, args in graph if target is dc.release_param.default]
        prefetched = [id for target, args in graph if target is dc.prefetch_params_fused.default for id in args[2]]
        assert gathers == waits == prefetched and sorted(gathers) == sorted(releases)
        assert not [target for target, _ in graph if target is rt.take.default]
    reduced = [args[2] for target, args in backward if target is dc.reduce_grad.default]
    begin, = [k for k, (target, _) in enumerate(backward) if target is rt.begin_backward.default]
    first = min(k for k, (target, _) in enumerate(backward) if target is dc.reduce_grad.default)
    assert begin < first and list(dict.fromkeys(reduced)) == list(backward[begin][1][2]) and len(reduced) == 15
    assert not [target for target, _ in forward if target is dc.reduce_grad.default]


def peak(layers: int, backend: str, **options: Any) -> int:
    def rank(comm: Any) -> Any:
        model = make(Plain, width=32, layers=layers)
        dct.shard(model, 3, comm=comm, **options)
        call = torch.compile(model, backend=backend)
        for step in range(3):
            dct.stats(model, reset=True)
            loss = call(torch.randn(4, 32))
            assert dct.stats(model).gathered_bytes == 0
            loss.backward()
            assert dct.stats(model).gathered_bytes == 0
        return dct.stats(model).gathered_peak_bytes

    torch._dynamo.reset()
    return alone(rank)


@pytest.mark.parametrize("backend", ["libdc", "aot_eager"])
def test_window_does_not_grow_with_layers(backend: str) -> None:
    one = 32 * 32 * 4
    for prefetch in (0, 1):
        few, many = (peak(layers, backend, prefetch=prefetch, group_size=1) for layers in (4, 10))
        assert few == many <= (prefetch + 2) * one, (few, many)


@pytest.mark.parametrize("odd", ["broken", "checkpointed"])
def test_graph_breaks_and_checkpoints(odd: str) -> None:
    eager = alone(train, 3, 4)
    runs = []
    for stage in (0, 1, 3):
        torch._dynamo.reset()
        counters.clear()
        runs.append(alone(train, stage, 4, 1, None, "libdc", {odd: True}))
        assert (breaks() > 0) == (odd == "broken")
        torch.testing.assert_close(torch.tensor(runs[-1].losses), torch.tensor(eager.losses), rtol=1e-5, atol=0)
    assert len({(tuple(run.losses), run.weights) for run in runs}) == 1
    assert runs[-1].stats.gathered_bytes == 0


def test_eager_islands() -> None:
    """A disabled submodule in a compiled model, a compiled submodule in an eager model."""

    def rank(comm: Any, how: str) -> Any:
        model = make()
        dct.shard(model, 3, comm=comm)
        call: Any = model
        if how == "island":
            model.blocks[1].forward = torch.compiler.disable(model.blocks[1].forward)
            call = torch.compile(model, backend="libdc")
        elif how == "block":
            model.blocks[0].compile(backend="libdc")
        elif how == "method":
            model.compile(backend="libdc")
        optimizer = adamw(model)
        losses = []
        for step in range(4):
            loss = call(*data(step, 0))
            loss.backward()
            assert dct.stats(model).gathered_bytes == 0
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, bits(dct.full_state_dict(model))

    expected = alone(rank, "")
    for how in ("island", "block", "method"):
        torch._dynamo.reset()
        assert alone(rank, how) == expected, how


def test_without_gradients_and_with_dynamic_shapes() -> None:
    def rank(comm: Any) -> None:
        model = make()
        dct.shard(model, 3, comm=comm)
        call = torch.compile(model, backend="libdc", fullgraph=True)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(call(*data(0, 0)), model(*data(0, 0)))
                assert dct.stats(model).gathered_bytes == 0
        torch._dynamo.reset()
        counters.clear()
        call = torch.compile(model, backend="libdc", dynamic=True)
        for batch in (2, 3, 4, 5):
            call(*data(0, 0, batch=batch)).backward()
        assert counters["stats"]["unique_graphs"] == 1

    alone(rank)


def test_freezing_recompiles_once() -> None:
    def rank(comm: Any, backend: Any) -> Any:
        model = make()
        dct.shard(model, 3, comm=comm)
        call = model if backend is None else torch.compile(model, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(6):
            if step == 3:
                model.blocks[0].up.requires_grad_(False)
            loss = call(*data(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = alone(rank, None)
    counters.clear()
    assert alone(rank, "libdc") == expected
    assert counters["stats"]["unique_graphs"] == 2


def test_edits_are_noticed() -> None:
    def rank(comm: Any, stage: int) -> None:
        model, other = make(), make()
        dct.shard(model, stage, comm=comm)
        call = torch.compile(model, backend="libdc")
        call(*data(0, 0))
        with torch.no_grad():
            for p, q in zip(model.parameters(), other.parameters()):
                p.mul_(0.5), q.mul_(0.5)
        assert call(*data(0, 0)).item() == other(*data(0, 0)).item()

    for stage in (0, 1, 3):
        torch._dynamo.reset()
        alone(rank, stage)


def test_other_models_and_passes_are_left_alone() -> None:
    """A pass of the user's still runs, and a graph without the operators is not touched."""
    import torch._functorch.config as functorch

    def rank(comm: Any) -> None:
        seen: Dict[str, int] = {"user": 0}

        def user(gm: Any, inputs: Any) -> Any:
            seen["user"] += 1
            return gm

        functorch.joint_custom_pass = user
        try:
            model = make(Plain)
            dct.shard(model, 3, comm=comm)
            torch.compile(model, backend="libdc")(torch.ones(2, 16)).backward()
            plain = make(Plain)
            torch.compile(plain, backend="aot_eager")(torch.ones(2, 16)).backward()
            for p, q in zip(model.parameters(), plain.parameters()):
                assert torch.equal(p.grad.view(q.shape), q.grad)
            assert seen["user"] == 2
        finally:
            functorch.joint_custom_pass = None

    alone(rank)


def test_weights_that_leave_a_graph_own_their_memory() -> None:
    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make(Plain)

        def forward(self, x: torch.Tensor) -> Any:
            weight = self.net.layers[0].weight * 1 + self.net.layers[0].weight
            kept = self.net.layers[1].weight
            torch._dynamo.graph_break()
            return (x @ weight @ kept).square().sum()

    def rank(comm: Any, backend: Any) -> Any:
        model = Leaks()
        dct.shard(model, 3, comm=comm)
        call = model if backend is None else torch.compile(model, backend=backend)
        for _ in range(2):
            loss = call(torch.ones(2, 16))
            model.zero_grad()
            loss.backward()
        got = bits({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        value = loss.item()
        del loss
        return value, got, dct.stats(model).gathered_bytes

    expected = alone(rank, None)
    for backend in ("libdc", "aot_eager"):
        torch._dynamo.reset()
        value, got, left = alone(rank, backend)
        assert (value, left) == (expected[0], 0), backend


def test_compiled_before_shard(launch: Any) -> None:
    """The backend has its name before the first shard(), also for a model that has run; sharding does not import
    Dynamo, and gradients are averaged."""
    text = """
import sys, torch, libdc.torch as dct
from torch import nn
comm = dct.init()
dct.shard(nn.Linear(2, 2))
assert "torch._dynamo" not in sys.modules
x = torch.full((3, 4), float(comm.rank + 1))
for how in ("before", "in place", "run before"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    called = model
    if how == "in place":
        model.compile(backend="libdc")
    else:
        called = torch.compile(model, backend="libdc")
    if how == "run before":
        called(x).sum().backward()
        model.zero_grad()
    for rank in range(comm.size):
        model(torch.full((3, 4), rank + 1.0)).square().sum().div(comm.size).backward()
    want = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    dct.shard(model, 1)
    for _ in range(2):
        called(x).square().sum().backward()
    for param, grad in zip(model.parameters(), want):
        assert torch.allclose(param.grad.full_tensor(), 2 * grad), how
    print("averaged")
"""
    assert launch(text).count("averaged") == 6
