"""A plain model beside the same one sharded, in eager mode and compiled; and the graphs that ran."""

from __future__ import annotations

import copy
from typing import Any, Callable, List, Optional, Sequence

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from libdc.torch.compile import dynamo_backend

Grads = List[Optional[torch.Tensor]]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def grads_of(model: nn.Module) -> Grads:
    return [None if p.grad is None else whole(p.grad) for p in model.parameters()]


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def compare(work: Callable[[nn.Module, Callable[..., Any]], List[Any]], backend: Optional[str],
            make: Callable[[], nn.Module] = two_linears, stages: Sequence[int] = (0, 1, 3), **options: Any) -> None:
    """work(model, the model to call) has one result for the plain model and for the sharded one, at every stage."""
    torch.manual_seed(0)
    made = make()
    expected = work(*[copy.deepcopy(made)] * 2)

    def rank(comm: Any, stage: int) -> None:
        model = copy.deepcopy(made)
        dct.shard(model, stage, comm=comm, **options)
        found = work(model, model if backend is None else torch.compile(model, backend=backend))
        assert len(found) == len(expected)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b)

    for stage in stages:
        libdc.run.threads(2 if backend is None else 1, rank, stage, timeout=120)  # Dynamo is for one thread at a time
        torch._dynamo.reset()


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """The graphs that backend="libdc" runs from now on, as lists of (operator, arguments)."""
    found: List[Any] = []
    finish = dynamo_backend._compile_graph

    def record(gm: Any, inputs: Any) -> Any:
        result = finish(gm, inputs)
        found.append([(node.target, node.args) for node in gm.graph.nodes if node.op == "call_function"])
        return result

    monkeypatch.setattr(dynamo_backend, "_compile_graph", record)
    return found
