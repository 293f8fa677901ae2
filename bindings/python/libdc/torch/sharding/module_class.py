"""The classes that shard() gives to modules: parameters become properties, and forwards gather them."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Tuple, Type

import torch
from torch import Tensor, nn

from ..compile import tracing
from .eager import ModuleState
from .managed_modules import MODULE_STATE
from .parameter import copy_shard, plain_tensor
from .root import Root
from .sharded_param import ShardedParam


class _ClassKey(NamedTuple):
    """Modules with the same key share a class. hooked: forward hooks, which see whole weights, are registered."""

    base: Type[nn.Module]
    names: Tuple[str, ...]  # of parameters, which become properties
    is_root: bool
    hooked: bool


_classes: Dict[_ClassKey, Type[nn.Module]] = {}


def convert(module: nn.Module, names: List[str], root: Root, entries: Dict[nn.Parameter, ShardedParam],
             is_root: bool) -> None:
    state = ModuleState(root)
    for name in names:
        state.entries[name] = entries[module._parameters[name]]
    module.__dict__[MODULE_STATE] = state
    ids = {name: (entry.id, entry.param_dtype) for name, entry in state.entries.items()}
    tracing.annotate_module(module, root, ids)
    module.__class__ = _get_class(_ClassKey(type(module), tuple(names), is_root, has_forward_hooks(module)))


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _get_class(key: _ClassKey) -> Type[nn.Module]:
    if key not in _classes:
        base = key.base
        body: Dict[str, Any] = {name: property(_param_property(name)) for name in key.names}
        body["forward"] = _with_full_params(base.forward, key.is_root)
        if key.hooked:
            body["_call_impl"] = _with_full_params(base._call_impl, key.is_root)
        else:
            for name in ("register_forward_hook", "register_forward_pre_hook"):
                body[name] = _with_class_for_hooks(getattr(base, name), key)
        body["_apply"] = _make_apply(base)
        body["_load_from_state_dict"] = _make_load_from_state_dict(base)
        body["__module__"], body["__qualname__"], body["__doc__"] = base.__module__, base.__qualname__, base.__doc__
        body["__reduce_ex__"] = _refuse_copies
        if isinstance(getattr(base, "_flat_weights", None), property) or issubclass(base, nn.RNNBase):
            body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
            body["flatten_parameters"] = lambda self: None  # would move them
        if key.is_root:
            body["state_dict"] = _make_state_dict(base)
        _classes[key] = type(base.__name__, (base,), body)
    return _classes[key]


def _param_property(name: str) -> Callable[[nn.Module], Any]:
    def read(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():
            return tracing.traced_param(self, name)
        try:
            param = self._parameters[name]
        except KeyError:
            raise RuntimeError(f"{name} of {type(self).__name__} was taken away from a sharded model: tie, move and "
                               "parametrize weights before libdc.torch.shard()") from None
        return self.__dict__[MODULE_STATE].read(name, param)

    return read


def _with_full_params(inner: Callable[..., Any], is_root: bool) -> Callable[..., Any]:
    """A method of a module in which its parameters are whole. Its signature stays: programs look into forward's."""

    @functools.wraps(inner)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if is_root:
                tracing.begin_forward(self)
            return inner(self, *args, **kwargs)
        return self.__dict__[MODULE_STATE].call(inner, self, args, kwargs)

    return method


def _with_class_for_hooks(inner: Callable[..., Any], key: _ClassKey) -> Callable[..., Any]:
    """A method that registers a forward hook."""

    @functools.wraps(inner)
    def register(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = inner(self, *args, **kwargs)
        if type(self) is _classes[key]:
            self.__class__ = _get_class(key._replace(hooked=True))
        return handle

    return register


def _make_apply(base: Type[nn.Module]) -> Callable[..., nn.Module]:
    inner = base._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        """Moves and casts: only those that change nothing are possible, since libdc holds the shards' addresses."""
        fn = _in_place(fn)
        for name, param in self._parameters.items():
            if param is None or name not in self.__dict__[MODULE_STATE].entries:
                continue
            with torch.no_grad():
                result = fn(param)
            if result.data_ptr() != param.data_ptr() or result.dtype != param.dtype:
                full_name = self.__dict__[MODULE_STATE].entries[name].names[0]
                raise RuntimeError(f"{full_name}: a sharded model cannot be moved or cast; do it before shard(), or "
                                   "use its param_dtype")
        return inner(self, fn, *args, **kwargs)

    return apply


def _in_place(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """fn, with the argument as its result where fn returns an equal copy: PyTorch copies for "cpu:0", which is the only
    CPU there is."""

    def apply(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        if result is tensor:
            return tensor
        same = (result.device == tensor.device and result.dtype == tensor.dtype and result.shape == tensor.shape
                and result.layout == tensor.layout == torch.strided and torch.equal(_bits(result), _bits(tensor)))
        return tensor if same else result

    return apply


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _make_load_from_state_dict(base: Type[nn.Module]) -> Callable[..., None]:
    inner = base._load_from_state_dict

    def load(self: nn.Module, state_dict: Dict[str, Any], prefix: str, *args: Any) -> None:
        """Of whole weights each rank takes its part; parts are loaded as they are."""
        given = {}
        for name, entry in self.__dict__[MODULE_STATE].entries.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == entry.shape != entry.data.shape:
                given[prefix + name] = value
                part = state_dict[prefix + name] = entry.data.new_zeros(entry.data.shape)
                copy_shard(entry, plain_tensor(value), part)
        try:
            inner(self, state_dict, prefix, *args)
        finally:
            state_dict.update(given)

    return load


def _make_state_dict(base: Type[nn.Module]) -> Callable[..., Any]:
    inner = base.state_dict

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The rank's shards, as LocalShard of parameter.py."""
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise RuntimeError("torch.distributed.checkpoint does not know sharded models of libdc.torch: use "
                               "libdc.torch.save_checkpoint(), or full_state_dict() and full_optimizer_state_dict()")
        return inner(self, *args, **kwargs)

    return state_dict


def _refuse_copies(self: nn.Module, protocol: int) -> Any:
    raise TypeError(f"{type(self).__name__} belongs to a sharded model, which cannot be pickled or copied: it holds "
                    "the ranks' communicator. Save full_state_dict(model) instead, and load it into a new model")


def _flat_weights(self: nn.Module) -> List[Any]:
    """The list that nn.LSTM and its like read: their own would hold the shards."""
    return [getattr(self, name) for name in self._flat_weights_names]
