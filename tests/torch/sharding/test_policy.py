"""shard(..., policy={pattern: Policy(...)}), unshard(), reshard() and prefetch()."""

from __future__ import annotations

import copy
import math
import time
from typing import Any, Dict, List, NamedTuple

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from libdc.torch.sharding.order.exec_order import Size, split_into_groups
from models import Block, Odd, Plain, adamw, bits, data, make
from sharded import alone, grads, on, one_thread, sharded  # noqa: F401
from torch.utils.checkpoint import checkpoint

BF16, F32 = torch.bfloat16, torch.float32


class Types(nn.Module):
    """Notes the types that its modules see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.seen: Dict[str, Any] = {}

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            self.seen[f"layers.{k}"] = x.dtype, layer.up.weight.dtype, layer.norm.weight.dtype
            x = layer(x)
        self.seen["norm"] = x.dtype, self.norm.weight.dtype
        self.seen["scale"] = None if scale is None else scale["a"][0].dtype
        return self.norm(x)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_types_by_module(backend: Any) -> None:
    policy = {"": dct.Policy(cast_forward_inputs=True),
              "**.norm": dct.Policy(param_dtype=F32, cast_forward_inputs=True, output_dtype=BF16),
              "norm": dct.Policy(param_dtype=F32, reduce_dtype=F32, cast_forward_inputs=True, output_dtype=F32)}

    def rank(comm: Any, stage: int) -> Any:
        model = make(Types)
        plain = copy.deepcopy(model).bfloat16()
        dct.shard(model, stage, comm=comm, param_dtype=BF16, reduce_dtype=BF16, policy=policy)
        call = model if backend is None else torch.compile(model, backend=backend)
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(comm.rank))
        result = call(x, scale={"a": [torch.ones(1), torch.ones(1, dtype=torch.int32)]})
        result.sum().backward()
        assert result.dtype == F32 and model.seen["scale"] == BF16
        assert model.seen["layers.0"] == (BF16, BF16, F32) and model.seen["norm"] == (BF16, F32)
        torch.testing.assert_close(result, plain(x.bfloat16()).float(), rtol=0.05, atol=0.05)
        other = copy.deepcopy(model)
        assert torch.equal(other(x), model(x)) and other.seen["layers.1"] == (BF16, BF16, F32)
        return bits(grads(model))

    for stage in (0, 3) if backend is None else (3,):
        libdc.run.threads(2, rank, stage, timeout=120)


class Seen(nn.Module):
    """Notes the types of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.types: List[Any] = []

    def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        self.types.append((x.dtype, None if y is None else y.dtype))
        return self.lin(x)


class TwoSeen(nn.Module):
    def __init__(self, cast: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.c1, self.c2, self.cast, self.checkpointed = Seen(), Seen(), cast, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = (lambda module, *args: checkpoint(module, *args, use_reentrant=False, early_stop=False)) \
            if self.checkpointed else (lambda module, *args: module(*args))
        h = run(self.c1, x)
        return run(self.c2, h.to(self.c2.lin.weight.dtype) if self.cast else h, torch.ones(1)).float()


class Casts(NamedTuple):
    """The types that the first and the second module see, and the second one's other argument."""

    policy: Dict[str, dct.Policy]
    seen: Any
    options: Dict[str, Any] = {}
    model: Dict[str, Any] = {}


_half, _full = torch.float16, torch.float32
_cast_in = dct.Policy(param_dtype=_half, cast_forward_inputs=True)


@pytest.mark.parametrize("casts", [
    Casts({"c2": _cast_in}, [_full, _half, _half]),
    Casts({"c2": dct.Policy(param_dtype=_half)}, [_full, _half, _full], model={"cast": True}),
    Casts({"c1": _cast_in._replace(output_dtype=_full)}, [_half, _full, _full]),
    Casts({"": dct.Policy(cast_forward_inputs=True)}, [_half, _half, _full], {"param_dtype": _half}),
    Casts({"": dct.Policy(cast_forward_inputs=True), "c2": dct.Policy(cast_forward_inputs=True)},
          [_half, _half, _half], {"param_dtype": _half}),
    Casts({"*": _cast_in}, [_half, _half, _half], model={"checkpointed": True}),
    Casts({"*": _cast_in._replace(output_dtype=_full)}, [_half, _half, _half], model={"checkpointed": True}),
])
def test_casts_at_modules_borders(casts: Casts) -> None:
    """PyTorch's test_fully_shard_mixed_precision.py: test_float16_on_one_submodule,
    test_submodules_with_external_inputs, test_checkpoint_recompute_casts_forward_inputs,
    test_checkpoint_recompute_casts_outputs. test_fully_shard_training.py: test_grouped_module_cast_forward_inputs."""
    model = TwoSeen(**casts.model)

    def rank(comm: Any, stage: int) -> None:
        mine = dct.shard(copy.deepcopy(model), stage, comm=comm, policy=casts.policy, **casts.options)
        mine(torch.zeros(2, 6)).sum().backward()
        assert {(mine.c1.types[k][0], *mine.c2.types[k]) for k in range(len(mine.c1.types))} == {tuple(casts.seen)}
        assert len(mine.c1.types) == (2 if mine.checkpointed else 1)

    for stage in (0, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_in_16_bits(dtype: torch.dtype) -> None:
    """PyTorch's test_fully_shard_mixed_precision.py: test_norm_modules_bf16, test_norm_modules_fp16."""
    def rank(comm: Any) -> None:
        apart = {"1": dct.Policy(param_dtype=torch.float32, cast_forward_inputs=True, output_dtype=dtype)}
        for middle, policy in ((nn.LayerNorm(8), {}), (nn.BatchNorm1d(8), apart), (nn.BatchNorm1d(8).to(dtype), {})):
            model = nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 8))
            dct.shard(model, comm=comm, param_dtype=dtype, policy={"": dct.Policy(cast_forward_inputs=True), **policy})
            result = model(torch.randn(4, 8))
            result.sum().backward()
            assert result.dtype == dtype and all(p.grad is not None for p in model.parameters())

    on(2, rank)


def test_ignored_parameters_are_each_ranks_own() -> None:
    def rank(comm: Any, stage: int) -> None:
        model = make()
        with torch.no_grad():
            model.scale.fill_(comm.rank + 1)
        dct.shard(model, stage, comm=comm, policy={"scale": dct.Policy(ignored=True),
                                                   "blocks.0": dct.Policy(ignored=True),
                                                   "blocks.0.up": dct.Policy(ignored=False)})
        assert type(model.scale) is nn.Parameter and model.scale.item() == comm.rank + 1
        optimizer = adamw(model)
        model(*data(0, comm.rank)).backward()
        alone = make()
        alone.scale.data.fill_(comm.rank + 1)
        alone(*data(0, comm.rank)).backward()
        torch.testing.assert_close(model.scale.grad, alone.scale.grad)
        torch.testing.assert_close(model.blocks[0].down.weight.grad, alone.blocks[0].down.weight.grad)
        mean = model.blocks[0].up.weight.grad.full_tensor() if stage else model.blocks[0].up.weight.grad
        assert not torch.allclose(mean, alone.blocks[0].up.weight.grad)
        optimizer.step()
        model(*data(1, comm.rank))
        whole = dct.full_state_dict(model)
        assert whole["blocks.0.down.weight"].shape == (13, 52) and whole.keys() == alone.state_dict().keys()

    for stage in (0, 1, 3):
        libdc.run.threads(2, rank, stage, timeout=60)


def test_norms_of_ignored_complex_parameters() -> None:
    """Imaginary parts count, in any order of the norm."""

    class Turns(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.turn = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (self.turn.imag * 3).sum() + self.turn.abs().sum()

    def rank(comm: Any) -> None:
        for order in (1.0, 2.0, 3.0, math.inf):
            model = Turns()
            plain = copy.deepcopy(model)
            dct.shard(model, 3, comm=comm, policy={"turn": dct.Policy(ignored=True)})
            norms = []
            for each in (plain, model):
                each(torch.ones(1, 2)).sum().backward()
                norms.append(nn.utils.clip_grad_norm_(each.parameters(), 1.0, order))
            torch.testing.assert_close(norms[1], norms[0])
            torch.testing.assert_close(model.turn.grad, plain.turn.grad)

    on(2, rank)


@pytest.mark.parametrize("clip", [dct.clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_one_norm_beside_ignored_parameters(clip: Any) -> None:
    """Their gradients differ by rank, and one rank has none. All ranks clip by the same factor."""

    def rank(comm: Any, stage: int, order: float) -> Any:
        model = dct.shard(make(), stage, comm=comm, policy={"scale": dct.Policy(ignored=True)})
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        model.norm.bias.grad.fill_(3)
        model.scale.grad = torch.tensor(4.0 * comm.rank) if comm.rank < 2 else None
        norm = float(clip(model.parameters(), 1.0, order))
        assert model.scale.grad is None or float(model.scale.grad) == pytest.approx(4 * comm.rank / norm, rel=1e-5)
        return norm, float(model.norm.bias.grad.max())

    for stage in (0, 1, 3):
        for order, expected in (2.0, (13 * 9 + 16 / 3) ** 0.5), (1.0, 13 * 3 + 4 / 3), (math.inf, 4.0):
            found = libdc.run.threads(3, rank, stage, order, timeout=60)
            assert len(set(found)) == 1
            assert found[0] == pytest.approx((expected, 3 / expected), rel=1e-5)


def test_weights_that_stay_whole_are_gathered_once() -> None:
    def rank(comm: Any) -> None:
        stats = {}
        for reshard in (True, False):
            model = make(Plain)
            dct.shard(model, 3, comm=comm, policy={"layers.1": dct.Policy(reshard_after_forward=reshard)})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                dct.stats(model, reset=True)
                model(torch.ones(2, 16)).backward()
                stats[reshard] = dct.stats(model)
                optimizer.step()
                optimizer.zero_grad()
            weights = bits(dct.full_state_dict(model))
            assert stats.setdefault("weights", weights) == weights
        assert stats[True].gathers - stats[False].gathers == 1
        assert stats[False].gathered_bytes == 16 * 16 * 4 and stats[True].gathered_bytes == 0

    on(2, rank)


def test_groups_of_modules() -> None:
    sizes = [Size(5, 0), Size(5, 1), Size(90, 1), Size(5, 1), Size(5, 2), Size(4, 0), Size(4, 0), Size(4, 0)]
    assert split_into_groups(sizes, 8) == [(0, 1), (1, 4), (4, 5), (5, 7), (7, 8)]

    def handshakes(comm: Any, policy: Any) -> int:
        model = make(layers=3)
        dct.shard(model, 3, comm=comm, policy=policy)
        with torch.no_grad():
            model(*data(0, 0))
            dct.trace_start(model)
            model(*data(0, 0))
        return sum(event.op == "prefetch_params_fused" for event in dct.trace_read(model))

    def rank(comm: Any) -> None:
        one = handshakes(comm, None)
        assert handshakes(comm, {"blocks.*": dct.Policy(group=True)}) == one + 4  # before, three blocks, behind

    on(2, rank)


def holds(model: Any, expected: bool) -> bool:
    """Whether gathered weights have memory, once those of a thread that still ends have given theirs back."""
    limit = time.monotonic() + 60
    while (dct.stats(model).gathered_bytes > 0) is not expected and time.monotonic() < limit:
        time.sleep(0.001)
    return (dct.stats(model).gathered_bytes > 0) is expected


@pytest.mark.parametrize("stage", range(4))
def test_kept_weights_serve_training_after_inference(stage: int) -> None:
    model = dct.shard(nn.Linear(4, 3), stage)
    dct.unshard(model)
    with torch.inference_mode():
        expected = model(torch.ones(2, 4))
    result = model(torch.ones(2, 4))
    result.sum().backward()
    assert torch.equal(result, expected) and model.bias.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("unused", [None, "zero"])
def test_unshard_and_prefetch(unused: Any) -> None:
    def rank(comm: Any, stage: int) -> str:
        model = sharded(comm, stage, unused=unused)
        optimizer = adamw(model)
        for step in range(4):
            if step == 1:
                dct.unshard(model.blocks[0])
            dct.stats(model, reset=True)
            dct.prefetch(model.blocks[1])
            model(*data(step, comm.rank)).backward()
            model(*data(step, comm.rank)).backward()
            assert stage < 3 or holds(model, step in (1, 2))
            if step == 2:
                dct.reshard(model.blocks[0])
                assert stage < 3 or holds(model, False)
            optimizer.step()
            optimizer.zero_grad()
        dct.prefetch(model.head)
        return bits(dct.full_state_dict(model))

    def plain(comm: Any) -> str:
        model = sharded(comm, 3)
        optimizer = adamw(model)
        for step in range(4):
            for _ in range(2):
                model(*data(step, comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits(dct.full_state_dict(model))

    expected = on(2, plain)
    for stage in (0, 1, 3):
        assert libdc.run.threads(2, rank, stage, timeout=60) == expected


def test_policies_that_are_none() -> None:
    def shard(policy: Any, **options: Any) -> None:
        alone(lambda model: dct.shard(make(), policy=policy, **options))

    policy = dct.Policy
    for given, kind, says in (
            ([], TypeError, "policy is a list, must map patterns to libdc.torch.Policy"),
            ({"norm": True}, TypeError, r"policy\['norm'\] is a bool, must be a libdc.torch.Policy"),
            ({"norm": policy(param_dtype=torch.int8)}, TypeError, "param_dtype = torch.int8, must be a floating-point"),
            ({"norm": policy(group=3)}, TypeError, "group = 3, must be True, False or None"),
            ({"block.*": policy()}, ValueError, r"policy\['block.\*'\] names no module and no parameter of the model"),
            ({"blocks.*.up.*.x": policy()}, ValueError, "names no module"),
            ({"norm": policy(cast_forward_inputs=True)}, ValueError, "policy of norm: cast_forward_inputs = True"),
            ({"scale": policy(group=True)}, ValueError, "policy of scale: group is for modules, and this is"),
            ({"head": policy(param_dtype=BF16)}, ValueError,
             "policy of head.weight: the parameter is tied to emb.weight, for which the policy differs")):
        with pytest.raises(kind, match=says):
            shard(given)

    def differ(comm: Any) -> None:
        with pytest.raises(ValueError, match="shard: policy = .* on rank 0, but .* on rank 1: all ranks must shard"):
            dct.shard(make(), comm=comm, policy={"norm": policy(group=comm.rank == 0)})

    on(2, differ)
    with pytest.raises(ValueError, match="scale is on meta and ignored by the policy: give it values before"):
        with torch.device("meta"):
            model = Odd()
        dct.shard(model, policy={"scale": policy(ignored=True)})
