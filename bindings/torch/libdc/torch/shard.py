"""shard(): training state of a model spread over the ranks, in place, and what a user asks a sharded model."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Type

import libdc
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import compile as _compile
from . import devices
from .eager import Owner, saving_hooks
from .group import comm_of
from .root import Entry, Options, Root

_KEY = "_dc"  # in the __dict__ of a module that owns parameters: its Owner


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
    least = {"bucket_size": 1, "prefetch": 0, "group_size": 1}
    for name, value in zip(least, (bucket_size, prefetch, group_size)):
        if not isinstance(value, int) or value < least[name]:
            raise ValueError(f"shard: {name} = {value!r}, must be an integer >= {least[name]}")
    params = _parameters_of(model)
    root = Root(comm_of(comm), Options(stage, bucket_size, prefetch, group_size, reduce_dtype, param_dtype,
                                                 bool(check_finite)),
                params[0][1].device if params else devices.CPU)
    entries: Dict[nn.Parameter, Entry] = {}
    for name, param in params:
        if param in entries:
            entries[param].names.append(name)
        else:
            entries[param] = Entry(root, len(entries), name, param)
    if broadcast:
        _broadcast(root, [*entries, *model.buffers()])
    root.adopt(list(entries.values()))
    root.saving = saving_hooks(root)
    for entry in root.entries:
        entry.param.dc_entry = entry  # the hook below finds its way from an optimizer's parameters
    for module in model.modules():
        own = [name for name, param in module._parameters.items() if param is not None]
        if own or module is model:
            _convert(module, own, root, entries, module is model)
    _compile.register_backend()
    return model


def _parameters_of(model: nn.Module) -> List[Tuple[str, nn.Parameter]]:
    """Every (name, parameter), tied ones under each name. Raises for what cannot be sharded."""
    found: List[Tuple[str, nn.Parameter]] = []
    memory: Dict[int, Tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        if _KEY in module.__dict__:
            raise ValueError(f"shard: {prefix or 'the model'} is sharded already")
        for name, param in module._parameters.items():
            if param is None:
                continue
            name = f"{prefix}.{name}" if prefix else name
            if isinstance(param, nn.parameter.UninitializedParameter):
                raise ValueError(f"shard: {name} is not initialised yet: run the model once before")
            if param.device.type not in ("cpu", "cuda"):
                raise ValueError(f"shard: {name} is on {param.device}, must be on the cpu or on a cuda device")
            if found and param.device != found[0][1].device:
                first, where = found[0][0], found[0][1].device
                raise ValueError(f"shard: {name} is on {param.device}, but {first} is on {where}: all parameters must "
                                 "be on one device")
            if not param.is_leaf or param.layout != torch.strided:
                raise ValueError(f"shard: {name} must be a strided leaf tensor")
            same = memory.setdefault(param.data_ptr(), (name, param)) if param.numel() else (name, param)
            if same[1] is not param:
                raise ValueError(f"shard: {name} shares memory with {same[0]}, but is another nn.Parameter: to tie "
                                 "weights, assign one object to both names")
            found.append((name, param))
    return found


def _broadcast(root: Root, tensors: List[Tensor]) -> None:
    """Every rank gets rank 0's values."""
    if root.comm.size == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            flat = tensor.detach().contiguous().view(-1).view(torch.int8)  # any type: bytes travel
            root.comm_for(flat.device).broadcast(flat, 0, stream=devices.current_stream(flat.device))
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


# Classes whose parameters are properties: one for each class, names of parameters, and whether it is the root.
_classes: Dict[Tuple[Type[nn.Module], Tuple[str, ...], bool], Type[nn.Module]] = {}


def _convert(module: nn.Module, names: List[str], root: Root, entries: Dict[nn.Parameter, Entry],
             is_root: bool) -> None:
    owner = Owner(root)
    for name in names:
        owner.entries[name] = entries[module._parameters[name]]
    module.__dict__[_KEY] = owner
    _compile.describe(module, root, {name: (entry.id, entry.dtype) for name, entry in owner.entries.items()})
    base = type(module)
    key = (base, tuple(names), is_root)
    if key not in _classes:
        _classes[key] = _subclass(base, names, is_root)
    module.__class__ = _classes[key]


def _subclass(base: Type[nn.Module], names: List[str], is_root: bool) -> Type[nn.Module]:
    body: Dict[str, Any] = {name: property(_reader(name)) for name in names}
    body["forward"] = _forward_of(base, is_root)
    body["_apply"] = _apply_of(base)
    body["__module__"], body["__qualname__"], body["__doc__"] = base.__module__, base.__qualname__, base.__doc__
    body["__reduce_ex__"] = _refuse_copies
    if isinstance(getattr(base, "_flat_weights", None), property) or issubclass(base, nn.RNNBase):
        body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    return type(base.__name__, (base,), body)


def _reader(name: str) -> Callable[[nn.Module], Any]:
    def read(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():
            return _compile.read(self, name)
        return self.__dict__[_KEY].read(name, self._parameters[name])

    return read


def _forward_of(base: Type[nn.Module], is_root: bool) -> Callable[..., Any]:
    inner = base.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if is_root:
                _compile.begin_forward(self)
            return inner(self, *args, **kwargs)
        return self.__dict__[_KEY].call(inner, self, args, kwargs)

    return forward


def _apply_of(base: Type[nn.Module]) -> Callable[..., nn.Module]:
    inner = base._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        """Moves and casts: only those that change nothing are possible, since libdc holds the shards' addresses."""
        for name, param in self._parameters.items():
            if param is None or name not in self.__dict__[_KEY].entries:
                continue
            with torch.no_grad():
                result = fn(param)
            if result.data_ptr() != param.data_ptr() or result.dtype != param.dtype:
                raise RuntimeError(f"{self.__dict__[_KEY].entries[name].names[0]}: a sharded model cannot be moved or "
                                   "cast; do it before shard(), or use its param_dtype")
        return inner(self, fn, *args, **kwargs)

    return apply


def _refuse_copies(self: nn.Module, protocol: int) -> Any:
    raise TypeError(f"{type(self).__name__} belongs to a sharded model, which cannot be pickled or copied: it holds "
                    "the ranks' communicator. Save full_state_dict(model) instead, and load it into a new model")


def _flat_weights(self: nn.Module) -> List[Any]:
    """What nn.LSTM and its like read: their own list would hold the shards."""
    return [getattr(self, name) for name in self._flat_weights_names]


def root_of(model: nn.Module) -> Root:
    """The root of a sharded model, or of the one that a module or parameter is part of."""
    if not isinstance(model, (nn.Module, nn.Parameter)):
        raise TypeError(f"model is a {type(model).__name__}, must be a torch.nn.Module")
    for module in [model] if isinstance(model, nn.Parameter) else model.modules():
        owner = module.__dict__.get(_KEY)
        if owner is not None:
            return owner.root
    raise ValueError("not a sharded model: call libdc.torch.shard(model) first")


def full_shape(param: nn.Parameter) -> torch.Size:
    """A parameter's shape before shard(); of any other tensor its shape."""
    entry = entry_of(param)
    return param.shape if entry is None else entry.shape


def entry_of(param: Any) -> Optional[Entry]:
    entry = getattr(param, "dc_entry", None)
    return entry if entry is not None and entry.param is param else None


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside only sum gradients on this rank, whole; the next one outside averages them with its own. Until
    then `.grad` does not have them."""
    root = root_of(model)
    outer, root.synchronised = root.synchronised, False
    try:
        yield
    finally:
        root.synchronised = outer


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, the modules' attributes are the whole weights outside of forward too, to read. Collective."""
    root = root_of(model)
    if root.depth == 0:
        root.enter(None)
    root.depth += 1
    try:
        yield
    finally:
        root.depth -= 1
        if root.depth == 0:
            root.leave()


def grads_finite(model: nn.Module) -> bool:
    """Whether the gradients of the last backward were finite on every rank, as they went out to be averaged. For
    shard(..., check_finite=True). A step of several backwards asks after each of them, or has all but the last in
    no_sync(), whose sums count. Collective."""
    return root_of(model).context.grads_finite()[0]


def stats(model: nn.Module, reset: bool = False) -> libdc.MemoryStats:
    """What the library holds and moved for a model on this rank, in bytes and counts since the last reset."""
    root = root_of(model)
    result = root.context.get_memory_stats()
    if reset:
        root.context.reset_stats()
    return result


def trace_start(model: nn.Module, capacity: int = 65536) -> None:
    """Keeps the last `capacity` pieces of the library's work from now on; 0 stops and forgets."""
    root_of(model).context.trace_start(capacity)


def trace_read(model: nn.Module, limit: int = 65536) -> List[libdc.TraceEvent]:
    """What was kept, oldest first, and not read yet; op is the operator's name, id the parameter's number in order of
    model.parameters()."""
    return [event._replace(op=event.op.name.lower()) for event in root_of(model).context.trace_read(limit)]


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Tells each root whose parameters an optimizer has stepped. Parameters of other models cost a look."""
    stepped: Dict[Root, List[Entry]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = entry_of(param)
            if entry is not None and param.grad is not None:
                entry.updates += 1
                stepped.setdefault(entry.root, []).append(entry)
    for root, entries in stepped.items():
        root.updated(entries if len(entries) < len(root.entries) else None)


register_optimizer_step_post_hook(_after_step)
