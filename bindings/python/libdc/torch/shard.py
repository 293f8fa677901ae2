"""shard(): training state of a model spread over the ranks, in place, and what a user asks a sharded model."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Type

import libdc
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import compile as _compile
from . import devices, members, patches
from .eager import Owner, make_saved_tensor_hooks
from .sharded_param import ShardedParam
from .group import comm_of
from .members import KEY
from .parameter import entry_of, set_param_class, plain, split
from .param_group import Options
from .root import Root
from .whole import GatheredWeights


def shard(model: nn.Module, stage: int = 3, *, comm: Any = None, bucket_size: int = 1 << 20, prefetch: int = 1,
          group_size: int = 1 << 18, reduce_dtype: Optional[torch.dtype] = None,
          param_dtype: Optional[torch.dtype] = None, broadcast: bool = True, check_finite: bool = False) -> nn.Module:
    """Spreads a model's training state over the ranks, in place, and returns the model.

    stage         0: nothing is spread, gradients are averaged; 1 and 2: gradients and with them the optimizer's state;
                  3: the weights too
    comm          a libdc.Comm, a torch.distributed ProcessGroup, or None: from the environment that torchrun and
                  `python -m libdc.run` set (one rank without it)
    bucket_size   gradient elements that are averaged as one
    prefetch      how many groups of parameters are gathered ahead of their use; 0: none, one by one
    group_size    elements with which a group is full: neighbours in the order of use are gathered as one
    reduce_dtype  in which gradients are averaged; None: as they come
    param_dtype   in which weights are gathered and used; None: as they are
    broadcast     False: the ranks' initial weights are the same already; else they become rank 0's
    check_finite  True: gradients are looked at while they are taken, for grads_finite()

    Afterwards model.parameters() are the same nn.Parameter objects with the same names, but each holds this rank's
    part, flat (at stage 0 the whole): what optimizers are for. full_shape() tells a parameter's former shape."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard: model is a {type(model).__name__}, must be a torch.nn.Module")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"shard: stage = {stage!r}, must be 0, 1, 2 or 3")
    for name, dtype in (("reduce_dtype", reduce_dtype), ("param_dtype", param_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"shard: {name} = {dtype!r}, must be a floating-point torch.dtype or None")
    least = {"bucket_size": 1, "prefetch": 0, "group_size": 1}
    for name, value in zip(least, (bucket_size, prefetch, group_size)):
        if not isinstance(value, int) or value < least[name]:
            raise ValueError(f"shard: {name} = {value!r}, must be an integer >= {least[name]}")
    patches.install()
    members.check_modules(model)
    params = members.parameters_of(model)
    root = Root(comm_of(comm), Options(stage, bucket_size, prefetch, group_size, reduce_dtype, param_dtype,
                                                 bool(check_finite)),
                params[0][1].device if params else devices.CPU, model)
    entries: Dict[nn.Parameter, ShardedParam] = {}
    for name, param in params:
        if param in entries:
            entries[param].names.append(name)
        else:
            entries[param] = ShardedParam(root, len(entries), name, param)
    if broadcast:
        for tensor in (*entries, *model.buffers()):
            root.group.broadcast(tensor)
    root.group.register_params(list(entries.values()))
    root.saved_tensor_hooks = make_saved_tensor_hooks(root)
    for entry in root.group.entries:
        set_param_class(entry)
    for module in model.modules():
        own = [name for name, param in module._parameters.items() if param is not None]
        if own or module is model or _has_hooks(module):
            _convert(module, own, root, entries, module is model)
    members.refuse_new_params(model, root)
    _compile.register_backend()
    return model


class _Kind(NamedTuple):
    """Of which module's class is made. hooked: it has forward hooks, which see whole weights as forward does."""

    base: Type[nn.Module]
    names: Tuple[str, ...]  # of parameters, which become properties
    is_root: bool
    hooked: bool


_classes: Dict[_Kind, Type[nn.Module]] = {}


def _convert(module: nn.Module, names: List[str], root: Root, entries: Dict[nn.Parameter, ShardedParam],
             is_root: bool) -> None:
    owner = Owner(root)
    for name in names:
        owner.entries[name] = entries[module._parameters[name]]
    module.__dict__[KEY] = owner
    _compile.describe(module, root, {name: (entry.id, entry.dtype) for name, entry in owner.entries.items()})
    module.__class__ = _class_of(_Kind(type(module), tuple(names), is_root, _has_hooks(module)))


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _class_of(kind: _Kind) -> Type[nn.Module]:
    if kind not in _classes:
        base = kind.base
        body: Dict[str, Any] = {name: property(_reader(name)) for name in kind.names}
        body["forward"] = _gathering(base.forward, kind.is_root)
        if kind.hooked:
            body["_call_impl"] = _gathering(base._call_impl, kind.is_root)
        else:
            for name in ("register_forward_hook", "register_forward_pre_hook"):
                body[name] = _hooking(getattr(base, name), kind)
        body["_apply"] = _apply_of(base)
        body["_load_from_state_dict"] = _load_of(base)
        body["__module__"], body["__qualname__"], body["__doc__"] = base.__module__, base.__qualname__, base.__doc__
        body["__reduce_ex__"] = _refuse_copies
        if isinstance(getattr(base, "_flat_weights", None), property) or issubclass(base, nn.RNNBase):
            body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
            body["flatten_parameters"] = lambda self: None  # would move them
        if kind.is_root:
            body["state_dict"] = _state_of(base)
        _classes[kind] = type(base.__name__, (base,), body)
    return _classes[kind]


def _reader(name: str) -> Callable[[nn.Module], Any]:
    def read(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():
            return _compile.read(self, name)
        try:
            param = self._parameters[name]
        except KeyError:
            raise RuntimeError(f"{name} of {type(self).__name__} was taken away from a sharded model: tie, move and "
                               "parametrize weights before libdc.torch.shard()") from None
        return self.__dict__[KEY].read(name, param)

    return read


def _gathering(inner: Callable[..., Any], is_root: bool) -> Callable[..., Any]:
    """A method of a module in which its parameters are whole."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if is_root:
                _compile.begin_forward(self)
            return inner(self, *args, **kwargs)
        return self.__dict__[KEY].call(inner, self, args, kwargs)

    method.__name__ = inner.__name__
    return method


def _hooking(inner: Callable[..., Any], kind: _Kind) -> Callable[..., Any]:
    """A method that registers a forward hook."""

    @functools.wraps(inner)
    def register(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = inner(self, *args, **kwargs)
        if type(self) is _classes[kind]:
            self.__class__ = _class_of(kind._replace(hooked=True))
        return handle

    return register


def _apply_of(base: Type[nn.Module]) -> Callable[..., nn.Module]:
    inner = base._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        """Moves and casts: only those that change nothing are possible, since libdc holds the shards' addresses."""
        fn = _in_place(fn)
        for name, param in self._parameters.items():
            if param is None or name not in self.__dict__[KEY].entries:
                continue
            with torch.no_grad():
                result = fn(param)
            if result.data_ptr() != param.data_ptr() or result.dtype != param.dtype:
                raise RuntimeError(f"{self.__dict__[KEY].entries[name].names[0]}: a sharded model cannot be moved or "
                                   "cast; do it before shard(), or use its param_dtype")
        return inner(self, fn, *args, **kwargs)

    return apply


def _in_place(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """fn, whose result is its argument where it is no more than a copy of it: PyTorch copies for "cpu:0", which is the
    only CPU there is."""

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


def _load_of(base: Type[nn.Module]) -> Callable[..., None]:
    inner = base._load_from_state_dict

    def load(self: nn.Module, state_dict: Dict[str, Any], prefix: str, *args: Any) -> None:
        """Of whole weights each rank takes its part; parts are loaded as they are."""
        given = {}
        for name, entry in self.__dict__[KEY].entries.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == entry.shape != entry.data.shape:
                given[prefix + name] = value
                part = state_dict[prefix + name] = entry.data.new_zeros(entry.data.shape)
                split(entry, plain(value), part)
        try:
            inner(self, state_dict, prefix, *args)
        finally:
            state_dict.update(given)

    return load


def _state_of(base: Type[nn.Module]) -> Callable[..., Any]:
    inner = base.state_dict

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Parts, which say that they are: see parameter.py."""
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise RuntimeError("torch.distributed.checkpoint does not know sharded models of libdc.torch: use "
                               "libdc.torch.save_checkpoint(), or full_state_dict() and full_optimizer_state_dict()")
        return inner(self, *args, **kwargs)

    return state_dict


def _refuse_copies(self: nn.Module, protocol: int) -> Any:
    raise TypeError(f"{type(self).__name__} belongs to a sharded model, which cannot be pickled or copied: it holds "
                    "the ranks' communicator. Save full_state_dict(model) instead, and load it into a new model")


def _flat_weights(self: nn.Module) -> List[Any]:
    """What nn.LSTM and its like read: their own list would hold the shards."""
    return [getattr(self, name) for name in self._flat_weights_names]


def root_of(model: nn.Module) -> Root:
    """The root of a sharded model, or of the one that a module or parameter is part of."""
    if isinstance(model, nn.Parameter) and entry_of(model) is not None:
        return entry_of(model).root  # type: ignore[union-attr]
    return roots_of(model)[0]


def roots_of(model: nn.Module) -> List[Root]:
    """Those of all sharded models in a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, must be a torch.nn.Module")
    own = model.__dict__.get(KEY)
    if own is not None:
        return [own.root]
    owners = (module.__dict__.get(KEY) for module in model.modules())
    roots = list(dict.fromkeys(owner.root for owner in owners if owner is not None))
    if not roots:
        raise ValueError("not a sharded model: call libdc.torch.shard(model) first")
    return roots


def full_shape(param: nn.Parameter) -> torch.Size:
    """A parameter's shape before shard(); of any other tensor its shape."""
    entry = entry_of(param)
    return param.shape if entry is None else entry.shape


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside only sum gradients on this rank, whole; the next one outside averages them with its own. Until
    then `.grad` does not have them. Sums are in the wider of the gradients' type and `reduce_dtype`. model: all of a
    sharded model, or a module around several."""
    roots = roots_of(model)
    for root in roots:
        if root.model() is not None and root.model() not in model.modules():
            raise ValueError(f"no_sync: {type(model).__name__} is a module of a sharded model, whose gradients are "
                             "averaged together: name the model that shard() was given")
    outer = [root.reduce_grads for root in roots]
    for root in roots:
        root.reduce_grads = False
    try:
        yield
    finally:
        for root, before in zip(roots, outer):
            root.reduce_grads = before


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, the modules' attributes are the whole weights outside of forward too. What all ranks write into them
    alike is kept. Collective."""
    with contextlib.ExitStack() as blocks:
        for root in roots_of(model):
            blocks.enter_context(_gathered(root))
        yield


@contextlib.contextmanager
def _gathered(root: Root) -> Iterator[None]:
    if root.block is not None or root.depth > 0:
        yield  # in another one's, or in a forward
        return
    root.prepare_weights()
    root.block = GatheredWeights(root)
    try:
        yield
        root.block.write_back()
    finally:
        root.block = None


def grads_finite(model: nn.Module) -> bool:
    """Whether the gradients of the last backward were finite on every rank, as they went out to be averaged. For
    shard(..., check_finite=True). A step of several backwards asks after each of them, or has all but the last in
    no_sync(), whose sums count. Collective."""
    finite = [root.group.context.grads_finite()[0] for root in roots_of(model)]
    return all(finite)


def stats(model: nn.Module, reset: bool = False) -> libdc.MemoryStats:
    """What the library holds and moved for a model on this rank, in bytes and counts since the last reset."""
    root = root_of(model)
    result = root.group.context.get_memory_stats()
    if reset:
        root.group.context.reset_stats()
    return result


def trace_start(model: nn.Module, capacity: int = 65536) -> None:
    """Keeps the last `capacity` pieces of the library's work from now on; 0 stops and forgets."""
    root_of(model).group.context.trace_start(capacity)


def trace_read(model: nn.Module, limit: int = 65536) -> List[libdc.TraceEvent]:
    """What was kept, oldest first, and not read yet; op is the operator's name, id the parameter's number in order of
    model.parameters()."""
    return [event._replace(op=event.op.name.lower()) for event in root_of(model).group.context.trace_read(limit)]


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Announces the parameters that an optimizer has stepped to their models."""
    stepped: Dict[Root, List[ShardedParam]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = entry_of(param)
            if entry is not None and param.grad is not None and entry.alive:
                entry.updates += 1
                stepped.setdefault(entry.root, []).append(entry)
    for root, entries in stepped.items():
        root.group.params_updated(entries if len(entries) < len(root.group.entries) else None)


def announce_steps() -> None:
    register_optimizer_step_post_hook(_after_step)
