"""The state of users' own optimizers is parts after a resume, too, so that its norms and sums are the whole's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List

import libdc.torch as dct
import pytest
import torch
from libdc import optim
from libdc.torch.frameworks.states import load_packed_optimizer
from libdc.torch.sharding.local_shard import LocalShard
from models import data, make, trainable
from sharded import on, sharded
from test_torch_functions import Lamb
from torch import nn


class OverSGD(torch.optim.SGD):
    """A step of its own in a class derived from PyTorch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["mean"] = torch.zeros_like(p)
            mean = self.state[p]["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
            p.sub_(mean, alpha=0.01 / (1 + float(mean.norm())))


def learn(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, rank: int) -> None:
    for step in range(first, last):
        net(*data(step, rank)).backward()
        optimizer.step()
        net.zero_grad()


def by_file(net: Any, own: Any, other: Any, fresh: Any, path: Path) -> None:
    dct.save_checkpoint(net, path, own)
    dct.load_checkpoint(other, path, fresh)


def whole(net: Any, own: Any, other: Any, fresh: Any, path: Path) -> None:
    dct.load_full_state_dict(other, dct.full_state_dict(net))
    dct.load_full_optimizer_state_dict(other, fresh, dct.full_optimizer_state_dict(net, own))


def packed(net: Any, own: Any, other: Any, fresh: Any, path: Path) -> None:
    """As frameworks resume a run without shard()."""
    dct.load_full_state_dict(other, dct.full_state_dict(net))
    state = dct.full_optimizer_state_dict(net, own)
    numbers: Dict[str, int] = {}
    for group in state["param_groups"]:
        group["params"] = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
    state["state"] = {numbers[name]: values for name, values in state["state"].items()}
    load_packed_optimizer(other, fresh, state)


@pytest.mark.parametrize("resume", [by_file, whole, packed])
@pytest.mark.parametrize("kind", [Lamb, OverSGD])
def test_norms_of_state_after_a_resume(kind: Callable[..., Any], resume: Callable[..., None], tmp_path: Path) -> None:
    def rank(comm: Any, stage: int, early: bool) -> None:
        """early: the optimizer is made before shard()."""
        net = sharded(comm, stage)
        own = kind(trainable(net))
        learn(net, own, 0, 3, comm.rank)
        other = make()
        fresh = kind(trainable(other)) if early else None
        dct.shard(other, stage, comm=comm, group_size=300)
        fresh = fresh or kind(trainable(other))
        resume(net, own, other, fresh, tmp_path / "a.safetensors")
        for p, q in zip(trainable(net), trainable(other)):
            mean = fresh.state[q]["mean"]
            assert isinstance(mean, LocalShard) == (stage > 0)
            assert torch.equal(mean.norm(), own.state[p]["mean"].norm())
        learn(net, own, 3, 6, comm.rank)
        learn(other, fresh, 3, 6, comm.rank)
        expected = dct.full_state_dict(net)
        for name, weights in dct.full_state_dict(other).items():
            assert torch.equal(weights, expected[name])

    for stage, early in ((3, False), (3, True), (1, False), (0, False)):
        on(2, lambda comm: rank(comm, stage, early))


@pytest.mark.parametrize("resume", [by_file, whole, packed])
def test_pytorchs_and_libdcs_own_have_plain_tensors(resume: Callable[..., None], tmp_path: Path) -> None:
    kinds: List[Callable[..., Any]] = [torch.optim.AdamW, optim.AdamW]

    def rank(comm: Any, kind: Callable[..., Any], early: bool) -> None:
        net = sharded(comm, 3)
        own = kind(trainable(net), lr=0.01)
        learn(net, own, 0, 2, comm.rank)
        other = make()
        fresh = kind(trainable(other), lr=0.01) if early else None
        dct.shard(other, 3, comm=comm, group_size=300)
        fresh = fresh or kind(trainable(other), lr=0.01)
        resume(net, own, other, fresh, tmp_path / "a.safetensors")
        assert all(type(value) is torch.Tensor for values in fresh.state.values() for value in values.values())
        learn(net, own, 2, 4, comm.rank)
        learn(other, fresh, 2, 4, comm.rank)
        expected = dct.full_state_dict(net)
        for name, weights in dct.full_state_dict(other).items():
            assert torch.equal(weights, expected[name])

    for kind, early in ((kinds[0], False), (kinds[0], True), (kinds[1], False)):
        on(2, lambda comm: rank(comm, kind, early))


def test_a_whole_state_is_taken_apart_by_an_optimizer_from_before_shard() -> None:
    plain = make()
    before = torch.optim.AdamW(trainable(plain), 0.01)
    learn(plain, before, 0, 1, 0)

    def rank(comm: Any) -> None:
        net = make()
        own = torch.optim.AdamW(trainable(net), 0.01)
        dct.shard(net, 3, comm=comm)
        own.load_state_dict(before.state_dict())
        assert own.state[net.emb.weight]["exp_avg"].shape == net.emb.weight.to_local().shape
        learn(net, own, 1, 2, comm.rank)

    on(2, rank)
