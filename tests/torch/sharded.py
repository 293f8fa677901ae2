"""Shared by the tests of sharded models."""

from __future__ import annotations

from typing import Any, Callable, Dict

import libdc.run
import libdc.torch as dct
import torch
import torch.nn as nn
from models import Odd, make
from one_thread import one_thread  # noqa: F401  # for the tests that import it from here


def on(world: int, function: Callable[..., Any]) -> Any:
    return libdc.run.threads(world, function, timeout=60)


def sharded(comm: Any, stage: int = 3, **options: Any) -> Odd:
    model = make()
    dct.shard(model, stage, comm=comm, group_size=300, **options)
    return model


def alone(function: Callable[[Odd], Any], **options: Any) -> Any:
    return on(1, lambda comm: function(sharded(comm, **options)))[0]


def grads(model: nn.Module, numbers: Any = None) -> Dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a: Dict[str, torch.Tensor], b: Dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
