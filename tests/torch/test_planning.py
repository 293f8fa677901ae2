"""libdc.torch.plan: its bytes are those of the trainer of examples/gpt, and its layers those of the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Callable, List

import libdc.torch
import pytest
import torch

GPT = str(Path(__file__).resolve().parents[2] / "examples" / "gpt")
TRAIN = f"""
import json, sys
sys.path.insert(0, {GPT!r})
import torch
import libdc.torch
from model import CONFIGS, GPT

rank = libdc.torch.init()
rows = []
for stage in range(4):
    torch.manual_seed(0)
    model = libdc.torch.shard(GPT(CONFIGS["tiny"]), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 256, (1, CONFIGS["tiny"].seq))
    for step in range(3):
        libdc.torch.stats(model, reset=True)
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = libdc.torch.stats(model)
    rows.append([stats.gather_wire_bytes, stats.reduce_wire_bytes])
if rank.rank == 0:
    print(json.dumps(rows))
"""


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    monkeypatch.syspath_prepend(GPT)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    from model import CONFIGS
    from model import GPT as Model

    return Model(CONFIGS["tiny"])


def tokens_of(model: torch.nn.Module, samples: int = 2) -> List[torch.Tensor]:
    tokens = torch.zeros(samples, model.config.seq, dtype=torch.int64)
    return [tokens, tokens]


def test_wire_bytes_are_the_trainers(launch: Callable[..., str], gpt: torch.nn.Module) -> None:
    ranks = 3  # no power of two, so that parts differ
    measured = json.loads(launch(TRAIN, ranks))
    for stage, bytes_of_a_step in enumerate(measured):
        plan = libdc.torch.plan(gpt, tokens_of(gpt), ranks=ranks, stage=stage, dtype="float32")
        assert [plan.gather_wire_bytes, plan.reduce_wire_bytes] == bytes_of_a_step, stage
        assert plan.node_bytes == sum(bytes_of_a_step) and plan.network_bytes == 0


def test_layers_have_the_models_parameters_work_and_activations(gpt: torch.nn.Module) -> None:
    model = libdc.torch.planning.model_of(gpt, tokens_of(gpt))
    assert [layer.name for layer in model.layers] == ["tokens", "positions", "blocks.0", "blocks.1", "norm", "head"]
    assert model.parameters == sum(parameter.numel() for parameter in gpt.parameters())
    tokens, hidden = 64, 64
    matrices = 2 * tokens * 12 * hidden * hidden
    assert model.layers[2].flops == matrices + 4 * tokens * tokens * hidden
    assert model.layers[5].flops == 2 * tokens * hidden * 256
    assert model.layers[2].input_bytes == tokens * hidden * 4 < model.layers[2].kept_bytes
    assert model.layers[0].backward == () and model.tokens == tokens
    weights = [gpt.get_parameter(f"blocks.0.{name}.weight").shape for name in ("qkv", "proj", "up", "down")]
    read = [model.layers[2].shapes[i] for i in model.layers[2].backward]
    assert set(map(tuple, weights)) <= set(read) and (3 * hidden,) not in read  # a linear layer's bias is not


def test_kept_bytes_are_those_that_autograd_keeps(gpt: torch.nn.Module) -> None:
    """The same forward with memory: distinct storages that are saved, without parameters."""
    kept = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in gpt.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    batch = tokens_of(gpt)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gpt(*batch)
    layers = libdc.torch.planning.model_of(gpt, batch).layers
    real = sum(storage.nbytes() for storage in kept.values()) / len(batch[0])
    assert abs(sum(layer.kept_bytes for layer in layers) - real) <= 0.02 * real  # kernels of the CPU pad a little


def test_the_model_and_its_grads_stay(gpt: torch.nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in gpt.state_dict().items()}
    libdc.torch.plan(gpt, {"x": tokens_of(gpt)[0], "targets": tokens_of(gpt)[1]}, machine="a100")
    assert all(torch.equal(tensor, before[name]) for name, tensor in gpt.state_dict().items())
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in gpt.parameters())
    with pytest.raises(ValueError, match="batch has no tensor of at least one sample"):
        libdc.torch.plan(gpt, [3])
