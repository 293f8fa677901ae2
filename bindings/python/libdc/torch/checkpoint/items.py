"""Pieces of a checkpoint's tensors: those that a rank writes, and where those go that it reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .safetensors_file import TensorInfo


class WriteItem(NamedTuple):
    """Elements of a tensor that this rank can write: flat, from begin on."""

    name: str
    of: TensorInfo
    begin: int
    elements: Tensor

    @property
    def end(self) -> int:
        return self.begin + self.elements.numel()


class Target(NamedTuple):
    """Where this rank's elements of a file's tensor go, from begin to end: the first ones of new memory on the host.
    So damage never reaches the model. Only where the model has no values yet it is the model's memory, of any type."""

    memory: Tensor
    begin: int
    end: int

    @property
    def elements(self) -> Tensor:
        return self.memory.view(-1)[: self.end - self.begin]
