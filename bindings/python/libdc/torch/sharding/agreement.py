"""Checks that all ranks shard the same model in the same way.

Parameters are registered by number, so models with equal shapes in different orders would mix up weights without an
error. If options differ, the first collective that fails names a consequence, and not the option."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from torch import Tensor, nn

from .meta_init import is_meta
from .root import Root

_NOTHING = "nothing"


def check(root: Root, model: nn.Module, params: Sequence[Tuple[str, nn.Parameter]], options: Mapping[str, Any]) -> None:
    """Raises on all ranks if the ranks' options, parameters or buffers differ. Collective."""
    mine = json.dumps(_describe(model, params, options))
    sums = root.group.all_gather_bytes(hashlib.sha256(mine.encode()).hexdigest().encode(), all_ranks=True)
    if all(text == sums[0] for text in sums):
        return
    every = [json.loads(text) for text in root.group.all_gather_bytes(mine.encode(), all_ranks=True)]
    for rank, other in enumerate(every):
        if other != every[0]:
            raise ValueError(f"shard: {_first_difference(every[0], other, rank)}: all ranks must shard the same model "
                             "with the same options")


def _describe(model: nn.Module, params: Sequence[Tuple[str, nn.Parameter]],
              options: Mapping[str, Any]) -> Dict[str, Any]:
    numbers: Dict[int, int] = {}
    weights = []
    for name, param in params:
        number = numbers.setdefault(id(param), len(numbers))  # a tied parameter has its first name's number
        weights.append(f"{number}, {_tensor(name, param)}{'' if param.requires_grad else ', frozen'}"
                       f"{', on meta' if is_meta(param) else ''}")
    return {"options": {name: str(value) for name, value in options.items()}, "parameter": weights,
            "buffer": [f"{i}, {_tensor(*named)}" for i, named in enumerate(model.named_buffers())]}


def _tensor(name: str, tensor: Tensor) -> str:
    return f"{name} of shape {tuple(tensor.shape)} and type {str(tensor.dtype)[len('torch.'):]}"


def _first_difference(first: Dict[str, Any], other: Dict[str, Any], rank: int) -> str:
    for name, value in first["options"].items():
        if other["options"][name] != value:
            return f"{name} = {value} on rank 0, but {other['options'][name]} on rank {rank}"
    for kind in ("parameter", "buffer"):
        lists: List[List[str]] = [first[kind], other[kind]]
        for here, there in itertools.zip_longest(*lists, fillvalue=_NOTHING):
            if here != there:
                return f"where rank 0 has {kind} {here}, rank {rank} has {there}"
    raise AssertionError("two descriptions differ nowhere")
