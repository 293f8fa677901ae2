"""Copies of sharded models: copy.deepcopy(), and averages of weights by PyTorch's AveragedModel."""

from __future__ import annotations

import copy
import threading
from typing import Any, List

import libdc.run
import libdc.torch as dct
import pytest
import torch
from libdc.torch.sharding.model import root_of
from models import bits, data, make, trainable
from sharded import on, one_thread, sharded  # noqa: F401
from torch import fx, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averaged(net: torch.nn.Module) -> AveragedModel:
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(trainable(net), lr=0.1)
    for step in range(3):
        net(*data(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
    return average


@pytest.mark.parametrize("world", [1, 2, 3])
def test_averaged_models(world: int) -> None:
    expected = averaged(make())

    def rank(comm: Any, stage: int) -> None:
        average = averaged(sharded(comm, stage))
        for name, value in dct.full_state_dict(average.module).items():
            torch.testing.assert_close(value, expected.module.state_dict()[name])
        torch.testing.assert_close(average(*data(5, 0)), expected(*data(5, 0)))

    for stage in (0, 1, 3):
        libdc.run.threads(world, rank, stage, timeout=60)


def test_a_copy_is_a_model_of_its_own() -> None:
    def rank(comm: Any, stage: int) -> None:
        net = sharded(comm, stage)
        net.register_forward_hook(lambda module, args, result: seen.append(module))
        seen: Any = []
        before = bits(dct.full_state_dict(net))
        other = copy.deepcopy(net)
        assert bits(dct.full_state_dict(other)) == before and type(other) is type(net)
        assert other.head.weight is other.emb.weight and not other.frozen.weight.requires_grad
        assert [name for name, _ in other.named_parameters()] == [name for name, _ in net.named_parameters()]
        other(*data(1, comm.rank)).backward()
        assert seen == [other]
        torch.optim.SGD(trainable(other), lr=1.0).step()
        assert bits(dct.full_state_dict(net)) == before != bits(dct.full_state_dict(other))
        assert net.norm.weight.grad is None
        del net
        other(*data(1, comm.rank)).backward()

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_copy_in_gathered_has_what_was_written(stage: int) -> None:
    """At stages 1 to 3 it had the old values, and at stage 0 each rank its own."""

    def rank(comm: Any) -> None:
        net = sharded(comm, stage)
        with dct.gathered(net):
            weight = net.norm.weight  # to read it at stages 1 to 3 is collective
            if comm.rank == 0:
                with torch.no_grad():
                    weight.mul_(2)
            other = copy.deepcopy(net)
        assert bits(dct.full_state_dict(other)) == bits(dct.full_state_dict(net))
        assert len(set(comm_bits(comm, other))) == 1

    def comm_bits(comm: Any, model: torch.nn.Module) -> List[str]:
        mine = bits(dict(model.named_parameters())) if stage == 0 else bits(dct.full_state_dict(model))
        return [text.decode() for text in root_of("test", model).group.all_gather_bytes(mine.encode())]

    on(2, rank)


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_are_copied_before_their_model(stage: int) -> None:
    """The copied optimizer stepped parameters of no model, and the copied model stayed as it was."""

    def rank(comm: Any) -> None:
        net = sharded(comm, stage)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="was copied before its sharded model"):
            copy.deepcopy((optimizer, net))
        other, stepping = copy.deepcopy((net, optimizer))
        assert [id(p) for p in stepping.param_groups[0]["params"]] == [id(p) for p in other.parameters()]

    on(2, rank)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("is_root", [False, True])
def test_copies_of_traced_modules(stage: int, is_root: bool) -> None:
    """Each has a class of its own, with its forward, which its own __deepcopy__() makes. The copy had none."""

    traced = [fx.symbolic_trace(Scaled()) for _ in range(2)]

    def rank(comm: Any) -> None:
        own = traced[comm.rank]
        net = dct.shard(own if is_root else nn.Sequential(own), stage, comm=comm)
        other, x = copy.deepcopy(net), torch.ones(1, 3)
        other(x).sum().backward()
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        assert net(x).tolist() == [[1, 1, 1]] and other(x).tolist() == [[0, 0, 0]]

    on(2, rank)


class Attached(nn.Linear):
    """Leaves out of copies what it cannot copy, as a LightningModule does with its trainer."""

    def __getstate__(self) -> Any:
        return {**self.__dict__, "trainer": None}


@pytest.mark.parametrize("is_root", [False, True])
def test_copies_leave_out_what_a_module_says(is_root: bool) -> None:
    def rank(comm: Any) -> None:
        own = Attached(2, 2)
        own.trainer = threading.Lock()
        net = dct.shard(own if is_root else nn.Sequential(own), 3, comm=comm)
        other, x = copy.deepcopy(net), torch.ones(1, 2)
        assert torch.equal(other(x), net(x)) and own.trainer is not None
        assert (other if is_root else other[0]).trainer is None

    on(2, rank)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_copies_of_parametrized_modules(stage: int) -> None:
    """Their classes have a __deepcopy__() of their own."""

    def rank(comm: Any) -> None:
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        parametrize.register_parametrization(net[0], "weight", Symmetric())
        dct.shard(net, stage, comm=comm)
        other, x = copy.deepcopy(net), torch.ones(1, 3)
        assert torch.equal(other(x), net(x)) and parametrize.is_parametrized(other[0], "weight")
        other(x).sum().backward()
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        assert not torch.equal(other(x), net(x)) and all(p.grad is None for p in net.parameters())
        with pytest.raises(TypeError, match="copied only as a whole"):
            copy.deepcopy(net[0])

    on(2, rank)
