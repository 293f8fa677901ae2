"""Parameters and modules that come to a sharded model later."""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Tuple

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from models import Odd, bits, data, make
from sharded import on, one_thread, sharded  # noqa: F401


class LowRank(nn.Module):
    """A linear layer with an adapter, as peft puts it around one that is there."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.ones(2, base.in_features) / 8)
        self.up = nn.Parameter(torch.ones(base.out_features, 2) / 16)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.down.T @ self.up.T)


def _adapt(model: Odd) -> None:
    """New modules around known ones, and a new parameter of a known module."""
    for block in model.blocks:
        block.up = LowRank(block.up)
    model.frozen.register_parameter("extra", nn.Parameter(torch.full((13,), 0.1)))
    model.frozen.register_forward_hook(lambda module, args, output: output * (1 + module.extra))


def _train(model: Odd, steps: int, world: int, rank: int, optimizer: Any) -> List[float]:
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for each in range(world):
            if rank < 0 or each == rank:
                loss = model(*data(step, each))
                (loss / world if rank < 0 else loss).backward()
                total += loss.detach()
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _optimizer(model: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("options", [{}, {"unused": "zero"}])
def test_new_parameters_join_at_the_next_shard(options: Dict[str, Any]) -> None:
    def alone() -> Tuple[List[float], Dict[str, torch.Tensor]]:
        model = make()
        first = _train(model, 2, 2, -1, _optimizer(model))
        _adapt(model)
        return first + _train(model, 3, 2, -1, _optimizer(model)), model.state_dict()

    def rank(comm: Any, stage: int) -> Any:
        model = sharded(comm, stage, **options)
        before = _train(model, 2, 2, comm.rank, _optimizer(model))
        _adapt(model)
        with torch.no_grad():
            if comm.rank == 1:
                model.blocks[0].up.down.fill_(9)  # rank 0's values count
                model.blocks[1].up.scale.fill_(9)
        with pytest.raises(RuntimeError, match="up.down of Block has come after shard.., so no rank averages its grad"):
            model(*data(0, 0))
        with pytest.raises(ValueError, match="shard: bucket_size = 7, but the model is sharded with 1048576 already"):
            dct.shard(model, stage, comm=comm, group_size=300, bucket_size=7, **options)
        dct.shard(model, stage, comm=comm, group_size=300, **options)
        after = _train(model, 3, 2, comm.rank, _optimizer(model))
        again = copy.deepcopy(model)
        assert again(*data(0, 0)).item() == model(*data(0, 0)).item()
        dct.shard(model, stage, comm=comm, group_size=300, **options)  # nothing is new
        assert again(*data(0, 0)).item() == model(*data(0, 0)).item()
        return before + after, dct.full_state_dict(model)

    losses, weights = alone()
    for stage in (0, 1, 3):
        ranks = libdc.run.threads(2, rank, stage, timeout=60)
        torch.testing.assert_close(torch.tensor([a + b for a, b in zip(ranks[0][0], ranks[1][0])]),
                                   torch.tensor(losses), rtol=1e-4, atol=1e-5)
        assert ranks[0][1].keys() == weights.keys() and bits(ranks[0][1]) == bits(ranks[1][1])
        for name, value in weights.items():
            torch.testing.assert_close(ranks[0][1][name], value, rtol=1e-3, atol=1e-4)


def test_new_parameters_that_ranks_do_not_share() -> None:
    def rank(comm: Any) -> None:
        model = sharded(comm)
        model.extra = nn.Linear(2, 2 + comm.rank)
        with pytest.raises(ValueError, match="extra.weight of shape .2, 2. and type float32, rank 1 has .*extra.w"):
            dct.shard(model, comm=comm, group_size=300)
        del model.extra
        model(*data(0, comm.rank)).backward()  # as if it had never been there
        model.extra = nn.Linear(2, 2, device="meta")
        with pytest.raises(ValueError, match="shard: extra.weight is on meta: a parameter that joins"):
            dct.shard(model, comm=comm, group_size=300)

    on(2, rank)


def test_new_parameters_of_which_no_hook_tells() -> None:
    """insert() of a list, and to_empty(), which puts others in the place of those on meta."""

    def rank(comm: Any, stage: int) -> None:
        model, text = sharded(comm, stage), "has come after shard.., so no rank averages its gradient yet"
        model.blocks.insert(1, nn.Linear(13, 13))
        with pytest.raises(RuntimeError, match="1.weight of ModuleList " + text):
            model(*data(0, comm.rank))
        dct.shard(model, stage, comm=comm, group_size=300)
        model(*data(0, comm.rank)).backward()
        model.extra = nn.Linear(2, 2, device="meta")
        model.extra.to_empty(device="cpu")
        with pytest.raises(RuntimeError, match="extra.weight " + text):
            model(*data(0, comm.rank))
        layers = dct.shard(nn.Sequential(nn.Linear(2, 2)), stage, comm=comm)
        layers.insert(0, nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="0.weight of Sequential " + text):
            layers(torch.ones(1, 2))

    for stage in (0, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_a_new_parameter_where_an_ignored_one_was() -> None:
    """In memory: a number by which the old one was known is its place."""

    def rank(comm: Any, stage: int) -> None:
        model = sharded(comm, stage, policy={"scale": dct.Policy(ignored=True)})
        model.again = model.scale
        model(*data(0, 0))
        values = [torch.zeros(()) for _ in range(1000)]
        place = id(model.scale)
        del model.again, model.scale
        made = [nn.Parameter(value) for value in values]
        model.scale = next(p for p in made if id(p) == place)
        with pytest.raises(RuntimeError, match="scale of Odd has come after shard"):
            model(*data(0, 0))

    for stage in (0, 1, 3):
        libdc.run.threads(1, rank, stage, timeout=60)


def test_known_parameters_stay() -> None:
    def rank(comm: Any) -> None:
        model = sharded(comm)
        before = bits(dct.full_state_dict(model))
        taken = "would take the place of a sharded parameter: replace parameters before libdc.torch.shard()"
        with pytest.raises(ValueError, match="head of Odd " + taken):
            model.head = nn.Linear(13, 37, bias=False)
        with pytest.raises(ValueError, match="weight of LayerNorm " + taken):
            model.norm.weight = nn.Parameter(torch.zeros(13))
        with pytest.raises(RuntimeError, match="emb.weight is torch.float32 in a sharded model, which load_state_dict"):
            model.load_state_dict(make().double().state_dict(), assign=True)
        with pytest.raises(ValueError, match="another name or place of the sharded parameter norm.weight: tie"):
            model.norm.bias = model.norm.weight
        with pytest.raises(RuntimeError, match="weight of .*Linear was taken away from a sharded model: tie, move and"):
            nn.utils.parametrize.register_parametrization(model.frozen, "weight", nn.Identity())
        with pytest.raises(RuntimeError, match="the memory of a sharded model's parameter cannot be replaced"):
            model.norm.weight.data = torch.zeros(7)
        model = sharded(comm)
        model.extra = nn.Sequential(nn.Tanh())  # without parameters
        model.head.weight = model.emb.weight  # tied already
        model.blocks[0] = nn.Sequential(model.blocks[0])  # the same parameters
        model(*data(0, comm.rank)).backward()
        assert bits(dct.full_state_dict(sharded(comm))) == before
        nn.Sequential(model).append(nn.Linear(2, 2))  # around it
        weight = model.head._parameters["weight"]
        model.head._parameters["weight"] = nn.Parameter(torch.zeros(37, 13))  # without a hook
        for forward in (lambda: model(*data(0, comm.rank)), lambda: model.head(torch.ones(1, 13))):
            with pytest.raises(RuntimeError, match="emb.weight is not the parameter that shard.. found, but another"):
                forward()
        other = {"head.weight": nn.Parameter(torch.zeros(37, 13))}
        model.head._parameters["weight"] = weight
        assert torch.func.functional_call(model, other, data(0, comm.rank), tie_weights=False).isfinite()

    on(2, rank)
