"""get_state_dict() and its like of torch.distributed.checkpoint: with full_state_dict=True, parts become whole. Copies
that async_save() makes are parts again."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

import torch

from ..sharding.local_shard import LocalShard, OwnedState
from ..sharding.part import part_of, plain_tensor

_MODULE = "torch.distributed.checkpoint.state_dict"
_STAGER = "torch.distributed.checkpoint._state_dict_stager"


def gather_parts(values: Any, keep: bool) -> Any:
    """A state dictionary with whole tensors in place of parts; collective. keep: this rank wants them."""
    if isinstance(values, dict):
        return {key: gather_parts(value, keep) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(gather_parts(value, keep) for value in values)
    part = part_of(values)
    if part is None:
        return values
    whole = part.gather(values, keep)
    return torch.empty(0) if whole is None else whole


def _make_full_or_cpu(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def full_or_cpu_state_dict(state_dict: Any, info: Any) -> Any:
        if info.full_state_dict:
            wanted = not info.cpu_offload or not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
            state_dict = gather_parts(state_dict, wanted)
        return inner(state_dict, info)

    full_or_cpu_state_dict.knows_parts = True  # type: ignore[attr-defined]
    return full_or_cpu_state_dict


def _make_offload_tensor(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def offload_tensor(self: Any, x: Any, memo: Any, non_blocking: bool = False) -> Any:
        """A copy on the host."""
        owned = isinstance(x, OwnedState)
        part = x._near if owned else part_of(x)
        if part is None:
            return inner(self, x, memo, non_blocking)
        copied = inner(self, plain_tensor(x), memo, non_blocking)
        memo[id(x)] = result = OwnedState.of(part, copied) if owned else LocalShard.of(part, copied)
        return result

    offload_tensor.knows_parts = True  # type: ignore[attr-defined]
    return offload_tensor


def patch_if_imported() -> None:
    """Called before the states that it works on are made: the module takes long to import, and few programs use it."""
    module: Any = sys.modules.get(_MODULE)
    function = getattr(module, "_maybe_full_or_cpu_state_dict", None)
    if function is not None and not hasattr(function, "knows_parts"):
        module._maybe_full_or_cpu_state_dict = _make_full_or_cpu(function)
    stager: Any = getattr(sys.modules.get(_STAGER), "StateDictStager", None)
    function = getattr(stager, "_offload_tensor", None)
    if function is not None and not hasattr(function, "knows_parts"):
        stager._offload_tensor = _make_offload_tensor(function)
