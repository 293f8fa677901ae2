"""A parameter of torch.optim.Optimizer as the library knows it."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Optional, TypeVar

import torch
from torch import Tensor

from ..torch.sharding.parameter import entry_of

_Method = TypeVar("_Method", bound=Callable[..., Any])


def on_elements(method: _Method) -> _Method:
    """Decorates a method so that a sharded model's parameters, gradients and states are plain tensors of this rank's
    elements inside."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return method(*args, **kwargs)

    return call  # type: ignore[return-value]


class ParamShard:
    """A parameter as the library knows it: this rank's elements of it."""

    __slots__ = ("param", "group", "pieces", "shape", "offset", "count", "length")

    def __init__(self, param: Tensor, group: int = 0) -> None:
        entry = entry_of(param)
        self.param = param
        self.group = group
        self.pieces: Optional[Dict[str, Tensor]] = None  # the library's memory in `state`; None before the first step
        self.shape = tuple(param.shape if entry is None else entry.shape)
        self.length = param.numel()  # with the padding of a sharded parameter's last part
        self.offset, self.count = 0, self.length
        if entry is not None:
            self.offset, end = entry.shard_range
            self.count = end - self.offset

    def view(self, state: Tensor) -> Tensor:
        """A piece of state for the part's elements. It has the parameter's shape if this rank has the whole
        parameter."""
        whole = self.count == self.length and state.shape == (self.count,)
        return state.view(self.param.shape) if whole else state
