"""PyTorch's tests of FSDP2, as test_fsdp2.py: casts of a sharded model, gradients summed over microbatches, and other
wrappers beside it."""

from __future__ import annotations

import copy
from typing import Any, List

import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from fsdp2 import backward, check, random
from sharded import on, one_thread  # noqa: F401
from torch.distributed._composable import checkpoint


class Noted(nn.Module):
    """A layer with a running mean; notes the types of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.seen = nn.BatchNorm1d(5, affine=False), []  # type: ignore[var-annotated]
        self.lin = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.lin(x)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_refused_cast_changes_nothing(world: int, stage: int) -> None:
    """test_fully_shard_conversion.py: test_to_matches_plain_module, test_same_dtype_to_after_backward,
    test_nested_conversion_requires_clear, test_shared_parameter_conversion_requires_clear,
    test_pending_grad_conversion_requires_clear, test_no_op_conversion_preserves_pending_grad,
    test_device_only_conversion_requires_clear. FSDP2 casts where no gradient is in the way."""
    torch.manual_seed(0)
    tied = nn.Sequential(Noted(), Noted())
    tied[1].lin.weight = tied[0].lin.weight

    def rank(comm: Any) -> None:
        model, plain = copy.deepcopy(tied), copy.deepcopy(tied)
        dct.shard(model, stage, comm=comm)
        x = torch.ones(2, 5) * (comm.rank + 1)
        with dct.no_sync(model):
            model(x).sum().backward()
        before = list(model.parameters())
        for cast in (lambda: model.to(torch.bfloat16), model.double, model[1].lin.half):
            with pytest.raises(RuntimeError, match="0.lin.weight: a sharded model cannot be moved or cast"):
                cast()
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}
        assert model.float().to("cpu") is model and all(a is b for a, b in zip(model.parameters(), before))
        model(x).sum().backward()
        for r in range(comm.size):
            for _ in range(2):
                plain(torch.ones(2, 5) * (r + 1)).sum().backward()
        for param, other in zip(model.parameters(), plain.parameters()):
            grad = param.grad.full_tensor() if stage else param.grad
            torch.testing.assert_close(grad, other.grad / comm.size, rtol=1e-4, atol=1e-4)

    on(world, rank)


def test_types_of_gradients_that_are_not_the_parameters() -> None:
    """test_fully_shard_conversion.py: test_grad_dtype_change_after_fully_shard_rejected,
    test_grad_dtype_policy_preserved_after_conversion_and_replacement."""
    def make(dtype: torch.dtype) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
        model[0].weight.grad_dtype, model[1].weight.grad_dtype = None, dtype
        return model

    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match="1.weight has grad_dtype = torch.float32, must be its own type "
                                             "torch.bfloat16 or None"):
            dct.shard(make(torch.float32), comm=comm)
        model, x = dct.shard(make(torch.bfloat16), comm=comm), torch.ones(2, 3, dtype=torch.bfloat16)
        model(x).sum().backward()
        assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}
        model.zero_grad(set_to_none=True)
        model[1].weight.grad_dtype = torch.float32
        with pytest.raises(RuntimeError, match="grad_dtype"):
            model(x).sum().backward()

    on(2, rank)


class Translation(nn.Module):
    """An encoder and a decoder whose embeddings and last layer are one."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.source = nn.Embedding(11, 8)
        self.target = self.source
        self.register_buffer("bias", torch.ones(8))
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.source.weight
        for layer in (*self.transformer.encoder.layers, *self.transformer.decoder.layers) if checkpointed else ():
            checkpoint(layer)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.transformer(self.source(ids) + self.bias, self.target(ids.flip(1))))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshards", [False, True])
def test_an_encoder_and_a_decoder_with_shared_weights(checkpointed: bool, reshards: bool) -> None:
    """test_fully_shard_shared_params.py: test_train_shared_params."""
    torch.manual_seed(42)

    def step(model: nn.Module, i: int, rank: int) -> torch.Tensor:
        ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(10 * i + rank))
        return backward(model(ids).square().mean())

    check(Translation(checkpointed).double(), step, policy={"": dct.Policy(reshard_after_forward=reshards)})


def test_sums_of_microbatches_and_of_steps() -> None:
    """test_fully_shard_grad_acc.py: test_requires_gradient_sync_. Every second iteration adds to zeros that
    zero_grad() left, the others to none."""
    torch.manual_seed(42)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(3)])
    counts: List[int] = []

    def step(model: nn.Module, i: int, rank: int) -> torch.Tensor:
        sharded, total = "_dc" in model[0][0].__dict__, torch.zeros(())
        for micro in range(3):
            if sharded:
                dct.stats(model, reset=True)
            with dct.no_sync(model) if sharded and micro < 2 else torch.enable_grad():
                total += backward(model(random(2, 6, at=(i, rank, micro))).sum()).detach()
            if sharded:
                counts.append(dct.stats(model).reductions if micro < 2 else 0)
        return total

    check(model, step)
    assert set(counts) == {0}


@pytest.mark.parametrize("inner", [False, True])
def test_a_checkpoint_keeps_the_types_of_inputs(inner: bool) -> None:
    """test_fully_shard_compose.py: test_checkpoint_and_fully_shard."""
    def rank(comm: Any) -> None:
        model = nn.Sequential(Noted(), Noted())
        checkpoint(model[1].lin if inner else model[1])
        half = dct.Policy(param_dtype=torch.float16, cast_forward_inputs=True, output_dtype=torch.float32)
        dct.shard(model, comm=comm, policy={"1": half})
        model(torch.zeros(2, 5)).sum().backward()
        assert model[0].seen == [torch.float32]
        assert model[1].seen == [torch.float16] * (1 if inner else 2)
        assert {param.grad.dtype for param in model.parameters()} == {torch.float32}

    on(2, rank)


def test_replicate_beside_it_is_refused(launch: Any) -> None:
    """test_fully_shard_compose.py: test_replicate_and_fully_shard. FSDP2 leaves replicated modules to replicate()."""
    out = launch("""
import libdc.torch as dct, torch, torch.distributed as dist
from torch.distributed._composable import replicate
dist.init_process_group("gloo")
def refused(call, text):
    try:
        call()
    except ValueError as error:
        assert text in str(error), error
        return print("refused", flush=True)
    raise AssertionError(text)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
replicate(model[0])
refused(lambda: dct.shard(model), "0 is a module of replicate(), which averages gradients itself")
sharded = dct.shard(torch.nn.Linear(3, 3))
replicate(sharded)
refused(lambda: sharded(torch.ones(1, 3)), "DistributedDataParallel: the model is sharded by libdc.torch.shard()")
dist.destroy_process_group()
""")
    assert out.count("refused") == 4
