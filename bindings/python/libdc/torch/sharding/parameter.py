"""The classes of a sharded model's parameters.

shard() changes the class of each parameter, but keeps the object. At stage 0 a parameter is whole. At stages 1 to 3 it
is a part with the whole's shape, on which PyTorch's functions give the whole's result or an error (local_shard.py). Its
memory is a flat tensor, which autograd, optimizers' kernels and the library use."""

from __future__ import annotations

import collections
from typing import Any, Callable, Dict, Iterable, NoReturn, Optional, Type

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .local_shard import LocalShard, dispatch, refuse_saving
from .part import plain_tensor
from .sharded_param import ShardedParam
from .untraced import untraced


def entry_of(param: Any) -> Optional[ShardedParam]:
    """The ShardedParam of a sharded model's parameter; None for any other tensor."""
    entry = getattr(param, "dc_entry", None)
    return entry if entry is not None and entry.param_ref() is param else None


# Conversion between part and whole


def gather_full(entry: ShardedParam, local: Tensor, keep: bool = True) -> Optional[Tensor]:
    """The whole of a tensor that is split as the parameter is. Collective. keep: whether this rank needs it."""
    if entry.part is None:
        return plain_tensor(local).clone() if keep else None
    return entry.part.gather(local, keep)


def copy_shard(entry: ShardedParam, whole: Tensor, local: Tensor) -> None:
    """Writes this rank's part of the whole."""
    if entry.part is None:
        local.copy_(whole)
    else:
        local[: entry.part.count].copy_(entry.part.of(whole))


# Parameters


def _random_fill(name: str) -> Callable[..., Tensor]:
    """Makes a method fill a whole parameter with rank 0's random numbers on all ranks."""
    inner = getattr(torch.Tensor, name)

    def draw(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        entry = entry_of(self)
        result = inner(self, *args, **kwargs)
        if entry is not None:
            entry.group.broadcast(self)
        return result

    draw.__name__ = name
    return draw


class ManagedParameter(nn.Parameter):
    """A parameter whose gradients libdc averages."""

    def register_hook(self, hook: Callable[[Tensor], Any]) -> NoReturn:
        refuse_hooks(self)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """As PyTorch's: hook(param) is called at the end of each backward that gave the parameter a gradient, when
        `.grad` is complete."""
        entry = entry_of(self)
        if entry is None:
            return super().register_post_accumulate_grad_hook(hook)
        if entry.hooks is None:
            entry.hooks = collections.OrderedDict()
        handle = RemovableHandle(entry.hooks)
        entry.hooks[handle.id] = hook
        return handle

    def to_local(self) -> Tensor:
        """This rank's elements, as a plain tensor over the same memory."""
        return plain_tensor(self)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.requires_grad.__set__(self, value)
        entry = entry_of(self)
        if entry is not None:
            entry.requires_grad = value
            for trained, name in entry.trained:
                trained[name] = value

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self

    @property
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        entry = entry_of(self)
        same = plain_tensor(value).data_ptr() == plain_tensor(self).data_ptr() and value.dtype == self.dtype
        if entry is not None and not same:
            raise RuntimeError(f"{entry.names[0]}: the memory of a sharded model's parameter cannot be replaced, since "
                               "libdc holds its address; write into it (copy_()), or move and cast before shard()")
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self, value)


class ReplicatedParameter(ManagedParameter):
    """A parameter of a model at stage 0, which every rank has whole."""

    def full_tensor(self) -> Tensor:
        """A copy of the whole parameter."""
        return plain_tensor(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a parameter that belongs to no model."""
        return nn.Parameter(plain_tensor(self), self.requires_grad).__reduce_ex__(protocol)

    @property
    @untraced
    def grad(self) -> Any:
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    @untraced
    def grad(self, value: Optional[Tensor]) -> None:
        torch.Tensor.grad.__set__(self, value)
        entry = entry_of(self)
        if value is None and entry is not None:
            entry.drop_local_sum()

    @grad.deleter
    @untraced
    def grad(self) -> None:
        self.grad = None


for _name in ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"):
    setattr(ReplicatedParameter, _name, _random_fill(_name))


class ShardedParameter(ManagedParameter):
    """A parameter of a model at stages 1 to 3: this rank's part. Writes into `data` are detected."""

    _part: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    full_tensor = LocalShard.full_tensor
    data = ManagedParameter.data.getter(lambda self: self.detach())  # type: ignore[attr-defined]

    def __repr__(self, **_: Any) -> str:
        return "Parameter containing:\n" + repr(self.detach())

    def __deepcopy__(self, memo: Dict[int, Any]) -> LocalShard:
        """A copy of the part that belongs to no model."""
        memo[id(self)] = copy = self.detach().clone().requires_grad_(self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_saving(self._part)


_classes: Dict[Any, Type[nn.Parameter]] = {}


def set_param_class(entry: ShardedParam) -> None:
    """Makes a parameter a ShardedParameter, or at stage 0 a ReplicatedParameter."""
    param = entry.param
    base = ShardedParameter if entry.group.stage else ReplicatedParameter
    original = type(param)
    if original is not nn.Parameter and (base, original) not in _classes:
        _classes.setdefault((base, original), type(original.__name__, (base, original), {}))  # shared by all threads
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks:
        entry.hooks = hooks  # kept as this object, from which their handles remove them
        param._post_accumulate_grad_hooks = collections.OrderedDict()  # type: ignore[attr-defined]
    param.dc_entry = entry  # type: ignore[attr-defined]
    param._part = entry.part  # type: ignore[attr-defined]
    param.__class__ = _classes.get((base, original), base)


def refuse_hooks(param: Tensor) -> NoReturn:
    entry = entry_of(param)
    raise RuntimeError(f"register_hook: {entry.names[0] if entry else 'the parameter'} belongs to a sharded model, in "
                       "which autograd has no gradient for a hook: change .grad after backward(), or in "
                       "register_post_accumulate_grad_hook()")
