"""The classes of a sharded model's parameters: tensors that know that they are shards.

shard() changes the class of each parameter, which stays the same object. Methods that would be wrong on a shard are
replaced. Operators see a plain tensor, so a step costs nothing more. detach() and state_dict() return a LocalShard:
arithmetic keeps it one, and it refuses to be saved as if it were the whole."""

from __future__ import annotations

import collections
import sys
import weakref
from typing import Any, Callable, Dict, Iterable, NoReturn, Optional, Type

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .sharded_param import ShardedParam

_SAVE = ("save with libdc.torch.save_checkpoint(), or save the results of full_state_dict(), "
         "full_optimizer_state_dict() or full_tensor(); to_local() is the part as a plain tensor")


def entry_of(param: Any) -> Optional[ShardedParam]:
    """The ShardedParam of a sharded model's parameter; None for any other tensor."""
    entry = getattr(param, "dc_entry", None)
    return entry if entry is not None and entry.param_ref() is param else None


# Between a part and the whole


def gather_full(entry: ShardedParam, part: Tensor, keep: bool = True) -> Optional[Tensor]:
    """The whole of which each rank has a part like the parameter's; collective. keep: this rank wants it."""
    root = entry.root
    part = plain_tensor(part)
    if root.group.stage == 0:
        return part.clone() if keep else None
    part = part.contiguous()
    if part.numel() < entry.shard_numel:
        part = torch.cat([part, part.new_zeros(entry.shard_numel - part.numel())])
    if root.group.comm.size == 1:
        whole = part.clone()
    else:
        whole = part.new_empty(entry.shard_numel * root.group.comm.size)
        root.group.all_gather(part, whole)
    if not keep:
        return None
    return (whole if whole.numel() == entry.numel else whole[: entry.numel].clone()).view(entry.shape)


def copy_shard(entry: ShardedParam, whole: Tensor, part: Tensor) -> None:
    """Writes this rank's part of the whole."""
    if entry.group.stage == 0:
        part.copy_(whole)
        return
    begin, end = entry.shard_range
    part[: end - begin].copy_(whole.reshape(-1)[begin:end])


def plain_tensor(tensor: Tensor) -> Tensor:
    """The tensor's memory without autograd and without a class of ours."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(tensor).as_subclass(torch.Tensor)


def init_shard(entry: ShardedParam, part: Tensor, write: Callable[[Tensor], Any]) -> None:
    """Lets write() fill a whole tensor and keeps this rank's part. Random numbers become rank 0's, as the unsharded
    parameter would have them; all ranks draw, so that their generators stay in step. Collective."""
    whole = torch.empty(entry.shape, dtype=part.dtype, device=part.device)
    with torch.no_grad():
        write(whole)
        entry.group.broadcast(whole)
        copy_shard(entry, whole, plain_tensor(part))


# Parameters


def _random_fill(name: str) -> Callable[..., Tensor]:
    inner = getattr(torch.Tensor, name)

    def draw(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        entry = entry_of(self) if isinstance(self, nn.Parameter) else self.entry()  # type: ignore[attr-defined]
        if entry is None:
            return inner(self, *args, **kwargs)
        init_shard(entry, self, lambda whole: inner(whole, *args, **kwargs))
        return self

    draw.__name__ = name
    return draw


_DRAWS = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
_COPIES = ("bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "to")


def _copying(name: str) -> Callable[..., Any]:
    inner = getattr(torch.Tensor, name)

    def copy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, *args, **kwargs)
        entry = entry_of(self)
        return result if entry is None or result is self else LocalShard.of(entry, result)

    copy.__name__ = name
    return copy


def _called_by_torch() -> bool:
    """Whether the caller's caller is PyTorch itself, whose compilers must see the tensor that is there."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")


class ReplicatedParameter(nn.Parameter):
    """A parameter of a model at stage 0: every rank has the whole."""

    def register_hook(self, hook: Callable[[Tensor], Any]) -> NoReturn:
        refuse_hooks(self)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """As PyTorch's: called at the end of each backward that gave the parameter a gradient, which `.grad` has."""
        entry = entry_of(self)
        if entry is None:
            return super().register_post_accumulate_grad_hook(hook)
        if entry.hooks is None:
            entry.hooks = collections.OrderedDict()
        handle = RemovableHandle(entry.hooks)
        entry.hooks[handle.id] = hook
        return handle

    def full_tensor(self) -> Tensor:
        """The whole parameter. Every rank must call it."""
        return _full(entry_of(self), self)

    def to_local(self) -> Tensor:
        """This rank's shard, as a plain tensor over the same memory."""
        return plain_tensor(self)

    @property
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        entry = entry_of(self)
        if entry is not None and (value.data_ptr() != self.data_ptr() or value.dtype != self.dtype):
            raise RuntimeError(f"{entry.names[0]}: the memory of a sharded model's parameter cannot be replaced, since "
                               "libdc holds its address; write into it (copy_()), or move and cast before shard()")
        torch.Tensor.data.__set__(self, value)


class ShardedParameter(ReplicatedParameter):
    """A parameter of a model at stages 1 to 3: this rank's part, flat. A program that asks for dim() or ndim gets the
    whole's, so that groups by dimensions are what they were before shard(). Writes into `data` are noticed."""

    def dim(self) -> int:
        return super().dim() if _called_by_torch() else self._dim()

    @property
    def ndim(self) -> int:
        return super().dim() if _called_by_torch() else self._dim()

    def _dim(self) -> int:
        entry = entry_of(self)
        return super().dim() if entry is None else len(entry.shape)

    def _data(self) -> Tensor:
        return plain_tensor(self) if _called_by_torch() else self.detach()

    data = ReplicatedParameter.data.getter(_data)  # type: ignore[attr-defined]

    def __repr__(self, **_: Any) -> str:
        entry = entry_of(self)
        local = plain_tensor(self)
        return "Parameter containing:\n" + repr(local if entry is None else LocalShard.of(entry, local))

    def __deepcopy__(self, memo: Dict[int, Any]) -> NoReturn:
        raise TypeError(f"{_describe_part(entry_of(self))} cannot be copied as a parameter: to_local().clone() copies "
                        "its elements")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{_describe_part(entry_of(self))} is not the whole: {_SAVE}")


for _class in (ReplicatedParameter, ShardedParameter):
    for _name in _DRAWS:
        setattr(_class, _name, _random_fill(_name))
for _name in _COPIES:
    setattr(ShardedParameter, _name, _copying(_name))

_classes: Dict[Any, Type[nn.Parameter]] = {}


def set_param_class(entry: ShardedParam) -> None:
    """Makes a parameter a ShardedParameter, or at stage 0 a ReplicatedParameter."""
    param = entry.param
    base = ShardedParameter if entry.group.stage else ReplicatedParameter
    original = type(param)
    if original is not nn.Parameter and (base, original) not in _classes:
        _classes[base, original] = type(original.__name__, (base, original), {})
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks:
        entry.hooks = hooks  # their handles remove them from here
        param._post_accumulate_grad_hooks = collections.OrderedDict()  # type: ignore[attr-defined]
    param.dc_entry = entry  # type: ignore[attr-defined]
    param.__class__ = _classes.get((base, original), base)


def refuse_hooks(param: Tensor) -> NoReturn:
    entry = entry_of(param)
    raise RuntimeError(f"register_hook: {entry.names[0] if entry else 'the parameter'} belongs to a sharded model, in "
                       "which autograd has no gradient for a hook: change .grad after backward(), or in "
                       "register_post_accumulate_grad_hook()")


# Shards that parameters hand out


def _describe_part(entry: Optional[ShardedParam]) -> str:
    if entry is None:
        return "part of a parameter of a sharded model"
    comm = entry.group.comm
    return f"part {comm.rank} of {comm.size} of {entry.names[0]} {tuple(entry.shape)}"


def _full(entry: Optional[ShardedParam], part: Tensor) -> Tensor:
    if entry is None:
        raise RuntimeError("full_tensor: the sharded model that this is part of is gone")
    begin, end = entry.shard_range
    if part.shape != entry.data.shape and part.shape != (end - begin,):
        raise RuntimeError(f"full_tensor: a piece of shape {tuple(part.shape)} is no part of {entry.names[0]}")
    whole = gather_full(entry, part)
    assert whole is not None
    return whole


class LocalShard(torch.Tensor):
    """A rank's part of a parameter, or of something like it: an optimizer's state, an average of weights."""

    _entry: Any = None  # a weak reference

    @classmethod
    def of(cls, entry: ShardedParam, tensor: Tensor) -> "LocalShard":
        with torch._C.DisableTorchFunctionSubclass():
            part = tensor.as_subclass(cls)
        part._entry = weakref.ref(entry)
        return part

    @classmethod
    def __torch_function__(cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if type(result) is not torch.Tensor or any(result is arg for arg in args):
                return result
            source = next((arg for arg in args if isinstance(arg, LocalShard)), None)
            if source is None or result.shape != source.shape or result.dim() == 0:
                return result
            part = result.as_subclass(cls)
        part._entry = source._entry
        return part

    def entry(self) -> Optional[ShardedParam]:
        return None if self._entry is None else self._entry()

    def full_tensor(self) -> Tensor:
        """The whole. Every rank must call it."""
        return _full(self.entry(), self)

    def to_local(self) -> Tensor:
        """The part as a plain tensor, over the same memory."""
        return plain_tensor(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{_describe_part(self.entry())}: {plain_tensor(self)}>"

    def __deepcopy__(self, memo: Dict[int, Any]) -> "LocalShard":
        result = memo[id(self)] = self.clone()
        return result

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{_describe_part(self.entry())} is not the whole: {_SAVE}")

    __reduce_ex__ = storage = untyped_storage = _refuse  # type: ignore[assignment]


for _name in _DRAWS:
    setattr(LocalShard, _name, _random_fill(_name))
