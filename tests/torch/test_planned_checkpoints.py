"""libdc.torch.plan of modules that compute parts of their forward again, by torch.utils.checkpoint."""

from __future__ import annotations

import copy
import threading
from typing import Any, List

import libdc.run
import libdc.torch
import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint  # by name, as models do

BATCH = torch.zeros(4, 64)
INPUT, BLOCK = 64 * 4, 2 * 2 * 64 * 256  # bytes and flops of a sample


class Blocks(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.options) if self.options else block(x)
        return self.head(x).tanh()


def at_the_peak(model: nn.Module, batch: Tensor = BATCH, **options: Any) -> Any:
    return libdc.torch.plan(model, batch, dtype="float32", micro_batch=4, bucket=1 << 10, **options)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_is_planned_as_with_recompute(reentrant: bool) -> None:
    planned = libdc.torch.planning.model_of(Blocks(use_reentrant=reentrant), BATCH)
    blocks = [layer for layer in planned.layers if layer.name.startswith("blocks")]
    assert all(layer.recomputed for layer in blocks) and not planned.layers[-1].recomputed
    kept = sum(layer.input_bytes for layer in blocks)
    assert kept in (7 * INPUT, 8 * INPUT)  # the batch has no gradient, but a checkpoint keeps it
    checkpointed, again, plain = (at_the_peak(Blocks(**options), recompute=recompute) for options, recompute in (
        ({"use_reentrant": reentrant}, False), ({}, True), ({}, False)))
    assert planned.flops == plain.model.flops == 8 * BLOCK + 2 * 64 * 8
    assert checkpointed.gather_wire_bytes == plain.gather_wire_bytes == 0
    activations = [max(point.bytes["activations"] for point in plan.points) for plan in (checkpointed, plain)]
    assert 4 * 7 * INPUT <= activations[0] < activations[1] / 3
    workspace = [max(point.bytes["workspace"] for point in plan.points) for plan in (checkpointed, again)]
    assert workspace[0] >= 4 * 256 * 4 and workspace[0] == pytest.approx(workspace[1], rel=0.3)
    work = [at_the_peak(model, recompute=recompute, optimizer=False).compute_ns for model, recompute in (
        (Blocks(use_reentrant=reentrant), False), (Blocks(), True), (Blocks(), False))]
    assert work[0] == pytest.approx(work[1], rel=0.05) and work[0] > 1.2 * work[2]
    assert [layer.name for layer in planned.layers] == [layer.name for layer in plain.model.layers]


def test_kept_bytes_are_those_of_a_forward() -> None:
    """The storages that a real checkpointed forward keeps alive between the blocks and behind them."""
    planned = libdc.torch.planning.model_of(Blocks(use_reentrant=False), BATCH)
    head = planned.layers[-1]
    assert head.name == "head" and head.kept_bytes == INPUT + 8 * 4  # its input, and tanh's output
    assert sum(layer.input_bytes for layer in planned.layers[:-1]) == 8 * INPUT


def bytes_of_a_step(comm: libdc.Comm, model: nn.Module, stage: int) -> List[int]:
    model = libdc.torch.shard(copy.deepcopy(model), stage, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        libdc.torch.stats(model, reset=True)
        model(BATCH.clone().requires_grad_()).sum().backward()  # a reentrant one needs an input with a gradient
        optimizer.step()
        optimizer.zero_grad()
    stats = libdc.torch.stats(model)
    return [stats.gather_wire_bytes, stats.reduce_wire_bytes]


@pytest.mark.parametrize("reentrant", [False, True])
def test_wire_bytes_are_those_of_a_training(reentrant: bool) -> None:
    model = Blocks(use_reentrant=reentrant)
    for stage in (0, 1, 3):
        measured = libdc.run.threads(2, bytes_of_a_step, model, stage)[0]
        plan = at_the_peak(model, BATCH.clone().requires_grad_(), ranks=2, stage=stage)
        assert [plan.gather_wire_bytes, plan.reduce_wire_bytes] == measured, stage


def test_selective_checkpointing_warns() -> None:
    def contexts() -> Any:
        return checkpoints.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    with pytest.warns(UserWarning, match="selective checkpointing .context_fn. is planned as if all"):
        at_the_peak(Blocks(use_reentrant=False, context_fn=contexts))


def test_checkpointing_stays_as_it_was() -> None:
    """Afterwards, and meanwhile on other threads."""
    before = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction
    seen: List[Any] = []

    class Asking(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            def train() -> None:
                for reentrant in (False, True):
                    weight = torch.ones(3, requires_grad=True)
                    checkpoint(lambda w: (w * w).sum(), weight, use_reentrant=reentrant).backward()
                    seen.append(weight.grad.tolist())

            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
            return super().forward(x)

    at_the_peak(Asking(use_reentrant=False))
    assert seen == [[2.0] * 3] * 2
    assert before == (checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction)
