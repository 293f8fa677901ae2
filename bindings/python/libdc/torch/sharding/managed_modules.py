"""The modules of a sharded model: which ones shard() refuses, and which may be added later.

A parameter that is added later would be trained by each rank alone, until shard() is called again. PyTorch has global
hooks for the registration of parameters and modules. By them a sharded model records new parameters, and refuses those
that would replace known ones."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import nn
from torch.nn.modules.module import (register_module_module_registration_hook,
                                     register_module_parameter_registration_hook)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..dtypes import PARAM_DTYPES
from .meta_init import is_meta
from .parameter import entry_of
from .policy import Policies
from .root import Root
from .sharded_param import ShardedParam

MODULE_STATE = "_dc"  # key in the __dict__ of a module that owns parameters: its ModuleState

_managed_roots: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Root]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_hooks_registered = False


def managed_param(module: nn.Module, name: str, param: Any) -> Optional[ShardedParam]:
    """The entry of a parameter, if shard() found it in this module under this name."""
    state = module.__dict__.get(MODULE_STATE)
    entry = None if state is None else state.entries.get(name)
    return entry if entry is not None and entry.param is param else None


# Modules and parameters that shard() refuses

_UNWRAP = "averages gradients itself, as sharded models do: call shard() on the model inside it (model.module)"


def _wrapper_name(module: nn.Module) -> Optional[str]:
    """The name of the class by which a module trains on several ranks in another way; None if there is none."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.") and kind.__name__ in (
                "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DDP"):
            return "module of replicate()" if kind.__name__ == "DDP" else kind.__name__
    return None


def check_modules(model: nn.Module, root: Optional[Root] = None) -> None:
    """Raises for modules that a sharded model cannot have. root: that of the model if it is sharded already."""
    for prefix, module in model.named_modules():
        where = prefix or "the model"
        if root is not None and module.__dict__.get(MODULE_STATE) is not None \
                and module.__dict__[MODULE_STATE].root is root:
            continue
        if _wrapper_name(module) is not None:
            raise ValueError(f"shard: {where} is a {_wrapper_name(module)}, which {_UNWRAP}")
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(recurse=False), None) is not None:
            raise ValueError(f"shard: {where} is a {type(module).__name__} of torch.jit, which reads its parameters "
                             "without Python, and so would find parts of them: give shard() the module that was "
                             "scripted or traced, or compile it by torch.compile()")
        if MODULE_STATE in module.__dict__:
            raise ValueError(f"shard: {where} is sharded already: shard() takes a whole model")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module.max_norm is not None:
                raise ValueError(f"shard: {where} has max_norm = {module.max_norm}, with which each rank's forward "
                                 "writes into its copy of the weights: make it None, and rescale the rows after the "
                                 "optimizer's step, in `with libdc.torch.gathered(model):`")
            if module.sparse:
                raise ValueError(f"shard: {where} has sparse = True, but gradients are averaged dense: make it False")


def parameters_of(model: nn.Module, policies: Policies,
                  root: Optional[Root] = None) -> List[Tuple[str, nn.Parameter]]:
    """Every (name, parameter) that is not ignored; tied ones under each name. Raises for parameters that cannot be
    sharded. root: that of the model if it is sharded already."""
    found: List[Tuple[str, nn.Parameter]] = []
    memory: Dict[int, Tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            name = f"{prefix}.{name}" if prefix else name
            entry = entry_of(param)
            if entry is not None:
                if root is None or entry.root_ref() is not root:
                    raise ValueError(f"shard: {name} is {entry.names[0]} of a model that is sharded already, and each "
                                     "would average its gradient: give models that share parameters to one shard(), "
                                     "in a module around them")
                found.append((name, param))
                continue
            if policies.of(param).ignored:
                if is_meta(param):
                    raise ValueError(f"shard: {name} is on meta and ignored by the policy: give it values before")
                continue
            _check_parameter(name, param)
            if is_meta(param):
                found.append((name, param))
                continue
            other = next((pair for pair in found if not is_meta(pair[1])), (name, param))
            if param.device != other[1].device:
                raise ValueError(f"shard: {name} is on {param.device}, but {other[0]} is on {other[1].device}: all "
                                 "parameters must be on one device")
            same = memory.setdefault(param.data_ptr(), (name, param)) if param.numel() else (name, param)
            if same[1] is not param:
                raise ValueError(f"shard: {name} shares memory with {same[0]}, but is another nn.Parameter: to tie "
                                 "weights, assign one object to both names")
            found.append((name, param))
    return found


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ValueError(f"shard: {name} is not initialised yet: run the model once before")
    if is_traceable_wrapper_subclass(param):
        raise ValueError(f"shard: {name} is a {type(param).__name__}, must be a plain torch.nn.Parameter: libdc does "
                         "not combine with tensor parallelism, FSDP2 or quantized parameters")
    if param.is_inference():
        raise ValueError(f"shard: {name} was made in torch.inference_mode(), whose tensors count no writes: make the "
                         "model outside of that; forwards may be inside")
    if param.dtype not in PARAM_DTYPES:
        raise ValueError(f"shard: {name} has type {param.dtype}, must be one of "
                         f"{', '.join(map(str, PARAM_DTYPES))}, or ignored by policy=")
    if param.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"shard: {name} is on {param.device}, must be on the cpu, on a cuda device or on meta")
    if not param.is_leaf or param.layout != torch.strided:
        raise ValueError(f"shard: {name} must be a strided leaf tensor")
    grad_dtype = getattr(param, "grad_dtype", None)  # since PyTorch 2.10; None: any
    if grad_dtype not in (None, param.dtype):
        raise ValueError(f"shard: {name} has grad_dtype = {grad_dtype}, must be its own type {param.dtype} or None: "
                         "gradients have the parameter's type; reduce_dtype is for their sums")
    if param._backward_hooks:
        raise ValueError(f"shard: {name} has a hook of register_hook(), but in a sharded model autograd has no "
                         "gradient for it: change .grad after backward(), or in register_post_accumulate_grad_hook()")


# Modules and parameters that are added later


def watch(model: nn.Module, root: Root) -> None:
    """Makes the model's modules record new parameters from now on."""
    global _hooks_registered
    with _lock:
        if not _hooks_registered:
            _hooks_registered = True
            register_module_parameter_registration_hook(_on_parameter)
            register_module_module_registration_hook(_on_module)
            for kind in (nn.ModuleList, nn.Sequential):
                kind.insert = _make_insert(kind.insert)  # type: ignore[method-assign]
    reference = weakref.ref(root)
    for module in model.modules():
        _managed_roots[module] = reference


def _managing_root(module: nn.Module) -> Optional[Root]:
    reference = _managed_roots.get(module)
    return None if reference is None else reference()


def _on_parameter(module: nn.Module, name: str, param: Optional[nn.Parameter]) -> None:
    root = _managing_root(module)
    if param is None or root is None or managed_param(module, name, param) is not None:
        return
    state = module.__dict__.get(MODULE_STATE)
    if state is not None and name in state.entries:
        _raise_replaced(type(module).__name__, name, param)
    _note_new(root, type(module).__name__, name, param)


def _make_insert(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a list's insert(), which calls no hook. Modules after the new one keep their parameters, under other
    names."""

    @functools.wraps(inner)
    def insert(self: nn.Module, index: int, module: nn.Module) -> Any:
        if isinstance(module, nn.Module):
            _note_module(self, str(index), module, None)
        return inner(self, index, module)

    return insert


def _on_module(module: nn.Module, name: str, added: Optional[nn.Module]) -> None:
    if added is not None:
        _note_module(module, name, added, module._modules.get(name))


def _note_module(module: nn.Module, name: str, added: nn.Module, old: Optional[nn.Module]) -> None:
    """Records an added module's parameters, or raises. old: the module that it replaces."""
    root = _managing_root(module)
    if root is None:
        wrapper = _wrapper_name(module)
        # replicate() passes a list of the parameters to DistributedDataParallel.
        if wrapper is not None and any(entry_of(param) is not None for param in added.parameters()):
            raise ValueError(f"{wrapper}: the model is sharded by libdc.torch.shard(), which averages its gradients: "
                             "train it as it is, without a wrapper; libdc.torch.frameworks has classes for "
                             "Transformers' Trainer, Accelerate and Lightning")
        return
    inside = set(added.modules())
    replaces = old is not None and any(lost.__dict__[MODULE_STATE].entries for lost in old.modules()
                                       if lost not in inside and MODULE_STATE in lost.__dict__)
    for prefix, inner in added.named_modules():
        for own, param in inner._parameters.items():
            if param is not None and managed_param(inner, own, param) is None:
                if replaces:
                    _raise_replaced(type(module).__name__, name, param)
                _note_new(root, type(module).__name__, ".".join(filter(None, (name, prefix, own))), param)
    for inner in inside:
        if _managed_roots.setdefault(inner, weakref.ref(root))() is root and MODULE_STATE not in inner.__dict__:
            root.new_modules.add(inner)


def _note_new(root: Root, kind: str, name: str, param: nn.Parameter) -> None:
    entry = entry_of(param)
    if entry is not None:
        raise ValueError(f"{name} of {kind} would be another name or place of the sharded parameter {entry.names[0]}: "
                         "tie, move and parametrize weights before libdc.torch.shard()")
    ignored = root.ignored.get(id(param))
    if ignored is None or ignored() is not param:
        root.new_params[f"{name} of {kind}"] = weakref.ref(param)


def _raise_replaced(kind: str, name: str, param: Optional[nn.Parameter]) -> None:
    entry = None if param is None else entry_of(param)
    if entry is not None:
        raise ValueError(f"{name} of {kind} would be another name or place of the sharded parameter {entry.names[0]}: "
                         "tie, move and parametrize weights before libdc.torch.shard()")
    raise ValueError(f"{name} of {kind} would take the place of a sharded parameter: replace parameters before "
                     "libdc.torch.shard(); to load weights, use load_state_dict() without assign=True")
