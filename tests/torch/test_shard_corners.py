"""What users do to models besides the plain loop."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any, Callable, Dict

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from models import Odd, Plain, adamw, bits, data, make, trainable


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on(world: int, function: Callable[..., Any]) -> Any:
    return libdc.run.threads(world, function, timeout=60)


def sharded(comm: Any, stage: int = 3, **options: Any) -> Odd:
    model = make()
    dct.shard(model, stage, comm=comm, group_size=300, **options)
    return model


def alone(function: Callable[[Odd], Any], **options: Any) -> Any:
    return on(1, lambda comm: function(sharded(comm, **options)))[0]


def grads(model: nn.Module, numbers: Any = None) -> Dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a: Dict[str, torch.Tensor], b: Dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Parameters


def test_names_identity_and_shapes() -> None:
    def rank(comm: Any) -> None:
        model = make()
        before = dict(model.named_parameters())
        shapes = {name: p.shape for name, p in before.items()}
        decayed = [p for p in model.parameters() if p.ndim > 1]  # a group by shape, made before
        dct.shard(model, 3, comm=comm)
        after = dict(model.named_parameters())
        assert list(after) == list(before) and all(after[name] is before[name] for name in after)
        assert {name: dct.full_shape(p) for name, p in after.items()} == shapes
        assert {id(p) for p in decayed} == {id(p) for p in model.parameters() if len(dct.full_shape(p)) > 1}
        assert model.head.weight is model.emb.weight  # still tied
        assert after["scale"].shape == (1,) and after["emb.weight"].shape == (-(-37 * 13 // comm.size),)
        assert isinstance(model.frozen, nn.Linear) and type(model.frozen).__name__ == "Linear"

    on(2, rank)


def test_outside_of_forward_it_is_the_parameter() -> None:
    def work(model: Odd) -> None:
        first = model(*data(0, 0)).item()
        assert isinstance(model.norm.weight, nn.Parameter)
        nn.init.zeros_(model.norm.weight)
        assert model.norm.weight.abs().sum() == 0
        assert model(*data(0, 0)).item() != first  # noticed
        model.norm.weight.requires_grad = False
        model(*data(0, 0)).backward()
        assert model.norm.weight.grad is None and model.norm.bias.grad is not None

    for stage in (0, 1, 3):
        alone(work, stage=stage)


def test_gathered() -> None:
    def rank(comm: Any) -> None:
        model = sharded(comm)
        whole = make()
        with dct.gathered(model):
            assert torch.equal(model.emb.weight, whole.emb.weight) and torch.equal(model.scale, whole.scale)
        assert model.emb.weight.ndim == 1 and dct.stats(model).gathered_bytes == 0

    on(2, rank)


def test_functional_call() -> None:
    def work(model: Odd) -> None:
        other = {name: p.detach() * 0.5 for name, p in make().named_parameters()}  # tied ones once
        expected = torch.func.functional_call(make(), other, data(0, 0))
        assert torch.equal(torch.func.functional_call(model, other, data(0, 0)), expected)
        assert torch.equal(model(*data(0, 0)), make()(*data(0, 0)))

    alone(work)


def test_freezing_and_unfreezing() -> None:
    def rank(comm: Any, stage: int) -> Any:
        model = make()
        dct.shard(model, stage, comm=comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(9):
            if step == 3:
                model.blocks[0].up.requires_grad_(False)
            if step == 5:
                model.frozen.requires_grad_(True)
                model.blocks[0].up.requires_grad_(True)
            loss = model(*data(step, comm.rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, bits(dct.full_state_dict(model))

    expected = libdc.run.threads(2, rank, 0, timeout=60)
    for stage in (1, 3):
        assert libdc.run.threads(2, rank, stage, timeout=60) == expected


def test_what_cannot_be_sharded_says_so() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match="stage = 4, must be 0, 1, 2 or 3"):
            dct.shard(make(), 4, comm=comm)
        with pytest.raises(ValueError, match="prefetch = -1, must be >= 0"):
            dct.shard(make(), 3, comm=comm, prefetch=-1)
        with pytest.raises(TypeError, match="comm = 'gloo', must be a libdc.Comm"):
            dct.shard(make(), 3, comm="gloo")
        with pytest.raises(ValueError, match="is on meta, must be on the cpu"):
            dct.shard(nn.Linear(2, 2, device="meta"), 3, comm=comm)
        with pytest.raises(ValueError, match="is not initialised yet"):
            dct.shard(nn.LazyLinear(2), 3, comm=comm)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = nn.Parameter(model[0].weight.data)
        with pytest.raises(ValueError, match="1.weight shares memory with 0.weight"):
            dct.shard(model, 3, comm=comm)
        model = sharded(comm)
        with pytest.raises(ValueError, match="is sharded already"):
            dct.shard(model, 3, comm=comm)
        with pytest.raises(ValueError, match="not a sharded model"):
            dct.stats(nn.Linear(2, 2))
        for copier in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                copier(model)
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            model.to(torch.bfloat16)
        assert model.to("cpu").float() is model

    on(1, rank)


# Steps


def test_no_grad_and_inference_mode() -> None:
    def work(model: Odd) -> None:
        expected = make()(*data(0, 0))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                loss = model(*data(0, 0))
            assert torch.equal(loss, expected) and not loss.requires_grad
            assert dct.stats(model).gathered_bytes == 0
        loss = model(*data(0, 0))
        loss.backward()
        assert torch.equal(loss, expected)

    alone(work)


def test_two_forwards_one_backward() -> None:
    def rank(comm: Any, stage: int) -> Any:
        model = sharded(comm, stage)
        (model(*data(0, comm.rank)) + model(*data(1, comm.rank))).backward()
        together = grads(model)
        model.zero_grad()
        model(*data(1, comm.rank)).backward()  # the order in which autograd runs the sum
        model(*data(0, comm.rank)).backward()
        apart = grads(model)
        for name in together:
            torch.testing.assert_close(together[name], apart[name], rtol=1e-4, atol=1e-6)
        return bits(together)

    for stage in (0, 1, 3):
        assert len(set(libdc.run.threads(1, rank, stage, timeout=60))) == 1


def test_retain_graph_and_zero_grad_in_place() -> None:
    def work(model: Odd) -> None:
        loss = model(*data(0, 0))
        loss.backward(retain_graph=True)
        once = grads(model)
        loss.backward()
        for name, grad in grads(model).items():  # not the same bits: tied weights have two parts
            torch.testing.assert_close(grad, 2 * once[name])
        for p in trainable(model):
            p.grad.zero_()
        model(*data(0, 0)).backward()
        assert same(grads(model), once)
        model.zero_grad(set_to_none=True)
        model(*data(0, 0)).backward()
        assert same(grads(model), once)
        for p in trainable(model):  # tensors of the user's own
            p.grad = p.grad * 3
        model(*data(0, 0)).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, 4 * once[name])

    for stage in (0, 1, 3):
        alone(work, stage=stage)


def test_parameters_without_a_gradient_keep_theirs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            return getattr(self, which)(x).sum()

    def rank(comm: Any) -> None:
        model = Two()
        dct.shard(model, 3, comm=comm)
        x = torch.ones(2, 3)
        model(x, "a").backward()
        assert model.b.weight.grad is None
        kept = model.a.weight.grad.clone()
        model(x, "b").backward()
        assert torch.equal(model.a.weight.grad, kept) and model.b.weight.grad is not None
        model(x, "a").backward()
        assert torch.equal(model.a.weight.grad, 2 * kept)

    on(2, rank)


def test_backward_with_inputs_and_second_order() -> None:
    def work(model: Plain) -> None:
        x = torch.randn(4, 16, requires_grad=True)
        model(x).backward(inputs=[model.layers[1].weight])
        assert model.layers[1].weight.grad is not None and model.layers[0].weight.grad is None
        model.zero_grad()
        plain = make(Plain)
        for net in (plain, model):  # a gradient penalty
            grad, = torch.autograd.grad(net(x), x, create_graph=True)
            grad.square().sum().backward()
        for p, q in zip(plain.parameters(), model.parameters()):
            torch.testing.assert_close(q.grad.view(p.shape), p.grad, rtol=1e-4, atol=1e-9)

    def rank(comm: Any) -> None:
        model = make(Plain)
        dct.shard(model, 3, comm=comm)
        work(model)

    on(1, rank)


def test_abandoned_and_raising() -> None:
    """Forwards without a backward, and exceptions in either, leave nothing behind."""

    class Touchy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, angry: bool) -> torch.Tensor:
            ctx.angry = angry
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            if ctx.angry:
                raise ArithmeticError("backward")
            return grad, None

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make(Plain)

        def forward(self, x: torch.Tensor, mood: str) -> torch.Tensor:
            for k, layer in enumerate(self.net.layers):
                x = Touchy.apply(layer(x), mood == "backward" and k == 1)
                if mood == "forward" and k == 2:
                    raise ArithmeticError("forward")
            return x.square().sum()

    def rank(comm: Any) -> None:
        model = Moody()
        dct.shard(model, 3, comm=comm, group_size=1, prefetch=2)
        x = torch.ones(2, 16)

        def step(mood: str) -> Dict[str, torch.Tensor]:
            model.zero_grad()
            loss = model(x, mood)
            if mood != "abandon":
                loss.backward()
            return grads(model)

        expected = step("")
        step("")
        for mood in ("abandon", "forward", "backward", "forward", "abandon", "backward", "backward"):
            if mood == "abandon":
                step(mood)
            else:
                with pytest.raises(ArithmeticError, match=mood):
                    step(mood)
            # What was prefetched in vain goes back once it has arrived.
            deadline = time.monotonic() + 60
            while mood != "backward" and dct.stats(model).gathered_bytes and time.monotonic() < deadline:
                time.sleep(0.001)
            assert mood == "backward" or dct.stats(model).gathered_bytes == 0
            assert same(step(""), expected), mood
            assert dct.stats(model).gathered_bytes == 0

    on(2, rank)


def test_changed_order() -> None:
    """Another path through the model than the last time: every rank leaves the known order together."""

    class Paths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make(Plain, layers=6)

        def forward(self, x: torch.Tensor, path: Any) -> torch.Tensor:
            for k in path:
                x = torch.tanh(self.net.layers[k](x))
            return x.square().sum()

    def rank(comm: Any, stage: int, prefetch: int) -> Any:
        model = Paths()
        dct.shard(model, stage, comm=comm, group_size=1, prefetch=prefetch)
        optimizer = adamw(model)
        losses = []
        for path in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 4, 5], [0, 1], [0, 1, 2, 3, 4, 5], [3, 3, 3], [0, 1, 2, 3], [2],
                     [0, 1, 2, 3], [0, 1, 2, 3]):
            loss = model(torch.ones(2, 16) * (1 + comm.rank), path)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            assert stage < 3 or dct.stats(model).gathered_bytes == 0
        return losses, bits(dct.full_state_dict(model))

    expected = libdc.run.threads(2, rank, 0, 0, timeout=60)
    for stage, prefetch in ((1, 2), (3, 0), (3, 1), (3, 4)):
        assert libdc.run.threads(2, rank, stage, prefetch, timeout=60) == expected


def test_stepping_between_forward_and_backward() -> None:
    def work(model: Odd) -> None:
        optimizer = adamw(model, fused=True)
        model(*data(0, 0)).backward()
        loss = model(*data(1, 0))
        optimizer.step()
        with pytest.raises(RuntimeError, match="changed between forward and backward|modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
        model(*data(1, 0)).backward()

    for stage in (0, 1, 3):
        alone(work, stage=stage)


def test_two_models() -> None:
    """Each has its own graph; one backward goes through both."""

    def rank(comm: Any, stage: int) -> Any:
        a, b = make(Plain), make(Plain, layers=2)
        dct.shard(a, stage, comm=comm)
        dct.shard(b, stage, comm=comm)
        x = torch.ones(2, 16) * (comm.rank + 1)
        for net in (a, b):
            net(x).backward()
        apart = [grads(a), grads(b)]
        a.zero_grad(), b.zero_grad()
        (a(x) + b(x)).backward()
        assert same(grads(a), apart[0]) and same(grads(b), apart[1])
        return bits({k: v for k, v in dct.full_state_dict(a).items()})

    for stage in (0, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_reentrant_checkpoint_and_functions() -> None:
    class Net(nn.Module):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.net, self.way = make(Plain), way
            self.own = nn.Parameter(torch.full((16,), 0.5))

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.net.layers[0](x) * self.own)  # reads a parameter without a forward of its owner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.way == "plain":
                x = self.part(x)
            else:
                x = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=self.way == "reentrant")
            for layer in self.net.layers[1:]:
                x = torch.tanh(layer(x))
            return x.square().sum()

    def rank(comm: Any, way: str, stage: int) -> Any:
        model = Net(way)
        dct.shard(model, stage, comm=comm)
        found = []
        for k in range(3):
            model(torch.ones(2, 16, requires_grad=True) * (comm.rank + 1 + k)).backward()
            found.append(grads(model))
            if k == 1:
                model.zero_grad()
        return [{name: bits({"": g}) for name, g in grad.items()} for grad in found]

    for stage in (0, 3):
        expected = libdc.run.threads(2, rank, "plain", stage, timeout=60)
        assert libdc.run.threads(2, rank, "not", stage, timeout=60) == expected
        assert libdc.run.threads(2, rank, "reentrant", stage, timeout=60) == expected


def test_modules_that_read_others_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.lstm = nn.LSTM(8, 8, batch_first=True)
            self.list = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.attention(x, x, x)[0]
            x = self.lstm(x)[0] * self.list[0] + self.list[1]
            return self.linear(x).square().sum()

    torch.manual_seed(0)
    plain = Net()
    plain(torch.ones(2, 3, 8)).backward()
    expected = grads(plain)

    def rank(comm: Any) -> None:
        model = copy.deepcopy(plain)
        model.zero_grad()
        dct.shard(model, 3, comm=comm)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 3, 8)).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.view(dct.full_shape(p)), expected[name], rtol=1e-4, atol=1e-6)

    on(1, rank)


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


@pytest.mark.parametrize("options", [{"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.float64},
                                     {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}])
def test_types(options: Any) -> None:
    class Cast(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(self.layers[0].weight.dtype)).float()

    def rank(comm: Any) -> Any:
        model = make(Cast)
        dct.shard(model, 3, comm=comm, group_size=1, **options)
        optimizer = adamw(model)
        losses = []
        for step in range(5):
            loss = model(torch.ones(2, 16) * (comm.rank + 1))
            loss.backward()
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for losses in on(2, rank):
        assert losses[-1] < losses[0]


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
