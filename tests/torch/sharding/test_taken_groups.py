"""Weights that are taken as a group when the first of them is read: the same values as when each is taken alone."""

from __future__ import annotations

import copy
from typing import Any, List

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from models import Plain, bits, make
from sharded import grads, on, one_thread  # noqa: F401
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Layers of which some run otherwise than the rest."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net, self.way = make(Plain, layers=5), way
        self.optimizer: Any = None  # steps inside the forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.net.layers
        if self.way == "inference":
            with torch.inference_mode():
                hidden = torch.tanh(layers[1](layers[0](x)))
            x = hidden.clone()
        elif self.way == "training, then inference":
            x = torch.tanh(layers[0](x))
            with torch.inference_mode():
                scale = layers[1](x).square().mean().item()
            x = x * scale
        elif self.way.startswith("checkpoint"):
            x = checkpoint(lambda y: torch.tanh(layers[1](layers[0](y))), x, use_reentrant=self.way.endswith("entrant"))
        elif self.way == "penalty":  # reads a weight in its own shape beside its use
            x = torch.tanh(layers[0](x)) + layers[0].weight.square().mean()
        elif self.way == "step":
            x = torch.tanh(layers[0](x))
            if self.optimizer is not None:
                self.optimizer.step()
        for layer in layers[2:]:
            x = torch.tanh(layer(x))
        return x.square().sum()


WAYS = ["inference", "training, then inference", "checkpoint", "checkpoint reentrant", "penalty", "step"]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_as_one_by_one(way: str) -> None:
    def rank(comm: Any, prefetch: int) -> List[Any]:
        model = Net(way)
        dct.shard(model, 3, comm=comm, prefetch=prefetch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        later = torch.optim.SGD(model.net.layers[3].parameters(), lr=0.1, momentum=0.9)
        found: List[Any] = []
        for step in range(4):
            x = torch.full((2, 16), comm.rank + 1.0 + step, requires_grad=True) * 1
            loss = model(x)
            assert dct.stats(model).gathered_bytes == 0
            loss.backward()
            assert dct.stats(model).gathered_bytes == 0
            found += [loss.item(), bits(grads(model))]
            optimizer.step()
            model.optimizer = later if step > 0 else None  # its gradients are the last step's
        return found

    expected = libdc.run.threads(2, rank, 0, timeout=60)
    assert libdc.run.threads(2, rank, 1, timeout=60) == expected


class MomentumEncoder(nn.Module):
    """As MoCo, BYOL and DINO: the forward moves the target's weights towards the trained ones, and uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = make(Plain), make(Plain)
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.online(x)
        with torch.no_grad():
            before = self.target.layers[0].weight.mean()
            for p, q in zip(self.target.parameters(), self.online.parameters()):
                p.lerp_(q, 0.5)
            goal = self.target(x)
        return found * goal + before


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_forward_sees_what_it_has_written_into_parameters(prefetch: int) -> None:
    """At stages 1 to 3 groups that were under way by then had the values from before: all, where one group has all."""

    def rank(comm: Any, stage: int) -> List[float]:
        model = dct.shard(MomentumEncoder(), stage, comm=comm, prefetch=prefetch, group_size=512)
        optimizer = torch.optim.SGD(model.online.parameters(), lr=0.5)
        losses = []
        for step in range(4):
            loss = model(torch.full((2, 16), 1.0 + comm.rank + step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = on(2, lambda comm: rank(comm, 0))
    for stage in (1, 2, 3):
        assert on(2, lambda comm: rank(comm, stage)) == expected


def test_a_forward_pre_hook_that_clips_weights() -> None:
    """At stages 1 and 2 weights that were whole already counted unclipped in this forward."""

    def clip(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            for p in module.parameters():
                p.clamp_(-0.01, 0.01)

    def rank(comm: Any, stage: int) -> float:
        model = dct.shard(make(Plain), stage, comm=comm)
        model(torch.ones(2, 16))
        model.register_forward_pre_hook(clip)
        return model(torch.ones(2, 16)).item()

    for stage in (1, 2, 3):
        assert on(2, lambda comm: rank(comm, stage)) == on(2, lambda comm: rank(comm, 0))


class Experts(nn.Module):
    """Ranks take different ones, whose frozen copies follow them."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        with torch.no_grad():
            for p, q in zip(self.target.parameters(), self.online.parameters()):
                p.lerp_(q, 0.5)
        return (self.online[chosen](x) * self.target[chosen](x)).sum()


def test_ranks_with_different_paths_stay_together_when_a_forward_writes() -> None:
    """A rank that gathered anew what another one passes over would wait for it."""
    made = Experts()

    def rank(comm: Any, stage: int) -> str:
        model = dct.shard(copy.deepcopy(made), stage, comm=comm, unused="zero")
        optimizer = torch.optim.SGD(model.online.parameters(), lr=0.1)
        for step in range(4):
            model(torch.ones(2, 4), (comm.rank + step // 2) % 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits(dct.full_state_dict(model))

    for stage in (1, 2, 3):
        assert len(set(on(2, lambda comm: rank(comm, stage)))) == 1
