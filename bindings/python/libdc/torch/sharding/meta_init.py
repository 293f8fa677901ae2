"""Models on PyTorch's meta device, whose parameters have shapes but no memory. shard() gives each rank memory only for
its part. It has no values until they are written, and a forward before that is an error."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import Tensor, nn

from .. import devices
from .sharded_param import ShardedParam


def is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def target_device(params: Iterable[Tuple[str, nn.Parameter]], device: Any) -> torch.device:
    """The model's device: that of its parameters that are not on meta, else `device`, else PyTorch's default."""
    if torch.get_default_device().type == "meta":
        raise RuntimeError("shard: PyTorch's default device is meta, where nothing has values: call shard() behind the "
                           "block of `with torch.device(\"meta\")`")
    found = next((param.device for _, param in params if not is_meta(param)), None)
    wanted = found if device is None else torch.device(device)
    if wanted is None:
        wanted = torch.get_default_device()
    if wanted.type not in ("cpu", "cuda"):
        raise ValueError(f"shard: device = {wanted}, must be the cpu or a cuda device")
    if found is not None and (found.type != wanted.type or wanted.index not in (None, found.index)):
        raise ValueError(f"shard: device = {wanted}, but parameters are on {found}: device is for models on meta")
    return devices.numbered(wanted)


class _Buffer(NamedTuple):
    """A buffer that was on meta."""

    module: "weakref.ref[nn.Module]"
    name: str
    full_name: str
    tensor: Tensor
    version: int


class Uninitialized:
    """The parameters and buffers of a model that have no values yet."""

    def __init__(self, model: nn.Module, device: torch.device, whole: bool) -> None:
        """Moves those on meta to the device. whole: with memory for all of a parameter; else for one element, until
        ParamGroup makes the shard."""
        self._ids: Set[int] = set()
        self.versions: Dict[ShardedParam, int] = {}
        for param in model.parameters():
            if is_meta(param):
                place = torch.empty(param.shape if whole else (), dtype=param.dtype, device=device).expand(param.shape)
                self._replace(param, nn.Parameter(place, requires_grad=param.requires_grad))
                self._ids.add(id(param))
        self.buffers: List[_Buffer] = []
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and is_meta(buffer):
                    self._replace(buffer, torch.empty_like(buffer, device=device))
                    self._ids.add(id(buffer))
                    full_name = f"{prefix}.{name}" if prefix else name
                    self.buffers.append(_Buffer(weakref.ref(module), name, full_name, buffer, buffer._version))

    @staticmethod
    def _replace(tensor: Tensor, by: Tensor) -> None:
        """Swaps a tensor's content. The object and its attributes stay, so that optimizers and lists still refer to
        it."""
        by.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, by)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._ids

    def copy_to(self, copy: Uninitialized, memo: Dict[int, Any]) -> None:
        """Records in a copied model which tensors have no values yet, before the copy's shards exist. memo:
        deepcopy()'s."""
        copy._ids.update(id(memo[id(entry.param)]) for entry in self.versions if self.has(entry))
        for buffer in filter(self._is_empty, self.buffers):
            module, tensor = memo.get(id(buffer.module())), memo.get(id(buffer.tensor))
            if module is not None and tensor is not None:  # else it is no longer in the model
                copy.buffers.append(buffer._replace(module=weakref.ref(module), tensor=tensor, version=tensor._version))

    def watch(self, entries: Iterable[ShardedParam]) -> None:
        """Records the shards' versions, once they exist."""
        self.versions = {entry: entry.data._version for entry in entries if entry.param in self}

    def has(self, entry: Optional[ShardedParam]) -> bool:
        """Whether the parameter has no values yet, so that overwriting it loses nothing."""
        return entry is not None and entry in self.versions and entry.data._version == self.versions[entry]

    def check(self) -> None:
        """Raises for the first parameter or buffer without values."""
        for entry, version in self.versions.items():
            if entry.data._version == version:
                raise RuntimeError(f"{entry.names[0]} has no values yet, since the model was on meta when shard() was "
                                   "called: load_checkpoint(), load_state_dict() or a module's reset_parameters() "
                                   "gives it some")
        for buffer in self.buffers:
            if self._is_empty(buffer):
                raise RuntimeError(f"{buffer.full_name} is a buffer without values, since it was on meta when shard() "
                                   "was called: compute it again (copy_()), load it, or keep buffers off meta, as "
                                   "Accelerate's init_empty_weights() does")

    @staticmethod
    def _is_empty(buffer: _Buffer) -> bool:
        module = buffer.module()
        return (module is not None and module._buffers.get(buffer.name) is buffer.tensor
                and buffer.tensor._version == buffer.version)
