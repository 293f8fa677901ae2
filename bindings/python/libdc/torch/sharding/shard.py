"""shard(): shards a model's training state over the ranks, in place."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from .. import patches
from ..compile import register_backend
from ..default_comm import resolve_comm
from ..planning import BUCKET_SIZE, choose_stage
from . import agreement, managed_modules, meta_init, module_class
from .buffers import refuse_aliases
from .eager import make_saved_tensor_hooks
from .param_group import Options
from .parameter import entry_of, set_param_class
from .policy import Policies, Policy, check as check_policy
from .root import Root
from .sharded_param import ShardedParam


def shard(model: nn.Module, stage: Union[int, str] = 3, *, comm: Any = None, bucket_size: int = BUCKET_SIZE,
          prefetch: int = 1, group_size: int = 1 << 20, reduce_dtype: Optional[torch.dtype] = None,
          param_dtype: Optional[torch.dtype] = None, broadcast: bool = True, check_finite: bool = False,
          device: Any = None, mesh: Any = None, batch: Any = None, unused: Optional[str] = None,
          policy: Optional[Mapping[str, Policy]] = None) -> nn.Module:
    """Shards a model's training state over the ranks, in place, and returns the model.

    stage         what is sharded. 0: nothing, gradients are averaged; 1 and 2: gradients and with them the optimizer's
                  state; 3: weights too. "auto": the planner's choice, the fastest stage that fits; rank 0 prints it
    comm          a libdc.Comm, a torch.distributed ProcessGroup, or None: from the environment that torchrun and
                  `python -m libdc.run` set (one rank without it)
    bucket_size   number of gradient elements that are averaged together
    prefetch      number of groups of parameters to gather ahead of their use; 0: none, each parameter by itself
    group_size    elements of a full group: neighbours in the order of use are gathered together
    reduce_dtype  type in which gradients are averaged; None: their own
    param_dtype   type in which weights are gathered and used; None: their own
    broadcast     False: the ranks' initial weights are equal already. True: all ranks get rank 0's
    mesh          (replicas, shards): hybrid sharding. The ranks are `replicas` groups of `shards` consecutive ranks.
                  The state is sharded inside each group, and each group has all of it. A DeviceMesh of two dimensions
                  means its shape. None: one group
    batch         for stage="auto": the arguments of a rank's forward, as for libdc.torch.plan(), so that activations
                  count; None: they do not
    check_finite  True: gradients are checked for infinities and NaN while they are reduced, for grads_finite()
    unused        "zero": ranks may take different paths through the model in one forward, as with experts or dropped
                  layers. A rank sends its part of the weights that it does not use, and zeros for their gradients.
                  None: that is an error
    policy        {pattern: Policy(...)}: other rules for modules or parameters of those names, see policy.py
    device        where parameters on PyTorch's meta device get memory, on each rank for its part; None: where other
                  parameters are, else PyTorch's default device. They have no values until they are loaded or reset

    Afterwards model.parameters() are the same nn.Parameter objects with the same names, but each holds this rank's flat
    part (at stage 0 the whole). Give them to the optimizer. full_shape() returns a parameter's former shape.

    Parameters and modules may be added later. Another shard() of the model, with the same arguments, includes them; a
    forward before that is an error."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard: model is a {type(model).__name__}, must be a torch.nn.Module")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("shard: called in torch.inference_mode(), whose tensors count no writes: call it outside of "
                           "that; forwards may be inside")
    if stage not in (0, 1, 2, 3, "auto"):
        raise ValueError(f"shard: stage = {stage!r}, must be 0, 1, 2, 3 or 'auto'")
    if batch is not None and stage != "auto":
        raise ValueError(f"shard: batch is of stage = 'auto' alone, and stage = {stage!r}")
    for name, dtype in (("reduce_dtype", reduce_dtype), ("param_dtype", param_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"shard: {name} = {dtype!r}, must be a floating-point torch.dtype or None")
    if unused not in (None, "zero"):
        raise ValueError(f"shard: unused = {unused!r}, must be \"zero\" or None")
    least = {"bucket_size": 1, "prefetch": 0, "group_size": 1}
    for name, value in zip(least, (bucket_size, prefetch, group_size)):
        if not isinstance(value, int) or value < least[name]:
            raise ValueError(f"shard: {name} = {value!r}, must be an integer >= {least[name]}")
    check_policy(policy)
    patches.install()
    known = _root_of_whole(model)
    managed_modules.check_modules(model, known)
    policies = Policies(model, policy, param_dtype, reduce_dtype)
    params = managed_modules.parameters_of(model, policies, known)
    all_ranks = resolve_comm(_world_of(mesh) if comm is None else comm)
    where, replicas = meta_init.target_device(params, device), _replicas_of(mesh, all_ranks.size)
    if stage == "auto":
        stage = known.group.options.stage if known is not None else choose_stage(
            model, batch, all_ranks, where, bucket=bucket_size, prefetch=prefetch, replicas=replicas,
            param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    refuse_aliases(model, params, int(stage))
    options = Options(int(stage), bucket_size, prefetch, group_size, reduce_dtype, param_dtype, bool(check_finite),
                      replicas, unused)
    if known is not None:
        _join(model, known, params, policies, options, bool(broadcast))
        return model
    root = Root(all_ranks, options, where, model, policies)
    agreement.check(root, model, params, {**options._asdict(), "policy": policies, "broadcast": bool(broadcast)})
    empty = meta_init.Uninitialized(model, where, whole=stage == 0)
    if broadcast:
        for tensor in (*dict.fromkeys(param for _, param in params), *model.buffers()):
            if tensor not in empty:
                root.group.broadcast(tensor)
    _manage(model, root, params, empty, {})
    register_backend()
    return model


def _root_of_whole(model: nn.Module) -> Optional[Root]:
    """The root of a model that is sharded already."""
    state = model.__dict__.get(managed_modules.MODULE_STATE)
    return state.root if state is not None and state.root.model() is model else None


def _join(model: nn.Module, root: Root, params: Sequence[Tuple[str, nn.Parameter]], policies: Policies,
          options: Options, broadcast: bool) -> None:
    """Shards parameters that were added since shard(). Collective."""
    if root.depth > 0 or root.block is not None:
        raise RuntimeError("shard: new parameters cannot join inside of a forward or of gathered()")
    agreement.check(root, model, params, {**options._asdict(), "policy": policies, "broadcast": broadcast})
    for name, value in {**options._asdict(), "policy": policies.given}.items():
        first = {**root.group.options._asdict(), "policy": root.policies.given}[name]
        if value != first:
            raise ValueError(f"shard: {name} = {value}, but the model is sharded with {first} already: where "
                             "parameters join, the arguments must be the first call's")
    for name, param in params:
        if meta_init.is_meta(param):
            raise ValueError(f"shard: {name} is on meta: a parameter that joins a sharded model must have values")
        if entry_of(param) is None and param.device != root.group.device:
            raise ValueError(f"shard: {name} is on {param.device}, must be on {root.group.device} as the others are")
    root.prepare_to_join()
    if broadcast:
        new_buffers = (buffer for module in model.modules() if module in root.new_modules
                       for buffer in module._buffers.values() if buffer is not None)
        for tensor in (*dict.fromkeys(param for _, param in params if entry_of(param) is None), *new_buffers):
            root.group.broadcast(tensor)
    entries = {entry.param: entry for entry in root.group.entries}
    new: Dict[nn.Parameter, ShardedParam] = {}
    for entry in entries.values():
        entry.names = [name for name, param in params if param is entry.param] or entry.names
        root.group.context.set_param_name(entry.id, entry.names[0])
    for name, param in params:
        if param in new:
            new[param].names.append(name)
        elif param not in entries:
            new[param] = ShardedParam(root, len(entries) + len(new), name, param, policies.of(param))
    root.group.add_params(list(new.values()))
    root.policies = policies
    _convert(model, root, {**entries, **new}, list(new.values()))


def copy_of(model: nn.Module, source: Root, shapes: Dict[nn.Parameter, torch.Size], memo: Dict[int, Any]) -> nn.Module:
    """Makes a deep copy, whose parameters are parts already, a sharded model of its own. Collective. shapes: the
    wholes' shapes. memo: deepcopy()'s."""
    group = source.group
    policies = Policies(model, source.policies.given, group.options.param_dtype, group.options.reduce_dtype)
    root = Root(group.all_ranks, group.options, group.device, model, policies)
    empty = meta_init.Uninitialized(model, group.device, whole=True)
    if group.uninitialized is not None:
        group.uninitialized.copy_to(empty, memo)
    _manage(model, root, managed_modules.parameters_of(model, policies), empty, shapes)
    return model


def _manage(model: nn.Module, root: Root, params: Sequence[Tuple[str, nn.Parameter]], empty: meta_init.Uninitialized,
            shapes: Dict[nn.Parameter, torch.Size]) -> None:
    entries: Dict[nn.Parameter, ShardedParam] = {}
    for name, param in params:
        if param in entries:
            entries[param].names.append(name)
        else:
            entries[param] = ShardedParam(root, len(entries), name, param, root.policies.of(param), shapes.get(param))
    root.group.register_params(list(entries.values()), empty)
    if root.group.stage == 3:
        root.saved_tensor_hooks = make_saved_tensor_hooks(root)
    _convert(model, root, entries, root.group.entries)


def _convert(model: nn.Module, root: Root, entries: Dict[nn.Parameter, ShardedParam],
             new: Sequence[ShardedParam]) -> None:
    """Gives parameters and modules their classes."""
    for entry in new:
        set_param_class(entry)
        entry.take_direct_gradients()
    for module in model.modules():
        own = [name for name, param in module._parameters.items() if param in entries]
        if (own or module is model or module in root.policies.casts or module_class.has_forward_hooks(module)
                or module_class.reads_others(module)):
            module_class.convert(module, own, root, entries, module is model)
    managed_modules.watch(model, root)
    root.ignored = {id(param): weakref.ref(param) for param, rules in root.policies.params.items() if rules.ignored}
    root.policies.forget_model()


def _world_of(mesh: Any) -> Any:
    """The process group of a DeviceMesh's ranks; None: the ranks of the environment."""
    return torch.distributed.group.WORLD if hasattr(mesh, "mesh") else None


def _replicas_of(mesh: Any, ranks: int) -> int:
    if mesh is None:
        return 1
    if hasattr(mesh, "mesh"):
        if mesh.mesh.flatten().tolist() != list(range(ranks)):
            raise ValueError(f"shard: mesh has the ranks {mesh.mesh.tolist()}, must have 0 to {ranks - 1} in order")
        mesh = tuple(mesh.mesh.shape)
    if not (isinstance(mesh, tuple) and len(mesh) == 2 and all(isinstance(n, int) and n > 0 for n in mesh)):
        raise ValueError(f"shard: mesh = {mesh!r}, must be (replicas, shards), two integers > 0, or a DeviceMesh of "
                         "two dimensions")
    if mesh[0] * mesh[1] != ranks:
        raise ValueError(f"shard: mesh = {mesh} is for {mesh[0] * mesh[1]} ranks, but there are {ranks}")
    return mesh[0]
