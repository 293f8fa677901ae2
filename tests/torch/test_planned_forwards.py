"""libdc.torch.plan of modules that use weights where no module of theirs runs: bytes are those of a training."""

from __future__ import annotations

import copy
from typing import Any, Dict, List

import libdc.run
import libdc.torch
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS = torch.zeros(2, 8, dtype=torch.int64)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(1000, 64)
        self.body = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def run(self, x: Tensor) -> Tensor:
        x = self.tok(x)
        for layer in self.body:
            x = layer(x)
        return x


class Tied(Body):
    """A head of the parent's, after the body."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.run(x), self.tok.weight)


class Added(Body):
    """A weight that autograd does not save."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) + self.tok.weight[0]


class Twice(Body):
    """A unit that runs again, and a weight that is read three times in a row."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body[0](self.run(x))
        return F.linear(F.linear(x, self.body[0].weight), self.body[0].weight)


class Before(Body):
    """A weight that is read before any unit runs, once, and used twice."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.tok.weight
        x = F.embedding(x, weight)
        for layer in self.body:
            x = layer(x)
        return F.linear(x, weight)


class Own(Body):
    """The model's own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.out = nn.Parameter(torch.zeros(8, 64)), nn.Parameter(torch.zeros(64, 10))

    def forward(self, x: Tensor) -> Dict[str, Any]:
        return {"samples": len(x), "loss": ((self.run(x) + self.places) @ self.out).sum()}


class Typed(Body):
    """Reads that have no gradient, since they ask for a type or a shape."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.body[0].weight.dtype
        return self.run(x).to(dtype) * self.body[0].weight.shape[0]


MODELS = [Tied, Added, Twice, Before, Own, Typed]


def bytes_of_a_step(comm: libdc.Comm, model: nn.Module, stage: int) -> List[int]:
    model = libdc.torch.shard(copy.deepcopy(model), stage, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        libdc.torch.stats(model, reset=True)
        result = model(TOKENS)
        (result["loss"] if isinstance(result, dict) else result.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = libdc.torch.stats(model)
    return [stats.gather_wire_bytes, stats.reduce_wire_bytes]


@pytest.mark.parametrize("kind", MODELS, ids=[kind.__name__ for kind in MODELS])
def test_wire_bytes_are_those_of_a_training(kind: Any) -> None:
    model = kind()
    for stage in (0, 1, 3):
        measured = libdc.run.threads(2, bytes_of_a_step, model, stage)[0]
        plan = libdc.torch.plan(model, [TOKENS], ranks=2, stage=stage, dtype="float32")
        assert [plan.gather_wire_bytes, plan.reduce_wire_bytes] == measured, stage
    assert type(model) is kind and type(model.tok) is nn.Embedding and not model.tok._forward_pre_hooks
    assert plan.model.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_work_outside_of_units_counts() -> None:
    """Of a parent with a tied head, and of attention without parameters."""
    body = 2 * 2 * 8 * 64 * 64
    assert libdc.torch.planning.model_of(Tied(), [TOKENS]).flops == body + 2 * 8 * 1000 * 64
    assert libdc.torch.planning.model_of(Own(), [TOKENS]).flops == body + 2 * 8 * 64 * 10

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    class Attending(Body):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.body[1](self.attention(self.body[0](self.tok(x))))

    layers = libdc.torch.planning.model_of(Attending(), [TOKENS]).layers
    assert [layer.name for layer in layers] == ["tok", "body.0", "body.1"]
    assert layers[1].flops == body // 2 + 4 * 8 * 8 * 64 and layers[2].flops == body // 2


def test_work_before_the_first_unit_counts() -> None:
    class Early(Body):
        def forward(self, x: Tensor) -> Tensor:
            x = x[..., None].float().expand(-1, -1, 64)
            return self.body[1](self.body[0](x @ x.transpose(1, 2) @ x))

    assert libdc.torch.planning.model_of(Early(), [TOKENS]).flops == 2 * 2 * 8 * 64 * 64 + 2 * 2 * 8 * 8 * 64


def test_a_recurrent_model_is_planned() -> None:
    model = nn.LSTM(64, 32, batch_first=True)
    planned = libdc.torch.planning.model_of(model, [torch.zeros(2, 8, 64)])
    assert planned.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert type(model) is nn.LSTM and model._flat_weights[0] is model.weight_ih_l0
