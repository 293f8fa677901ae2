"""PyTorch's tests of FSDP2, on libdc.torch.shard: programs of its test/distributed/_composable/fsdp with a behaviour
that no other test here has. Each docstring names its source; docs/fsdp2-tests.md has all of them. Every program runs on
1, 2 and 3 ranks at stages 0, 1 and 3, beside one process with all batches (fsdp2.py)."""

from __future__ import annotations

import collections
import copy
import dataclasses
import re
from pathlib import Path
from typing import Any, Callable, Dict, List

import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from fsdp2 import backward, check, random
from models import Block
from sharded import on, one_thread  # noqa: F401
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)


@pytest.mark.parametrize("sizes", [(7, 15, 3), (16, 17, 8)])
def test_sizes_that_do_not_divide(sizes: Any) -> None:
    """test_fully_shard_training.py: test_train_parity_single_group_shard_dim0, and on one rank."""
    model = nn.Sequential(nn.Linear(*sizes[:2]), nn.ReLU(), nn.Linear(*sizes[1:]))
    check(model, lambda model, i, rank: backward(model(random(4, sizes[0], at=(i, rank))).sum()))


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> torch.Tensor:
        return self.weight @ self.weight


def test_a_forward_without_inputs() -> None:
    """test_fully_shard_training.py: test_root_no_forward_inputs."""
    check(Square(), lambda model, i, rank: backward(model().sum() * (rank + 1)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) + self.inner(x * 2))


def test_a_module_that_runs_twice_and_a_module_alone() -> None:
    """test_fully_shard_training.py: test_multi_forward_module, test_non_root_forward_backward."""
    def step(model: nn.Module, i: int, rank: int) -> torch.Tensor:
        x = random(8, 4, at=(i, rank))
        return backward(model(x).sum()) + backward(model.inner(x).square().sum())

    check(Twice(), step)


class TwoPaths(nn.Module):
    def __init__(self, second: bool = True) -> None:
        super().__init__()
        self.shared, self.lin1, self.lin2 = (nn.Linear(6, 6) for _ in range(3))
        self.second = second

    def forward(self, x: torch.Tensor) -> Any:
        x = self.shared(x)
        return self.lin1(x).relu(), (self.lin2(x).relu() if self.second else x)


def test_outputs_and_modules_that_the_loss_does_not_use() -> None:
    """test_fully_shard_autograd.py: test_unused_forward_output, test_unused_forward_module."""
    def step(model: nn.Module, i: int, rank: int) -> torch.Tensor:
        one, two = model(random(3, 6, at=(i, rank)))
        return backward((one * two).sum() if i < 2 else one.sum())

    check(TwoPaths(), step)
    check(TwoPaths(second=False), step)


def test_a_backward_for_each_path() -> None:
    """test_fully_shard_comm.py: test_fully_shard_backward_prefetch, its module that one backward does not use."""
    def step(model: nn.Module, i: int, rank: int) -> torch.Tensor:
        one, two = model(random(3, 6, at=(i, rank)))
        two.sum().backward(retain_graph=True)
        return backward(one.sum()) + two.sum()

    check(TwoPaths(), step)


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    more: List[torch.Tensor]


class Boxed(nn.Module):
    """Takes and gives a tensor in a container."""

    def __init__(self, take: Callable[[Any], torch.Tensor], give: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.lin, self.take, self.give = nn.Linear(6, 6), take, give

    def forward(self, box: Any) -> Any:
        return self.give(self.lin(self.take(box)).relu())


_boxes: Dict[str, Any] = {
    "list": (lambda box: box[0], lambda x: [x]),
    "tuple": (lambda box: box[0], lambda x: (x, None)),
    "namedtuple": (lambda box: box.x, lambda x: Pair(x, torch.ones_like(x))),
    "dict": (lambda box: box["x"], lambda x: {"x": x}),
    "dataclass": (lambda box: box.x + box.more[0], lambda x: Record(x, [x.clone()])),
}


@pytest.mark.parametrize("kind", _boxes)
def test_activations_in_containers(kind: str) -> None:
    """test_fully_shard_autograd.py: test_nontensor_activations. test_fully_shard_mixed_precision.py:
    test_structured_input_output."""
    take, give = _boxes[kind]
    model = nn.Sequential(Boxed(take, give), Boxed(take, give))
    check(model, lambda model, i, rank: backward(take(model(give(random(3, 6, at=(i, rank))))).sum()))

    def rank(comm: Any) -> None:
        mixed = dct.shard(copy.deepcopy(model), comm=comm, param_dtype=torch.bfloat16, policy={
            "": dct.Policy(cast_forward_inputs=True, output_dtype=torch.float32)})
        result = take(mixed(give(torch.ones(3, 6))))
        result.sum().backward()
        assert result.dtype == torch.float32 and mixed[0].lin.weight.grad.dtype == torch.float32

    on(2, rank)


class Tied(nn.Module):
    def __init__(self, vocab: int = 17, width: int = 6, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.block, self.norm = nn.Embedding(vocab, width), Block(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor, skip_head: bool = False) -> torch.Tensor:
        h = self.embed(ids)
        h = self.norm(checkpoint(self.block, h, use_reentrant=False) if self.checkpointed else self.block(h))
        return h if skip_head else self.head(h)


def _ids(i: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 17, (2, 8), generator=torch.Generator().manual_seed(10 * i + rank))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_tied_weights_and_two_forwards_before_a_backward(checkpointed: bool) -> None:
    """test_fully_shard_training.py: test_train_parity_with_shared_params, test_train_shared_params_uneven_shard,
    test_double_forward_with_nested_fsdp_and_checkpoint."""
    def step(model: nn.Module, i: int, rank: int) -> torch.Tensor:
        one, two = model(_ids(i, rank)), model(_ids(i, rank + 5))
        return backward((one.logsumexp(-1).mean() - two.square().mean()).square())

    check(Tied(checkpointed=checkpointed), step)


@pytest.mark.parametrize("mode", ["plain", "unshard", "policy", "unused"])
def test_a_head_that_runs_by_chunks(mode: str) -> None:
    """test_fully_shard_training.py: test_partial_group_forward_then_standalone, test_partial_group_reshard_toggle,
    test_double_partial_forward_then_backward."""
    def step(model: nn.Module, i: int, rank: int) -> torch.Tensor:
        sharded = "_dc" in model.__dict__
        h = model(_ids(i, rank), skip_head=True)
        if mode == "unshard" and sharded:
            dct.unshard(model.head)
        total = torch.zeros(())
        grads = []
        for chunk in h.detach().chunk(2, dim=1):
            chunk = chunk.contiguous().requires_grad_()
            loss = model.head(chunk).square().mean()
            loss.backward()
            total += loss.detach()
            grads.append(chunk.grad)
        if mode == "unshard" and sharded:
            dct.reshard(model.head)
        h.backward(torch.cat(grads, dim=1))
        return total

    options: Dict[str, Any] = {"policy": {"policy": {"head": dct.Policy(reshard_after_forward=False),
                                                     "embed": dct.Policy(reshard_after_forward=False)}},
                               "unused": {"unused": "zero"}}
    check(Tied(), step, **options.get(mode, {}))


def test_chunks_and_microbatches() -> None:
    """test_fully_shard_training.py: test_partial_group_forward_grad_accum_chunked, test_gradient_accumulation,
    test_1f1b_microbatching."""
    def step(model: nn.Module, i: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        sharded = "_dc" in model.__dict__
        if sharded:
            dct.unshard(model)
        for micro in range(3):
            with dct.no_sync(model) if sharded and micro < 2 else torch.enable_grad():
                h = model(_ids(3 * i + micro, rank), skip_head=True)
                chunk = h.detach().requires_grad_()
                loss = model.head(chunk).square().mean()
                loss.backward()
                h.backward(chunk.grad)
            total += loss.detach()
        if sharded:
            dct.reshard(model)
        return total

    check(Tied(), step)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_0, self.layer_no_grad, self.layer_with_grad = (nn.Linear(5, 5) for _ in range(3))
        self.layer_no_grad.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer_0(x)
        for _ in range(3):
            x = self.layer_no_grad(F.relu(self.layer_with_grad(x)))
            with torch.no_grad():
                x += F.relu(self.layer_with_grad(x))
        return x


def test_frozen_layers_between_others() -> None:
    """test_fully_shard_frozen.py: test_multi_forward_mixed_requires_grad, test_train_mixed_requires_grad_per_group,
    test_train_mixed_requires_grad_across_groups."""
    check(Frozen(), lambda model, i, rank: backward(model(random(8, 5, at=(i, rank))).sum()))
    biases = nn.Sequential(Block(5), Block(5))
    for name, param in biases.named_parameters():
        param.requires_grad_("bias" in name)

    def thaw(model: nn.Module, i: int, rank: int) -> torch.Tensor:
        if i == 2:
            model[1].down.weight.requires_grad_(True)
        with torch.set_grad_enabled(i != 1):
            loss = model(random(8, 5, at=(i, rank))).sum()
        return backward(loss) if i != 1 else loss

    check(biases, thaw)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, kernel_size=4, stride=4).to(memory_format=torch.channels_last)

    def forward_features(self, images: torch.Tensor) -> torch.Tensor:
        return self.patches(images).flatten(2).transpose(1, 2)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.project, self.scale = Vision(), nn.Linear(8, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.project(self.vision.forward_features(images)) * self.scale


def test_other_methods_and_parameters_that_fsdp2_refuses() -> None:
    """test_fully_shard_training.py: test_register_fsdp_forward_method, which needs no registration here.
    test_fully_shard_init.py: test_raise_scalar_parameter, test_raise_noncontiguous_parameter: no errors here."""
    check(Projected(), lambda model, i, rank: backward(model(random(2, 3, 8, 8, at=(i, rank))).square().sum()))


def test_the_table_names_tests_that_are_there() -> None:
    root = Path(__file__).resolve().parents[3]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (root / "docs" / "fsdp2-tests.md").read_text())
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (root / "tests" / file).read_text(), (file, name)
