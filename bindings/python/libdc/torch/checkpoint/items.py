"""Pieces of a checkpoint's tensors: those that a rank writes, and the targets of those that it reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .safetensors_file import TensorInfo


class WriteItem(NamedTuple):
    """Elements of a tensor that this rank can write: a flat range that starts at begin."""

    name: str
    of: TensorInfo
    begin: int
    elements: Tensor

    @property
    def end(self) -> int:
        return self.begin + self.elements.numel()


class Target(NamedTuple):
    """The target of this rank's elements, begin to end, of a file's tensor. They are read into the beginning of new
    host memory, so that damage never reaches the model. If the model has no values yet, the target is the model's own
    memory, of any type."""

    memory: Tensor
    begin: int
    end: int

    @property
    def elements(self) -> Tensor:
        return self.memory.view(-1)[: self.end - self.begin]
