"""PyTorch's own functions on sharded models: each is right, or says what to do instead."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from typing import Any, Callable, Dict, List

import libdc.optim
import libdc.run
import libdc.torch as dct
import pytest
import safetensors.torch
import torch
import torch.nn as nn
from libdc.torch.sharding.parameter import entry_of
from libdc.torch.sharding.part import plain_tensor
from models import bits, data, make, trainable
from sharded import on, one_thread, sharded  # noqa: F401

# Clipping


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", [2.0, 1.0, math.inf])
def test_torchs_clipping_is_over_all_ranks(stage: int, kind: float) -> None:
    plain = make()
    (sum(plain(*data(0, rank)) for rank in range(2)) / 2).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, kind)

    def rank(comm: Any) -> Any:
        net = sharded(comm, stage)
        net(*data(0, comm.rank)).backward()
        whole = torch.nn.utils.get_total_norm([p.grad for p in trainable(net)], kind)
        for p in trainable(net)[:3]:
            p.grad = p.grad * 1  # tensors of the user's own
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, kind)
        again = torch.nn.utils.clip_grad_norm_(trainable(net), math.inf, kind)
        torch.nn.utils.clip_grad_value_(net.parameters(), 1e-3)
        return whole, norm, again, max(float(p.grad.abs().max()) for p in trainable(net))

    for whole, norm, again, largest in on(2, rank):
        torch.testing.assert_close(whole, expected)
        torch.testing.assert_close(norm, expected)
        assert abs(float(again) - 0.1) < 1e-4 and largest <= 1.001e-3


def test_torchs_clipping_of_anything_else() -> None:
    plain = make()
    plain(*data(0, 0)).backward()
    grads = [p.grad.clone() for p in trainable(plain)]
    norm = torch.nn.utils.clip_grad_norm_((p for p in plain.parameters()), 0.5)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in grads]).norm())
    with pytest.warns(UserWarning, match="empty generator"):
        torch.nn.utils.clip_grad_norm_((p for p in ()), 0.5)

    def rank(comm: Any) -> None:
        net = sharded(comm)
        assert float(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)) == 0  # no gradients yet
        net(*data(0, 0)).backward()
        if comm.rank == 1:
            net.norm.weight.grad.fill_(math.inf)
        with pytest.raises(RuntimeError, match="is non-finite"):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)

    on(2, rank)


# Initialisation

FILLS: Dict[str, Callable[[nn.Module], Any]] = {
    "normal_": lambda net: nn.init.normal_(net[0].weight, 1.0, 0.2),
    "uniform_": lambda net: nn.init.uniform_(net[0].bias, -2, 3),
    "trunc_normal_": lambda net: nn.init.trunc_normal_(net[0].weight, std=0.5, a=-0.7, b=0.6),
    "trunc_normal_far": lambda net: nn.init.trunc_normal_(net[0].weight, std=1.0, a=1.5, b=2.0),
    "kaiming_uniform_": lambda net: nn.init.kaiming_uniform_(net[0].weight, a=math.sqrt(5)),
    "xavier_normal_": lambda net: nn.init.xavier_normal_(net[1].weight),
    "orthogonal_": lambda net: nn.init.orthogonal_(net[0].weight),
    "eye_": lambda net: nn.init.eye_(net[0].weight),
    "dirac_": lambda net: nn.init.dirac_(net[1].weight),
    "sparse_": lambda net: nn.init.sparse_(net[0].weight, 0.3),
    "ones_": lambda net: nn.init.ones_(net[1].weight),
    "reset_parameters": lambda net: [layer.reset_parameters() for layer in net],
    "method": lambda net: net[0].weight.normal_(),
    "data": lambda net: net[0].weight.data.normal_(0.0, 0.02),
    "exponential_": lambda net: net[1].bias.exponential_(),
}


def test_initialising_after_shard(launch: Any) -> None:
    """The numbers of the unsharded model on rank 0, on all ranks, whatever the others' generators. In processes, since
    threads share a generator."""
    text = """
import torch, libdc.torch as dct
from test_torch_functions import FILLS
comm = dct.init()
def build():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Conv1d(7, 3, 3))
def check(fill, stage, plain):
    net = build()
    dct.shard(net, stage)
    net(torch.ones(4, 7, 5)).sum().backward()  # gathers the old weights
    torch.manual_seed(7 + comm.rank)
    with torch.no_grad():
        FILLS[fill](net)
    for name, weights in dct.full_state_dict(net).items():
        assert torch.equal(weights, plain.state_dict()[name]), (fill, stage, name)
    torch.testing.assert_close(net(torch.ones(4, 7, 5)), plain(torch.ones(4, 7, 5)))
for fill in FILLS:
    plain = build()
    torch.manual_seed(7)
    with torch.no_grad():
        FILLS[fill](plain)
    for stage in (1, 3) if fill == "data" else (0, 1, 3):  # at stage 0 data is a plain tensor
        check(fill, stage, plain)
print("same")
"""
    assert launch(text).count("same") == 2


# Optimizers


def test_optimizers_that_need_whole_parameters_are_refused() -> None:
    def rank(comm: Any, stage: int) -> None:
        net = sharded(comm, stage)
        matrices = [p for p in trainable(net) if p.dim() == 2]
        assert len(matrices) == len([p for p in trainable(make()) if p.dim() == 2])
        makers = [lambda: torch.optim.Adafactor(net.parameters()), lambda: torch.optim.LBFGS(net.parameters()),
                  lambda: torch.optim.Muon(matrices)]
        for maker in makers:
            if stage == 0:
                maker()
                continue
            with pytest.raises(ValueError, match="is sharded, so the optimizer has a part.*libdc.optim"):
                maker()
        late = make()
        optimizer = torch.optim.Adafactor(late.parameters())
        dct.shard(late, stage, comm=comm)
        late(*data(0, 0)).backward()
        if stage > 0:
            with pytest.raises(ValueError, match="Adafactor: .* is sharded"):
                optimizer.step()

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


class Lamb(torch.optim.Optimizer):
    """Norms of whole parameters, as users' own optimizers have them."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                ratio = p.norm() / state["mean"].norm().clamp(min=1e-6) if p.ndim > 1 else 1.0
                p.sub_(state["mean"] * ratio, alpha=group["lr"])


class Transposing(Lamb):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.t() if p.ndim == 2 else p.grad)


def test_optimizers_of_users_own() -> None:
    """They are right if they work element by element and with norms and sums; else a function says so."""
    plain = make()
    optimizer = Lamb(trainable(plain))
    for step in range(3):
        plain(*data(step, 0)).backward()
        optimizer.step()
        plain.zero_grad()

    def rank(comm: Any, stage: int) -> None:
        net = sharded(comm, stage)
        own = Lamb(trainable(net))
        for step in range(3):
            net(*data(step, 0)).backward()
            if step == 2:  # another one goes on from its state
                own, before = Lamb(trainable(net)), own
                own.load_state_dict(copy.deepcopy(before.state_dict()))
            own.step()
            net.zero_grad()
        for name, weights in dct.full_state_dict(net).items():
            torch.testing.assert_close(weights, plain.state_dict()[name], rtol=1e-4, atol=1e-6)
        net(*data(0, 0)).backward()
        if stage > 0:
            with pytest.raises(RuntimeError, match="t: this is part . of 2 of emb.weight .37, 13., and the"):
                Transposing(trainable(net)).step()

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_a_whole_optimizer_state_is_taken_apart() -> None:
    plain = make()
    optimizer = torch.optim.AdamW(trainable(plain), lr=1e-2)
    plain(*data(0, 0)).backward()
    optimizer.step()

    def rank(comm: Any) -> None:
        net = sharded(comm)
        own = torch.optim.AdamW(trainable(net), lr=1e-2)
        own.load_state_dict(optimizer.state_dict())
        for p, q in zip(trainable(net), trainable(plain)):
            part = optimizer.state[q]["exp_avg"].reshape(-1)[slice(*entry_of(p).shard_range)]
            assert torch.equal(own.state[p]["exp_avg"][: part.numel()], part)

    on(2, rank)


def test_an_optimizer_of_libdc_is_made_after_shard() -> None:
    """Before, it knows lengths that the parameters no longer have."""

    def rank(comm: Any) -> None:
        net = make()
        optimizer = libdc.optim.AdamW(trainable(net))
        dct.shard(net, 3, comm=comm)
        net(*data(0, 0)).backward()
        with pytest.raises(RuntimeError, match="had 481 when the optimizer was made: make it after"):
            optimizer.step()

    on(2, rank)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, libdc.optim.AdamW, libdc.optim.Shampoo])
def test_states_of_optimizers_are_parts(kind: Any) -> None:
    def rank(comm: Any) -> None:
        net = sharded(comm)
        optimizer = kind(trainable(net), lr=1e-2)
        net(*data(0, comm.rank)).backward()
        optimizer.step()
        state = optimizer.state_dict()
        with pytest.raises(TypeError, match="is not the whole: save with libdc.torch.save_checkpoint"):
            torch.save(state, io.BytesIO())
        before = bits(dct.full_state_dict(net))
        again = kind(trainable(net), lr=1e-2)
        again.load_state_dict(copy.deepcopy(state))
        assert all(type(value) in (torch.Tensor, int) for values in again.state.values() for value in values.values())
        for k, other in enumerate((optimizer, again)):
            if k:
                with torch.no_grad():
                    dct.load_full_state_dict(net, whole)
                assert bits(dct.full_state_dict(net)) == before
            whole = dct.full_state_dict(net)
            net.zero_grad()
            net(*data(1, comm.rank)).backward()
            other.step()
            after = bits(dct.full_state_dict(net))
            assert k == 0 or after == first
            first = after

    on(2, rank)


# Wrappers of models


def test_wrappers_are_refused(launch: Any) -> None:
    text = """
import torch, torch.distributed as dist, libdc.torch as dct
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
def refused(function, text):
    try:
        function()
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
refused(lambda: dct.shard(DDP(torch.nn.Linear(4, 4))), "the model is a DistributedDataParallel, which averages")
refused(lambda: dct.shard(torch.nn.Sequential(DDP(torch.nn.Linear(4, 4)))), "0 is a DistributedDataParallel")
net = dct.shard(torch.nn.Linear(4, 4))
before = dct.full_state_dict(net)
refused(lambda: DDP(net), "DistributedDataParallel: the model is sharded by libdc.torch.shard()")
refused(lambda: torch.nn.DataParallel(torch.nn.Sequential(net)), "DataParallel: the model is sharded")
assert all(torch.equal(value, before[name]) for name, value in dct.full_state_dict(net).items())
mesh = dist.init_device_mesh("cpu", (2,))
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
parallel = parallelize_module(torch.nn.Linear(4, 4), mesh, ColwiseParallel())
refused(lambda: dct.shard(parallel, comm=mesh.get_group()), "weight is a DTensor, must be a plain torch.nn.Parameter")
from torch.distributed.fsdp import fully_shard
refused(lambda: dct.shard(fully_shard(torch.nn.Linear(4, 4), mesh=mesh)), "which averages gradients itself")
try:
    dct.shard(torch.nn.Linear(4, 4), comm=mesh)
except TypeError as error:
    assert "mesh.get_group()" in str(error)
print("refused")
dist.barrier()
dist.destroy_process_group()
"""
    assert launch(text).count("refused") == 2


# The old weight_norm, whose kernel trusts in shapes


def test_old_weight_norm() -> None:
    warnings.simplefilter("ignore", FutureWarning)

    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.utils.weight_norm(nn.Linear(4, 6))

    models = [[build() for _ in range(4)] for _ in range(3)]  # ranks that are threads share the generator
    x = torch.randn(2, 4)

    def rank(comm: Any, stage: int) -> None:
        net, plain = models[min(stage, 2)][2 * comm.rank : 2 * comm.rank + 2]
        dct.shard(net, stage, comm=comm)
        if stage > 0:
            with pytest.raises(RuntimeError, match="_weight_norm: this is part . of 2 of weight_v .6, 4., and the"):
                nn.utils.remove_weight_norm(net)
        for _ in range(2):
            assert torch.equal(net(x), plain(x))
            for model in (net, plain):
                model(x).sum().backward()
        for p, q in zip(net.parameters(), plain.parameters()):
            part = q.grad.reshape(-1).split(entry_of(p).shard_numel)
            local = plain_tensor(p.grad).view(-1)
            torch.testing.assert_close(local[: part[comm.rank].numel()] if stage else local,
                                       part[comm.rank] if stage else q.grad.view(-1))

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_torch_func_says_no() -> None:
    def rank(comm: Any) -> None:
        net = nn.Linear(4, 1)
        plain = copy.deepcopy(net)
        dct.shard(net, 3, comm=comm)
        x, tangent = torch.randn(2, 4), torch.randn(2, 4)
        with pytest.raises(RuntimeError, match="torch.func's transforms cannot go through a sharded model's weights"):
            torch.func.vmap(torch.func.grad(lambda row: net(row).sum()))(x)
        with torch.no_grad():
            got, expected = (torch.func.jvp(model, (x,), (tangent,)) for model in (net, plain))
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
            assert torch.equal(torch.func.vmap(net)(x), torch.func.vmap(plain)(x))

    on(1, rank)


def test_torch_func_inside_a_forward() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, before: bool) -> torch.Tensor:
            weight = self.weight if before else None
            return torch.func.grad(lambda row: (row * (weight if before else self.weight)).sum())(x)

    def rank(comm: Any) -> None:
        model = dct.shard(Inner(), 1, comm=comm)
        with pytest.raises(RuntimeError, match="weight: torch.func's transforms cannot .* read the weight before the"):
            model(torch.ones(3), False)
        model(torch.ones(3), True).sum().backward()
        assert model.weight.grad.tolist() == [1, 1, 1]

    on(1, rank)


def test_pickles_of_parameters_and_states() -> None:
    def rank(comm: Any) -> None:
        net = sharded(comm)
        weights: List[Any] = [net.emb.weight, net.emb.weight.detach(), net.emb.weight.data,
                              net.emb.weight.cpu().clone(), net.state_dict(),
                              {name: value * 0.5 for name, value in net.state_dict().items()}]
        for value in weights:
            with pytest.raises(TypeError, match=r"part \d of 2 of (emb.weight \(37, 13\)|scale \(\)) is not the whole"):
                pickle.dumps(value)
        for save in (safetensors.torch.save, lambda state: torch.save(state, io.BytesIO())):  # as peft does
            renamed = {f"base_model.{name}": value.contiguous() for name, value in net.state_dict().items()}
            with pytest.raises(TypeError, match=r"part \d of 2 of .* is not the whole: save with libdc"):
                save(renamed)
        torch.save([net.emb.weight.to_local(), dct.full_state_dict(net)], io.BytesIO())

    on(2, rank)
