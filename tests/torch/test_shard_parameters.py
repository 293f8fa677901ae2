"""What users do to the parameters of sharded models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from models import Odd, bits, data, make
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
        with pytest.raises(ValueError, match="prefetch = -1, must be an integer >= 0"):
            dct.shard(make(), 3, comm=comm, prefetch=-1)
        for wrong in (None, torch.zeros(3)):
            with pytest.raises(TypeError, match="model is a .*, must be a torch.nn.Module"):
                dct.shard(wrong, 3, comm=comm)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="model is a .*, must be a torch.nn.Module"):
                dct.full_state_dict(wrong)  # type: ignore[arg-type]
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
