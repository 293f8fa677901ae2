"""The classes that shard() gives to modules: parameters become properties, and forwards gather their weights."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Tuple, Type

import torch
from torch import Tensor, nn

from ..compile import tracing
from ..patches.distributed_checkpoint import patch_if_imported
from .eager import ModuleState
from .managed_modules import MODULE_STATE
from .part import as_bytes, plain_tensor
from .policy import Casts
from .root import Root
from .sharded_param import ShardedParam


class _ClassKey(NamedTuple):
    """Modules with the same key share a class. hooked: forward hooks, which see whole weights, are registered."""

    base: Type[nn.Module]
    names: Tuple[str, ...]  # of parameters, which become properties
    is_root: bool
    hooked: bool
    casts: Casts


_classes: Dict[_ClassKey, Type[nn.Module]] = {}
_lock = threading.Lock()  # guards the classes, since ranks that are threads shard concurrently


def class_before_shard(module: nn.Module) -> Type[nn.Module]:
    kind = type(module)
    return kind.__mro__[1] if kind in list(_classes.values()) else kind


def convert(module: nn.Module, names: List[str], root: Root, entries: Dict[nn.Parameter, ShardedParam],
            is_root: bool) -> None:
    own = {name: entries[module._parameters[name]] for name in names}
    tracing.annotate_module(module, root, [(name, entry.id) for name, entry in own.items()])
    state = module.__dict__[MODULE_STATE] = ModuleState(root, module.__dict__["_dc_given"])
    state.entries.update(own)
    casts = root.policies.casts.get(module, Casts())
    with _lock:
        base = class_before_shard(module)
        module.__class__ = _get_class(_ClassKey(base, tuple(names), is_root, has_forward_hooks(module), casts))


def reads_others(module: nn.Module) -> bool:
    """Whether its forward reads parameters of modules inside it, and takes another path if those are parts."""
    return isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer))


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _get_class(key: _ClassKey) -> Type[nn.Module]:
    if key not in _classes:
        base = key.base
        body: Dict[str, Any] = {name: property(_param_property(name)) for name in key.names}
        body["forward"] = _with_full_params(base, "forward", key.is_root, key.casts)
        if key.hooked:
            body["_call_impl"] = _with_full_params(base, "_call_impl", key.is_root)
        else:
            for name in ("register_forward_hook", "register_forward_pre_hook"):
                body[name] = _with_class_for_hooks(getattr(base, name), key)
        body["__setattr__"] = _make_setattr(base, key.names)
        body["_apply"] = _make_apply(base)
        body["_load_from_state_dict"] = _make_load_from_state_dict(base)
        body["__module__"], body["__qualname__"], body["__doc__"] = base.__module__, base.__qualname__, base.__doc__
        body["__reduce_ex__"], body["__new__"] = _refuse_copy, _make_new(base)
        body["__deepcopy__"] = _copy_model if key.is_root else _copy_module
        if key.is_root:
            body["to_empty"] = _to_empty
        if isinstance(getattr(base, "_flat_weights", None), property) or issubclass(base, nn.RNNBase):
            body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
            body["flatten_parameters"] = lambda self: None  # PyTorch's would move them
        if key.is_root:
            body["state_dict"] = _make_state_dict(base)
        _classes[key] = type(base.__name__, (base,), body)
    return _classes[key]


def _make_new(base: Type[nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(base.__init__)  # the class's signature, which programs inspect, is then __new__'s
    def new(cls: Type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        """type(module)(...): makes an unsharded module of the class that the module had before shard()."""
        return base(*args, **kwargs)

    return new


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


def _make_setattr(base: Type[nn.Module], names: Tuple[str, ...]) -> Callable[..., None]:
    inner = base.__setattr__

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        """Ignores assignments of a module's own whole weight, as in peft's merge_and_unload()."""
        if name in names and type(value) is Tensor and value is getattr(self, name):
            return
        inner(self, name, value)

    return set_attribute


def _with_full_params(base: Type[nn.Module], name: str, is_root: bool, casts: Casts = Casts()) -> Callable[..., Any]:
    """A class's method in which a module's parameters are whole. It keeps the signature, since programs inspect
    forward's. It looks the method up at each call, since a program may assign another forward later."""

    def own(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(base, name)(self, *args, **kwargs)

    cast = None if casts == Casts() else casts.wrap(own)

    @functools.wraps(getattr(base, name))
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(base, name) if cast is None else cast
        if torch.compiler.is_compiling():
            if is_root:
                tracing.begin_forward(self)
            return inner(self, *args, **kwargs)
        return self.__dict__[MODULE_STATE].call(inner, self, args, kwargs)

    return method


def _with_class_for_hooks(inner: Callable[..., Any], key: _ClassKey) -> Callable[..., Any]:
    """Wraps a method that registers a forward hook."""

    @functools.wraps(inner)
    def register(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = inner(self, *args, **kwargs)
        with _lock:
            if type(self) is _classes[key]:
                self.__class__ = _get_class(key._replace(hooked=True))
        return handle

    return register


def _refuse_moves(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    state = module.__dict__.get(MODULE_STATE)
    for name, param in module._parameters.items():
        if param is None or state is None or name not in state.entries:
            continue
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            copied = plain_tensor(param).clone()  # share_memory_() moves what it is called with
            address, result = copied.data_ptr(), fn(copied)
            same = result.data_ptr() == address and result.dtype == param.dtype
        if not same:
            raise RuntimeError(f"{state.entries[name].names[0]}: a sharded model cannot be moved or cast; do it before "
                               "shard(), or use its param_dtype")


def _make_apply(base: Type[nn.Module]) -> Callable[..., nn.Module]:
    inner = base._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        """Moves and casts. Only those that change nothing are allowed, since libdc holds the shards' addresses."""
        fn = _in_place(fn)
        for module in self.modules():  # checks all modules before any is changed
            _refuse_moves(module, fn)
        return inner(self, fn, *args, **kwargs)

    return apply


def _to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
    """Changes nothing: shard() has made the memory, even for a model on meta. Programs for FSDP2 call it after
    sharding."""
    where = self.__dict__[MODULE_STATE].root.group.device
    if device is not None and torch.device(device).type != where.type:
        raise RuntimeError(f"to_empty: device = {device}, must be {where}, where shard() has made the parameters")
    return self


def _in_place(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """fn, but it returns the argument if fn's result is an equal copy. PyTorch copies for "cpu:0", although there is
    only one CPU, and for a memory format."""

    def apply(tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # parts are flat, and have no memory format
            result = fn(tensor)
            same = result is tensor or (
                result.device == tensor.device and result.dtype == tensor.dtype and result.shape == tensor.shape
                and result.layout == tensor.layout == torch.strided and torch.equal(_bits(result), _bits(tensor)))
        return tensor if same else result

    return apply


def _bits(tensor: Tensor) -> Tensor:
    return as_bytes(plain_tensor(tensor))


def _make_load_from_state_dict(base: Type[nn.Module]) -> Callable[..., None]:
    inner = base._load_from_state_dict

    def load(self: nn.Module, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any],
             *args: Any) -> None:
        """Loads a state. With assign=True, values are copied into parameters, whose memory libdc holds, and buffers are
        replaced."""
        self.__dict__[MODULE_STATE].root.group.loaded = True
        if not local_metadata.get("assign_to_params_buffers", False):
            inner(self, state_dict, prefix, local_metadata, *args)
            return
        error_msgs: List[str] = args[-1]
        for name, entry in self.__dict__[MODULE_STATE].entries.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.dtype != entry.data.dtype:
                error_msgs.append(f"{prefix + name} is {entry.data.dtype} in a sharded model, which load_state_dict("
                                  f"assign=True) would make {value.dtype}: cast the model before shard(), or load "
                                  "without assign=True")
        inner(self, state_dict, prefix, {**local_metadata, "assign_to_params_buffers": False}, *args)
        for name in self._buffers:
            if isinstance(state_dict.get(prefix + name), Tensor):
                self._buffers[name] = state_dict[prefix + name]

    return load


def _make_state_dict(base: Type[nn.Module]) -> Callable[..., Any]:
    inner = base.state_dict

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A state_dict() with the rank's parts, as LocalShard."""
        patch_if_imported()
        return inner(self, *args, **kwargs)

    return state_dict


_copying = threading.local()


def _unmanaged(module: nn.Module) -> Tuple[Type[nn.Module], Dict[str, Any]]:
    """The class and the attributes that a module had before shard()."""
    own = {key: value for key, value in module.__dict__.items() if key != MODULE_STATE and not key.startswith("_dc_")}
    return class_before_shard(module), own


def _copy_model(self: nn.Module, memo: Dict[int, Any]) -> nn.Module:
    """deepcopy(): another sharded model with the same values, on the same ranks. Collective."""
    from .shard import copy_of

    root = self.__dict__[MODULE_STATE].root
    root.write_back()  # writes made in an open gathered()
    shapes: Dict[nn.Parameter, torch.Size] = {}
    early = next((entry for entry in root.group.entries if id(entry.param) in memo), None)
    if early is not None:
        raise RuntimeError(f"copy.deepcopy: {early.names[0]} was copied before its sharded model, as an optimizer's in "
                           "front of it, so that copy would belong to no model: put the model first")
    for entry in root.group.entries:
        param = memo[id(entry.param)] = nn.Parameter(entry.data.clone(), entry.param.requires_grad)
        if entry.part is not None:
            shapes[param] = entry.shape
    outer, _copying.root = getattr(_copying, "root", None), root
    try:
        model = _copy_module(self, memo)
    finally:
        _copying.root = outer
    return copy_of(model, root, shapes, memo)


def _copy_module(self: nn.Module, memo: Dict[int, Any]) -> nn.Module:
    """deepcopy() of a module inside a sharded model that is being copied, with its class from before shard(). Modules
    with parametrizations, of torch.fx and of Lightning define __deepcopy__() or __getstate__(), which must not see the
    class of shard()."""
    if getattr(_copying, "root", None) is not self.__dict__[MODULE_STATE].root:
        _refuse_copy(self)
    sharded = type(self), self.__dict__
    try:
        _set_class(self, *_unmanaged(self))
        return copy.deepcopy(self, memo)
    finally:
        _set_class(self, *sharded)


def _set_class(module: nn.Module, kind: Type[nn.Module], attributes: Dict[str, Any]) -> None:
    object.__setattr__(module, "__class__", kind)
    object.__setattr__(module, "__dict__", attributes)


def _refuse_copy(self: nn.Module, *_: Any) -> NoReturn:
    raise TypeError(f"{type(self).__name__} belongs to a sharded model, which cannot be pickled, and copied only as a "
                    "whole: it holds the ranks' communicator. Save full_state_dict(model) instead, and load it into a "
                    "new model")


def _flat_weights(self: nn.Module) -> List[Any]:
    """The weights that nn.LSTM and similar modules read: their own list would hold the shards."""
    return [getattr(self, name) for name in self._flat_weights_names]
