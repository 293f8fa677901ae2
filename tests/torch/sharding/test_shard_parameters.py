"""Users' changes of the parameters of sharded models."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any, Dict

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from libdc.torch.sharding.parameter import entry_of
from libdc.torch.sharding.part import plain_tensor
from models import Odd, Plain, bits, data, make
from sharded import alone, on, one_thread, sharded  # noqa: F401


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
        assert {name: p.shape for name, p in after.items()} == shapes
        assert after["emb.weight"].to_local().shape == (-(-37 * 13 // comm.size),)
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


def test_around_several_models() -> None:
    def rank(comm: Any) -> None:
        both = nn.ModuleList([make(Plain, layers=2), make(Plain, layers=2)])
        for model in both:
            dct.shard(model, 3, comm=comm, check_finite=True, reduce_dtype=torch.float16)
        with dct.gathered(both):
            assert all(model.layers[0].weight.shape == (16, 16) for model in both)
        with dct.no_sync(both):
            for model in both:
                model(torch.ones(2, 16)).backward()
        assert all(p.grad is None for p in both.parameters())
        both[0](torch.ones(2, 16)).backward()
        both[1](torch.full((2, 16), float("nan"))).backward()
        assert dct.grads_finite(both[0]) and not dct.grads_finite(both)
        with pytest.raises(ValueError, match="no_sync: Linear is a module of a sharded model"):
            with dct.no_sync(both[0].layers[0]):
                pass

    on(2, rank)


def two(first: str, second: str, frozen: bool = False, buffer: int = 1) -> nn.Module:
    model = nn.Module()
    for name in (first, second):
        model.add_module(name, nn.Linear(3, 3, bias=False))
    model.get_submodule(first).requires_grad_(not frozen)
    model.register_buffer("steps", torch.zeros(buffer))
    return model


def test_ranks_that_differ_learn_it_alike() -> None:
    """Another order would exchange weights in silence, as the shapes are the same."""
    makers: Dict[str, Any] = {
        "where rank 0 has parameter 0, a.weight of shape (3, 3) and type float32, rank 1 has 0, b.weight":
            (lambda: two("a", "b"), lambda: two("b", "a")),
        "rank 1 has 0, a.weight of shape (3, 3) and type float32, frozen":
            (lambda: two("a", "b"), lambda: two("a", "b", frozen=True)),
        "and type float32, rank 1 has 0, a.weight of shape (3, 3) and type float64":
            (lambda: two("a", "b"), lambda: two("a", "b").double()),
        "where rank 0 has parameter 1, b.weight of shape (3, 3) and type float32, rank 1 has nothing":
            (lambda: two("a", "b"), lambda: two("a", "a")),
        "where rank 0 has buffer 0, steps of shape (1,) and type float32, rank 1 has 0, steps of shape (2,)":
            (lambda: two("a", "b"), lambda: two("a", "b", buffer=2)),
    }
    options: Dict[str, Any] = {"stage": (3, 1), "bucket_size": (8, 9), "prefetch": (1, 0), "group_size": (1, 2),
                               "reduce_dtype": (None, torch.bfloat16), "param_dtype": (None, torch.float16),
                               "broadcast": (True, False), "check_finite": (False, True)}

    def refused(comm: Any, make: Any, text: str, **given: Any) -> None:
        with pytest.raises(ValueError, match=f"shard: .*{re.escape(text)}.*: all ranks must shard the same model"):
            dct.shard(make(), comm=comm, **given)

    def rank(comm: Any) -> None:
        for text, models in makers.items():
            refused(comm, models[comm.rank], text)
        for name, values in options.items():
            refused(comm, make, f"{name} = {values[0]} on rank 0, but {values[1]} on rank 1",
                    **{name: values[comm.rank]})
        sharded(comm)

    on(2, rank)


def test_modules_that_write_or_are_sparse_are_refused() -> None:
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(ValueError, match="shard: 0 has max_norm = 1.0, with which each rank's forward writes"):
            dct.shard(nn.Sequential(kind(10, 4, max_norm=1.0)), 3)
        with pytest.raises(ValueError, match="shard: 0 has sparse = True, but gradients are averaged dense"):
            dct.shard(nn.Sequential(kind(10, 4, sparse=True)), 3)


def test_forward_keeps_its_signature() -> None:
    """Transformers' generate() makes a mask where forward has an argument for it, and its Trainer drops the columns
    that forward has no argument for."""

    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: Any = None, *, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale

    def signatures(model: nn.Module) -> Any:
        return [inspect.signature(module.forward) for module in model.modules()]

    plain = nn.Sequential(Masked(2, 2), nn.Linear(2, 2))
    plain[1].register_forward_hook(lambda module, args, result: None)
    expected = signatures(plain)
    dct.shard(plain, 3)
    assert signatures(plain) == expected and "mask" in expected[1].parameters


def test_a_class_may_get_another_forward() -> None:
    """As programs do that put faster kernels into a library's classes, also between two models."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    def sharded_layer(policy: Any = None) -> nn.Module:
        model = nn.Sequential(Layer(2, 2))
        nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
        nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
        return dct.shard(model, 3, policy=policy)

    models = [sharded_layer(), sharded_layer({"0": dct.Policy(output_dtype=torch.float64)})]
    for model in models:
        assert model(torch.ones(1, 2)).tolist() == [[2, 2]]
    Layer.forward = lambda self, x: 3 * nn.Linear.forward(self, x)  # type: ignore[method-assign]
    for model in (*models, sharded_layer()):
        assert model(torch.ones(1, 2)).tolist() == [[6, 6]]


def test_parts_know_the_whole() -> None:
    def rank(comm: Any, stage: int) -> None:
        model, whole = sharded(comm, stage), make()
        for name, p in whole.named_parameters():
            q = model.get_parameter(name)
            assert q.dim() == q.ndim == p.dim() and torch.equal(q.full_tensor(), p)
            assert q.to_local().data_ptr() == entry_of(q).data.data_ptr() and type(q.to_local()) is torch.Tensor
            assert q.shape == p.shape and q.numel() == p.numel() and q.size() == p.size() and q.stride() == p.stride()
        model(*data(0, 0)).backward()
        state = model.state_dict()
        average = {name: value.clone().lerp_(value * 3, 0.5) for name, value in state.items()}
        for name, value in average.items():
            full = value.full_tensor() if stage else value
            torch.testing.assert_close(full, 2 * whole.state_dict()[name])
        kept = copy.deepcopy(state)
        with torch.no_grad():
            for p in model.parameters():
                p.data.mul_(0.5)
        halved = copy.deepcopy(whole)
        for p in halved.parameters():
            p.data.mul_(0.5)
        assert model(*data(0, 0)).item() == halved(*data(0, 0)).item()  # writes into data are noticed
        model.load_state_dict(kept)
        assert model(*data(0, 0)).item() == whole(*data(0, 0)).item()
        model.load_state_dict(halved.state_dict())  # whole weights: each rank takes its part
        assert model(*data(0, 0)).item() == halved(*data(0, 0)).item()
        if stage > 0:
            assert "part " in repr(model.emb.weight) and f"{comm.rank} of 2 of emb.weight (37, 13)" in repr(state)
            copied = copy.deepcopy(model.emb.weight)
            assert copied.requires_grad and torch.equal(copied.full_tensor(), model.emb.weight.full_tensor())

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_functional_call() -> None:
    def work(model: Odd) -> None:
        other = {name: p.detach() * 0.5 for name, p in make().named_parameters()}  # tied ones once
        expected = torch.func.functional_call(make(), other, data(0, 0))
        assert torch.equal(torch.func.functional_call(model, other, data(0, 0)), expected)
        assert torch.equal(model(*data(0, 0)), make()(*data(0, 0)))

    alone(work)


def test_freezing_and_unfreezing() -> None:
    """Also by torch.Tensor's own method, which the parameter's class does not see."""

    def rank(comm: Any, stage: int, method: Any = None) -> Any:
        model = make()
        dct.shard(model, stage, comm=comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []

        def change(module: nn.Module, trained: bool) -> None:
            for p in module.parameters():
                method(p, trained) if method else p.requires_grad_(trained)

        for step in range(9):
            if step == 3:
                change(model.blocks[0].up, False)
            if step == 5:
                change(model.frozen, True)
                change(model.blocks[0].up, True)
            loss = model(*data(step, comm.rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, bits(dct.full_state_dict(model))

    expected = libdc.run.threads(2, rank, 0, timeout=60)
    for stage in (0, 1, 3):
        assert stage == 0 or libdc.run.threads(2, rank, stage, timeout=60) == expected
        assert libdc.run.threads(2, rank, stage, torch.Tensor.requires_grad_, timeout=60) == expected


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.complex64, torch.float8_e4m3fn])
def test_a_refused_type_leaves_the_model_whole(dtype: torch.dtype) -> None:
    def rank(comm: Any, stage: int) -> None:
        model = nn.Linear(3, 2)
        model.table = nn.Parameter(torch.ones(4).to(dtype), requires_grad=False)
        before = model.weight.detach().clone()
        with pytest.raises(ValueError, match=f"shard: table has type {dtype}, must be one of"):
            dct.shard(model, stage, comm=comm)
        assert torch.equal(model.weight, before)
        dct.shard(model, stage, comm=comm, policy={"table": dct.Policy(ignored=True)})
        model(torch.ones(1, 3)).sum().backward()

    for stage in (0, 3):
        on(2, lambda comm: rank(comm, stage))


def test_what_cannot_be_sharded_says_so() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match="stage = 4, must be 0, 1, 2, 3 or 'auto'"):
            dct.shard(make(), 4, comm=comm)
        with pytest.raises(ValueError, match="prefetch = -1, must be an integer >= 0"):
            dct.shard(make(), 3, comm=comm, prefetch=-1)
        for wrong in (None, torch.zeros(3)):
            with pytest.raises(TypeError, match="model is a .*, must be a torch.nn.Module"):
                dct.shard(wrong, 3, comm=comm)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="model is a .*, must be a torch.nn.Module"):
                dct.full_state_dict(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="comm = 'gloo', must be a libdc.Comm"):
            dct.shard(make(), 3, comm="gloo")
        with pytest.raises(ValueError, match="device = meta, must be the cpu or a cuda device"):
            dct.shard(nn.Linear(2, 2, device="meta"), 3, comm=comm, device="meta")
        with torch.inference_mode():
            inference = nn.Linear(2, 2)
            with pytest.raises(RuntimeError, match="shard: called in torch.inference_mode"):
                dct.shard(nn.Linear(2, 2), 3, comm=comm)
        with pytest.raises(ValueError, match="shard: weight was made in torch.inference_mode"):
            dct.shard(inference, 3, comm=comm)
        with pytest.raises(ValueError, match="is not initialised yet"):
            dct.shard(nn.LazyLinear(2), 3, comm=comm)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = nn.Parameter(model[0].weight.data)
        with pytest.raises(ValueError, match="1.weight shares memory with 0.weight"):
            dct.shard(model, 3, comm=comm)
        with pytest.raises(ValueError, match="0 is a RecursiveScriptModule of torch.jit"):
            dct.shard(nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2)), 3, comm=comm)
        model = sharded(comm)
        with pytest.raises(ValueError, match="group_size = 1048576, but the model is sharded with 300 already"):
            dct.shard(model, 3, comm=comm)
        with pytest.raises(ValueError, match="shard: the model is sharded already: shard.. takes a whole model"):
            dct.shard(model.head, 3, comm=comm)
        other = nn.Sequential(nn.Linear(13, 37, bias=False))
        other[0].weight = model.emb.weight
        for stage in (0, 3):
            with pytest.raises(ValueError, match="0.weight is emb.weight of a model that is sharded already"):
                dct.shard(other, stage, comm=comm)
        with pytest.raises(ValueError, match="not a sharded model"):
            dct.stats(nn.Linear(2, 2))
        for copier, value in ((pickle.dumps, model), (copy.deepcopy, model.norm)):
            with pytest.raises(TypeError, match="which cannot be pickled, and copied only as a whole"):
                copier(value)
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            model.to(torch.bfloat16)
        assert model.to("cpu").float() is model
        whole = sharded(comm, 0).scale  # at stage 0 a parameter is PyTorch's own
        for other in (pickle.loads(pickle.dumps(whole)), copy.deepcopy(whole)):
            assert isinstance(other, nn.Parameter) and entry_of(other) is None and torch.equal(other, whole)

    on(1, rank)


def test_another_module_of_a_sharded_ones_kind() -> None:
    model = dct.shard(nn.Sequential(nn.Linear(2, 3), nn.LSTM(3, 2)), 3)
    linear, lstm = type(model[0])(2, 3), type(model[1])(3, 2)
    whole = type(model)(linear, lstm)
    assert [type(each) for each in (whole, linear, lstm)] == [nn.Sequential, nn.Linear, nn.LSTM]
    whole(torch.ones(4, 2))[0].sum().backward()
    assert linear.weight.grad.shape == (3, 2) and copy.deepcopy(whole)(torch.ones(4, 2))[0].shape == (4, 2)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_only_cpu_has_numbers(stage: int) -> None:
    """The way of Trainers under a launcher: a copy onto the same device is no move, of weights, gradients or
    buffers."""

    def rank(comm: Any) -> Any:
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 2), nn.Linear(2, 2))
        torch.manual_seed(3)
        for param in model.parameters():
            nn.init.uniform_(param)
        dct.shard(model, stage, comm=comm)
        model(torch.eye(3)).sum().backward()
        tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
        before = [plain_tensor(tensor).data_ptr() for tensor in tensors]
        once = [p.grad.clone() for p in model.parameters()]
        assert model.to("cpu:0").to(torch.device("cpu", 1)).to("cpu:0", torch.float32) is model
        assert [plain_tensor(tensor).data_ptr() for tensor in tensors] == before
        assert [id(p.grad) for p in model.parameters()] == [id(g) for g in tensors[6:12]]
        model(torch.eye(3)).sum().backward()
        assert all(torch.equal(p.grad, 2 * grad) for p, grad in zip(model.parameters(), once))
        for change in (lambda tensor: tensor + 1, torch.Tensor.share_memory_):  # the second in place
            with pytest.raises(RuntimeError, match="cannot be moved or cast"):
                model._apply(change)
        assert [plain_tensor(tensor).data_ptr() for tensor in tensors] == before

    on(1, rank)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_memory_format_changes_nothing(stage: int) -> None:
    """Neither before shard() nor behind it: whole weights are contiguous, and inputs keep their format."""
    expected = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    models = [copy.deepcopy(expected).to(memory_format=torch.channels_last) for _ in range(2)]
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    expected(images).square().sum().backward()

    def rank(comm: Any) -> None:
        model = dct.shard(models[comm.rank], stage, comm=comm)
        for _ in range(2):  # without gradients, and with some
            assert model.to(memory_format=torch.channels_last) is model
            model.zero_grad(set_to_none=False)
            model(images).square().sum().backward()
        for param, other in zip(model.parameters(), expected.parameters()):
            grad = param.grad.full_tensor() if stage else param.grad
            torch.testing.assert_close(grad, other.grad, rtol=1e-4, atol=1e-4)
        if stage:
            with pytest.raises(RuntimeError, match="contiguous: this is part . of 2 of 0.weight"):
                model[0].weight.contiguous(memory_format=torch.channels_last)

    on(2, rank)
