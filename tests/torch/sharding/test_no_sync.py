"""Sums of no_sync() when what follows is not the plain loop."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from sharded import one_thread, same  # noqa: F401
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


class Raising(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ValueError("in a backward")


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))


def times_one_batch(count: int) -> Dict[str, torch.Tensor]:
    model = two_layers()
    model(torch.ones(1, 2)).sum().backward()
    return {name: count * p.grad for name, p in model.named_parameters()}  # type: ignore[operator]


def after_no_sync(stage: int, size: int, between: Callable[[Any], Any], **options: Any) -> Dict[str, torch.Tensor]:
    """Gradients of a batch in no_sync() and one outside."""
    models = [two_layers() for _ in range(size)]

    def rank(comm: Any) -> Any:
        model = dct.shard(models[comm.rank], stage, comm=comm, **options)
        with dct.no_sync(model):
            model(torch.ones(1, 2)).sum().backward()
        between(model)
        model(torch.ones(1, 2)).sum().backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        return {name: grad.full_tensor() if stage else grad.clone() for name, grad in found.items()}

    return libdc.run.threads(size, rank, timeout=60)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("unused", [None, "zero"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_autograd_grad_keeps_the_sums(stage: int, unused: Optional[str]) -> None:
    """As for a penalty, or for an attack on inputs, between micro-batches."""

    def between(model: Any) -> None:
        called: List[Any] = []
        x = torch.ones(1, 2, requires_grad=True)
        model[0].weight.register_post_accumulate_grad_hook(called.append)
        (grad,) = torch.autograd.grad(model(x).sum(), x)
        model(x).sum().backward(inputs=[x])
        assert torch.equal(grad, x.grad)  # type: ignore[arg-type]
        assert not called and all(p.grad is None for p in model.parameters())

    for size in (1, 2):
        assert same(after_no_sync(stage, size, between, unused=unused), times_one_batch(2))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_get_optimizer_state_dict_keeps_the_sums(stage: int) -> None:
    def look(model: Any) -> None:
        get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))  # which has no state

    for size in (1, 2):
        assert same(after_no_sync(stage, size, look), times_one_batch(2))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_that_raises_leaves_the_sums_of_no_sync(stage: int) -> None:
    def skip_a_batch(model: Any) -> None:
        with pytest.raises(ValueError, match="in a backward"):
            model[1](Raising.apply(model[0](torch.ones(1, 2)))).sum().backward()

    for size in (1, 2):
        assert same(after_no_sync(stage, size, skip_a_batch), times_one_batch(2))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_set_to_none_drop_the_sums_of_no_sync(stage: int) -> None:
    def set_to_none(model: Any) -> None:
        for param in model.parameters():
            param.grad = None

    def raise_and_zero(model: Any) -> None:
        with pytest.raises(ValueError, match="in a backward"):
            model[1](Raising.apply(model[0](torch.ones(1, 2)))).sum().backward()
        model.zero_grad()

    for drop in (set_to_none, raise_and_zero):
        assert same(after_no_sync(stage, 2, drop), times_one_batch(1))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sums_that_were_averaged_before_the_backward_raised(stage: int) -> None:
    """Small buckets are full at once, so a part of the backward is in `.grad` already."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False)) for _ in range(2)]
    x = torch.ones(1, 200, requires_grad=True)

    def rank(comm: Any) -> Dict[str, torch.Tensor]:
        model = dct.shard(models[comm.rank], stage, comm=comm, bucket_size=1 << 14)
        model(x).sum().backward()
        model.zero_grad(set_to_none=False)
        with dct.no_sync(model):
            model(x).sum().backward()
        with pytest.raises(ValueError, match="in a backward"):
            model(Raising.apply(x)).sum().backward()
        model(x).sum().backward()
        return {name: p.grad.full_tensor() if stage else p.grad.clone() for name, p in model.named_parameters()}

    expected = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
    expected.load_state_dict(models[0].state_dict())
    models[1].load_state_dict(models[0].state_dict())
    expected(x).sum().backward()
    found = libdc.run.threads(2, rank, timeout=60)[0]
    for name, param in expected.named_parameters():
        torch.testing.assert_close(found[name], 2 * param.grad)  # type: ignore[operator]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_hook_that_raises_behind_the_average(stage: int) -> None:
    """The sums are in `.grad` by then, and no later backward averages them again."""
    def rank(comm: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = dct.shard(two_layers(), stage, comm=comm)

        def raise_once(param: nn.Parameter) -> None:
            handle.remove()
            raise ValueError("in a hook")

        handle = model[1].weight.register_post_accumulate_grad_hook(raise_once)
        with dct.no_sync(model):
            model[0](torch.ones(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="in a hook"):
            model(torch.ones(1, 2)).sum().backward()
        grad = model[0].weight.grad.clone()
        with pytest.raises(ValueError, match="in a backward"):
            model[0](Raising.apply(model[1](torch.ones(1, 2)))).sum().backward()
        model[1](torch.ones(1, 2)).sum().backward()
        assert torch.equal(model[0].weight.grad, grad)
        return grad

    libdc.run.threads(1, rank, timeout=60)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("orders", [("ab", "ab"), ("ab", "ba")])
def test_sums_and_unused_parameters(stage: int, orders: Sequence[str]) -> None:
    """The order of reductions may take a waiting sum while another one is reduced."""
    class Branches(nn.ModuleDict):
        def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
            for name in names:
                x = self[name](x)
            return x

    models = [Branches({name: nn.Linear(2, 2, bias=False) for name in "abc"}) for _ in range(2)]

    def rank(comm: Any) -> Any:
        model = dct.shard(models[comm.rank], stage, comm=comm, unused="zero")
        model(torch.ones(1, 2), "abc").sum().backward()
        model.zero_grad()
        with dct.no_sync(model):
            for name in orders[comm.rank]:
                model(torch.ones(1, 2), name).sum().backward()
        model(torch.ones(1, 2), "c").sum().backward()
        return [p.grad.full_tensor() if stage else p.grad for p in model.parameters()]

    for grads in libdc.run.threads(2, rank, timeout=60):
        assert all(torch.equal(grad, torch.ones(2, 2)) for grad in grads)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_deleted_gradient_drops_the_sums(stage: int) -> None:
    def delete(model: Any) -> None:
        for param in model.parameters():
            del param.grad

    assert same(after_no_sync(stage, 2, delete), times_one_batch(1))
