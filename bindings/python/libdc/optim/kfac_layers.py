"""The layers of a model that K-FAC takes: their modules, their uses in forwards, and their tensors as the library wants
them."""

from __future__ import annotations

import math
import weakref
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from libdc.linalg import SampleLayer
from torch import Tensor, nn

from ..torch.sharding.model import full_shape
from ..torch.sharding.module_class import class_before_shard

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Use:
    """One forward of a layer. It lives as long as its autograd graph."""

    __slots__ = ("layer", "x", "version", "shape", "reached", "__weakref__")

    def __init__(self, layer: "Layer", x: Tensor, shape: torch.Size) -> None:
        self.layer, self.version, self.shape = layer, x._version, shape  # shape: of the output
        self.x: Optional[Tensor] = x.detach()  # None: a backward reached this use, and a step followed
        self.reached = False


class Layer:
    """A layer of the library, of one or more modules that share its weight."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.constants = name, sample_layer(module)
        self.weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
        self.bias = module._parameters.get("bias")
        self.spatial = len(module.kernel_size) if isinstance(module, _CONVOLUTIONS) else 0
        self.index = self.group = self.part = 0  # index: the library's; part: index of the weight in _parts
        self.bias_part: Optional[int] = None
        self.uses: "weakref.WeakSet[Use]" = weakref.WeakSet()  # that a backward may reach
        self.is_watched = True  # warns once of a step without factors
        self.tasks: Dict[bool, int] = {}  # the last backward to reach a use; True: in a reentrant checkpoint


def sample_layer(module: nn.Module) -> SampleLayer:
    """The module as the library describes it."""
    if not isinstance(module, _CONVOLUTIONS):
        return SampleLayer("linear")
    # 'same' pads less in front; for other padding modes the input is padded already
    front = [(d * (k - 1)) // 2 if module.padding == "same" else 0 for d, k in zip(module.dilation, module.kernel_size)]
    padding = front if isinstance(module.padding, str) else list(module.padding)
    return SampleLayer("conv", kernel=module.kernel_size, stride=module.stride, dilation=module.dilation,
                       padding=padding if module.padding_mode == "zeros" else [0] * len(padding), groups=module.groups)


def has_own_forward(module: nn.Module) -> bool:
    """Whether a layer computes something else than torch.nn's class: its factors would be those of other products than
    the weight's."""
    given = class_before_shard(module)
    known = next(known for known in (nn.Linear, *_CONVOLUTIONS) if isinstance(module, known))
    return any(name in module.__dict__ or getattr(given, name, None) is not getattr(known, name, None)
               for name in ("forward", "_conv_forward"))


def is_supported(module: nn.Module, indices: Dict[int, int], owners: Dict[int, List[nn.Module]]) -> bool:
    """Whether the module is a layer whose parameters are all in the optimizer, and shared only with modules of equal
    constants."""
    if not isinstance(module, (nn.Linear, *_CONVOLUTIONS)) or module._parameters.get("weight") is None:
        return False
    params = [param for param in module._parameters.values() if param is not None]
    if len(params) != (1 if module._parameters.get("bias") is None else 2) or any(id(p) not in indices for p in params):
        return False
    if any(math.prod(full_shape(p)) == 0 for p in params):
        return False
    mine = sample_layer(module), [id(p) for p in module._parameters.values()]
    return all(isinstance(other, (nn.Linear, *_CONVOLUTIONS)) and (other is module or not has_own_forward(other)) and
               (sample_layer(other), [id(p) for p in other._parameters.values()]) == mine
               for param in params for other in owners[id(param)])


def padded_input(module: nn.Module, x: Tensor) -> Tensor:
    """The layer's input, padded if the module pads it with other values than zeros."""
    if isinstance(module, _CONVOLUTIONS) and module.padding_mode != "zeros":
        return F.pad(x.detach(), module._reversed_padding_repeated_twice, module.padding_mode)
    return x


def base_in_graph(output: Tensor) -> Tensor:
    """The output, or its base if it is a view of all of it. Changing a view in place removes its node from the graph.
    For inputs of three dimensions, for example, a Linear's output is a view of a product of two dimensions."""
    base = output._base
    whole = (base is not None and base.grad_fn is not None and base.numel() == output.numel()
             and base.is_contiguous() and output.is_contiguous())
    return base if whole else output  # type: ignore[return-value]


def split_batches(layer: Layer, x: Tensor, delta: Tensor, loss_terms: str) -> Tuple[Tensor, Tensor]:
    """x and delta with the samples (or positions, if each has a loss term) in the first dimension."""
    if x.dim() == (layer.spatial + 1 if layer.spatial else 1):
        x, delta = x[None], delta[None]
    if loss_terms == "positions" and not layer.spatial:
        x, delta = x.flatten(0, -2), delta.flatten(0, -2)
    return x.contiguous(), delta.contiguous()
