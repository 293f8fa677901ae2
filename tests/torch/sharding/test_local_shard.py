"""PyTorch's functions on parts of parameters, gradients and states: the whole's results, or errors."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from libdc.torch.sharding.local_shard import LocalShard
from libdc.torch.sharding.parameter import entry_of
from sharded import on, one_thread  # noqa: F401

WORLDS = 1, 2, 3


def build(stage: int, comm: Any) -> nn.Module:
    model = plain()
    dct.shard(model, stage, comm=comm)
    return model


def plain() -> nn.Module:
    model = nn.Module()
    generator = torch.Generator().manual_seed(3)
    for name, shape in {"a": (5, 7), "b": (7,), "c": (), "d": (3, 4, 5)}.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
    return model


ELEMENTWISE: Dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arithmetic": lambda p: 2 * p - p / 3 + (1 - p) ** 2 % 5,
    "a whole operand": lambda p: p * torch.linspace(0, 1, p.numel()).view(p.shape) + torch.ones_like(p),
    "an operand that spreads": lambda p: p * torch.arange(float(p.shape[-1] if p.dim() else 1)),
    "an operand of one element": lambda p: p // 0.3 + (torch.ones((1,) * p.dim()).double() if p.dim() else 1),
    "in place": lambda p: p.detach().clone().mul_(3).add_(p, alpha=2).clamp_(min=-1),
    "where": lambda p: torch.where(p > 0, p, torch.zeros_like(p)),
    "other names": lambda p: torch.multiply(p.absolute(), p.conj()).type_as(torch.ones(9).double()).negative_(),
    "double": lambda p: p.double().sqrt().nan_to_num(),
    "written items": lambda p: written(p.detach().clone()),
    "lists": lambda p: torch._foreach_lerp([p], [p * 2], 0.25)[0],
    "lists with wholes": lambda p: copied(torch._foreach_mul([p.detach()], [torch.full(p.shape, 3.0)])[0]),
}
REDUCTIONS: Dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda p: p.sum(), "mean": lambda p: torch.mean(p), "norm": lambda p: p.norm(),
    "norm 3": lambda p: torch.linalg.vector_norm(p, 3), "largest": lambda p: p.abs().max(),
    "least": lambda p: torch.amin(p), "some": lambda p: (p > 0).any(), "all": lambda p: (p > -9).all(),
    "count": lambda p: torch.count_nonzero(p > 0), "equal": lambda p: torch.equal(p, p + 0),
    "finite": lambda p: torch.isfinite(p).all().item(), "close": lambda p: torch.allclose(p, p * (1 + 1e-7)),
    "norms": lambda p: torch.stack(torch._foreach_norm([p, torch.ones(3), p], 1)), "of any": torch.linalg.norm,
}  # fmt: skip


def copied(p: torch.Tensor) -> torch.Tensor:
    torch._foreach_copy_([p], [p + torch.linspace(0, 1, p.numel()).view(p.shape)])
    torch._foreach_add_([p], [torch.ones(p.shape)])
    return p


def written(p: torch.Tensor) -> torch.Tensor:
    if p.dim() > 1:
        p[1] = 4
        p[-1, 1:3].zero_()
        p[0].copy_(torch.arange(float(p[0].numel())).view(p.shape[1:]))
    return p


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", WORLDS)
def test_functions_give_the_wholes_results(world: int, stage: int) -> None:
    whole = dict(plain().named_parameters())

    def rank(comm: Any) -> None:
        for name, p in build(stage, comm).named_parameters():
            for case, function in ELEMENTWISE.items():
                if case == "an operand that spreads" and name == "c":
                    continue
                got, expected = function(p), function(whole[name])
                if name == "c" and type(got) is torch.Tensor:  # one element beside a tensor that is no part
                    torch.testing.assert_close(got, expected)
                    continue
                assert type(got) is LocalShard and got.shape == expected.shape and got.dtype == expected.dtype
                torch.testing.assert_close(got.full_tensor(), expected.detach(), msg=f"{case} {name}", equal_nan=True)
            for case, function in REDUCTIONS.items():
                torch.testing.assert_close(torch.as_tensor(function(p.detach())),
                                           torch.as_tensor(function(whole[name].detach())), msg=f"{case} {name}")
            assert p.numel() == len(p.flatten()) == whole[name].numel() and p.view(-1).dim() == 1
            other = torch.arange(p.numel())
            for got in (other[:p.size(-1) if p.dim() else 1].to(p), other.type_as(p), other.view_as(p)):
                assert type(got) is torch.Tensor and got.sum() == sum(range(got.numel()))

    on(world, rank)


def test_truth_values_are_gathered() -> None:
    def rank(comm: Any) -> None:
        model, whole = build(3, comm), plain().d
        assert torch.equal((model.d > 0).full_tensor(), whole > 0) and model.d.nbytes == whole.nbytes

    on(2, rank)


def test_lists_of_other_lengths_and_extremes_are_refused() -> None:
    """The rest of a list was dropped. An extreme was that of this rank's elements, padding too."""

    def rank(comm: Any) -> None:
        model = build(3, comm)
        parts = [p.detach() for p in model.parameters()]
        with pytest.raises(RuntimeError, match=r"_foreach_add_: lists of \[4, 2\] tensors, must have as many each"):
            torch._foreach_add_(parts, parts[:2])
        with pytest.raises(RuntimeError, match="_foreach_max: this is part . of 2 of a"):
            torch._foreach_max(parts)
        with pytest.raises(RuntimeError, match="_foreach_add_: this is part . of 2 of a"):
            torch._foreach_add_([torch.ones(5, 7)], parts[:1])
        assert all(torch.equal(p.full_tensor(), q) for p, q in zip(parts, plain().parameters()))

    on(2, rank)


def test_pieces() -> None:
    whole = plain()

    def rank(comm: Any) -> None:
        model = build(3, comm)
        rows = [float(row.sum()) for row in model.a.detach()]
        assert rows == pytest.approx([float(row.sum()) for row in whole.a.detach()], rel=1e-5)
        pieces: Any = [lambda p: p[2], lambda p: p[1:4], lambda p: p[0, 2:], lambda p: p.view(7, 5)[3],
                       lambda p: p.unsqueeze(0), lambda p: p.split(2)[1], lambda p: p[-1][-1]]
        for piece in pieces:
            got, expected = piece(model.a), piece(whole.a)
            assert got.shape == expected.shape and torch.equal(got.full_tensor(), expected)
        assert model.c.item() == whole.c.item() and float(model.a[1, 1]) == float(whole.a[1, 1])

    on(3, rank)


def test_rows_are_compared_alike_on_all_ranks() -> None:
    """Row i and row j have no elements on the third rank, which has to know that they differ elsewhere."""

    def rank(comm: Any) -> None:
        model = dct.shard(nn.Linear(4, 3, bias=False), 3, comm=comm)
        p, q = model.weight.detach(), model.weight.detach().clone()
        assert [torch.equal(p[i], q[j]) for i in range(3) for j in range(3)] == [i == j for i in range(3)
                                                                                   for j in range(3)]
        with pytest.raises(RuntimeError, match="do not have the same elements"):
            p[0] + q[1]

    on(3, rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_narrow_types_do_not_overflow(dtype: torch.dtype) -> None:
    """PyTorch adds them in float32, and so only the result can."""
    whole = torch.full((200, 200), 2.0, dtype=dtype)

    def rank(comm: Any) -> None:
        model = dct.shard(nn.Linear(200, 200, bias=False, dtype=dtype), 3, comm=comm)
        part = model.weight.detach().copy_(whole)
        for function in (torch.norm, torch.linalg.vector_norm, torch.mean, lambda p: p.norm(1),
                         lambda p: p.sum(dtype=torch.float32), lambda p: (p - 2).sum()):
            got, expected = function(part), function(whole)
            assert got.dtype == expected.dtype and torch.equal(got, expected), (got, expected)

    on(2, rank)


def test_penalties_count_once() -> None:
    """A loss of whole norms; each rank's part gets its gradient."""
    whole = plain()
    expected = sum(p.square().sum() + p.norm() for p in whole.parameters())
    expected.backward()

    def rank(comm: Any, stage: int) -> None:
        model = build(stage, comm)
        loss = sum(p.square().sum() + p.norm() for p in model.parameters())
        torch.testing.assert_close(loss, expected)
        loss.backward()
        for p, q in zip(model.parameters(), whole.parameters()):
            torch.testing.assert_close(p.grad.full_tensor() if stage else p.grad, q.grad)

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


PENALTIES: Dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "variance": lambda p, a: (p - p.mean()).square().sum(),
    "direction": lambda p, a: (p / p.norm()).pow(3).sum(),
    "nested": lambda p, a: ((p * (p - p.mean()).square().mean()).mean() - p).exp().mean(),
    "a whole operand": lambda p, a: (p * a.exp()).square().sum(),
    "a row for all rows": lambda p, a: (p * a[0]).square().sum(),
    "a number": lambda p, a: (p * a[0, 0] + a[1, :1]).square().sum(),
    "a row": lambda p, a: (p[0] * a[0]).square().sum() + p[1].norm() * a[1, 1],
    "lists": lambda p, a: torch._foreach_mul([p], [a])[0].pow(3).sum(),
}  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_through_values_of_all_ranks(world: int) -> None:
    """A sum that goes back into a part, or a tensor beside it: each rank's elements have a share of its gradient."""
    generator = torch.Generator().manual_seed(8)
    weight, operand = torch.rand(2, 5, 4, generator=generator)

    def leaves() -> Any:
        model = nn.Linear(4, 5, bias=False)
        with torch.no_grad():
            model.weight.copy_(weight)
        return model, operand.clone().requires_grad_()

    def rank(comm: Any, stage: int) -> None:
        for name, penalty in PENALTIES.items():
            plain, a = leaves()
            penalty(plain.weight, a).backward()
            model, b = leaves()
            dct.shard(model, stage, comm=comm)
            ((comm.rank + 1) * penalty(model.weight, b)).backward()
            factor = (comm.size + 1) / 2  # the mean of the ranks'
            torch.testing.assert_close(model.weight.grad.full_tensor(), factor * plain.weight.grad, msg=name)
            if a.grad is not None:
                direct = 0.0 if name != "a row" else (comm.rank + 1 - factor) * plain.weight[1].norm().item()
                b.grad[1, 1] -= direct  # a use beside no part is this rank's own
                torch.testing.assert_close(b.grad, factor * a.grad, msg=name)

    for stage in (1, 3):
        on(world, lambda comm: rank(comm, stage))


@pytest.mark.parametrize("mesh", [None, (2, 2), (4, 1)])
def test_penalties_of_ranks_are_averaged(mesh: Any) -> None:
    """As at stage 0, and in replicas too."""

    def rank(comm: Any, stage: int) -> None:
        model = dct.shard(nn.Linear(2, 2, bias=False), stage, comm=comm, mesh=mesh if stage else None)
        for _ in range(2):
            (model(torch.zeros(1, 2)).sum() + (comm.rank + 1) * model.weight.sum()).backward()
        grad = model.weight.grad.full_tensor() if stage else model.weight.grad
        assert torch.equal(grad, torch.full((2, 2), 5.0))

    for stage in range(4):
        on(4, lambda comm: rank(comm, stage))


@pytest.mark.parametrize("order", [0.5, 1.0, 1.5, 2.0, 3.0])
def test_norms_of_zeros_have_no_gradient(order: float) -> None:
    def rank(comm: Any) -> None:
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.bias.zero_()
            model.weight.copy_(torch.tensor([[0.0, 0.0, 0.0], [0.5, -2.0, 3.0]]))
        plain = copy.deepcopy(model)
        dct.shard(model, 3, comm=comm)
        for each in (plain, model):
            (each.bias.norm(order) + each.weight.norm(order)).backward()
        for p, q in zip(plain.parameters(), model.parameters()):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)

    on(2, rank)


def test_gradients_are_parts() -> None:
    def rank(comm: Any) -> None:
        model = dct.shard(nn.Linear(4, 3), 3, comm=comm)
        model(torch.ones(2, 4)).sum().backward()
        weight = model.weight
        assert weight.grad.shape == (3, 4) and torch.equal(weight.grad.full_tensor(), torch.full((3, 4), 2.0))
        weight.grad = torch.arange(12.0).view(3, 4)  # whole: each rank takes its part
        assert torch.equal(weight.grad.full_tensor(), torch.arange(12.0).view(3, 4))
        torch.optim.SGD([weight], lr=1.0).step()
        model(torch.ones(2, 4)).sum().backward()
        assert torch.equal(weight.grad.full_tensor(), torch.arange(12.0).view(3, 4) + 2)
        weight.grad = None
        assert weight.grad is None

    on(2, rank)


def test_masked_gradients() -> None:
    """The last rank's part is padded, and results of parts and wholes are not."""
    mask = torch.tensor([[1.0, 0, 1, 0, 1, 1, 0]])

    def rank(comm: Any) -> None:
        model = dct.shard(nn.Linear(7, 1, bias=False), 3, comm=comm)
        before = model.weight.full_tensor()
        model(torch.ones(1, 7)).sum().backward()
        model.weight.grad = model.weight.grad * mask
        assert torch.equal(model.weight.grad.full_tensor(), mask)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        model(torch.ones(1, 7)).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), mask + 1)
        assert torch.equal(model.weight.full_tensor(), before - mask)

    on(2, rank)


def test_functions_that_need_the_whole() -> None:
    class Own(nn.Linear):
        def penalty(self) -> torch.Tensor:
            return (self.weight @ self.weight.t()).sum()

    def rank(comm: Any, stage: int) -> None:
        model = dct.shard(Own(4, 3), stage, comm=comm)
        calls: Any = {"matmul": lambda p: p @ torch.ones(4), "linear": lambda p: nn.functional.linear(torch.ones(4), p),
                      "sum": lambda p: p.sum(0), "__getitem__": lambda p: p[:, 1], "sort": lambda p: p.sort(),
                      "cat": lambda p: torch.cat([p, p]), "data_ptr": lambda p: p.data_ptr(),
                      "numpy": lambda p: p.detach().numpy(), "softmax": lambda p: p.softmax(0),
                      "norm of order": lambda p: torch.linalg.norm(p, 2), "transpose": lambda p: p.transpose(0, 1)}
        for name, call in calls.items():
            for value in (model.weight, model.weight.detach() * 1):
                with pytest.raises(RuntimeError, match=name):
                    call(value)
        with pytest.raises(RuntimeError, match="t: this is part . of 2 of weight .3, 4., and the function needs the"):
            model.penalty()
        with dct.gathered(model):
            model.penalty()
        with pytest.raises(RuntimeError, match="a tensor of shape .5,. does not go with part"):
            model.weight.detach().add_(torch.ones(5))
        with pytest.raises(RuntimeError, match="and part . of 2 of bias .3,. do not have the same elements"):
            model.weight.detach() + model.bias
        plain, part = torch.ones(3, 4), model.weight.detach()
        with pytest.raises(RuntimeError, match="copy_: this is part"):
            plain.copy_(part)
        with pytest.raises(RuntimeError, match="__setitem__: this is part"):
            plain[:] = part

    for stage in (1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_inside_a_forward() -> None:
    """named_parameters() and state_dict() there have parts, which say so."""

    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = dict(self.named_parameters())["weight"], self.state_dict()["weight"]
            with pytest.raises(RuntimeError, match="this is part . of 2 of weight"):
                x @ self.seen[0].t()
            return super().forward(x)

    def rank(comm: Any) -> None:
        model = dct.shard(Reads(4, 3), 3, comm=comm)
        model(torch.ones(2, 4))
        for value in model.seen:
            assert value.shape == (3, 4) and torch.equal(value.full_tensor(), model.weight.full_tensor())

    on(2, rank)


def test_parts_of_a_model_that_is_gone() -> None:
    def rank(comm: Any) -> None:
        model = build(3, comm)
        state = copy.deepcopy(model.state_dict())
        del model
        assert state["a"].mul_(2).shape == (5, 7)
        with pytest.raises(RuntimeError, match="full_tensor: the sharded model that part . of 2 of a .5, 7. belongs"):
            state["a"].full_tensor()
        other = build(3, comm)
        other.load_state_dict(state)
        torch.testing.assert_close(other.a.full_tensor(), 2 * plain().a.detach())

    on(2, rank)


def test_writes_that_pytorch_does_not_count() -> None:
    """As docs/torch-parameters.md says."""

    def rank(comm: Any, stage: int) -> None:
        model = dct.shard(nn.Linear(4, 3, bias=False), stage, comm=comm)
        for value in (1, 2):
            model.weight.to_local().numpy()[:] = value
            torch.autograd.graph.increment_version(model.weight.to_local())
            assert torch.equal(model(torch.ones(4)), torch.full((3,), 4.0 * value))

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_assigned_states_are_copied() -> None:
    def rank(comm: Any, stage: int) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        given = {name: torch.full_like(value, 2) for name, value in copy.deepcopy(model).state_dict().items()}
        dct.shard(model, stage, comm=comm)
        before = [entry_of(p).data.data_ptr() for p in model.parameters()]
        model.load_state_dict(given, assign=True)
        assert [entry_of(p).data.data_ptr() for p in model.parameters()] == before
        assert model[1].running_mean is given["1.running_mean"]
        assert all(torch.equal(value, given[name]) for name, value in dct.full_state_dict(model).items())

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)
