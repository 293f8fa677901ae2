"""Questions and blocks of a sharded model: its root, no_sync(), gathered(), statistics and traces."""

from __future__ import annotations

import contextlib
from typing import Iterator, List, Tuple

import libdc
import torch
from torch import nn

from ..patches.distributed_checkpoint import patch_if_imported
from .gathered_weights import GatheredWeights
from .managed_modules import MODULE_STATE
from .parameter import entry_of
from .root import Root
from .sharded_param import ShardedParam


def root_of(call: str, model: nn.Module) -> Root:
    """The root of a sharded model, or of the one that a module or parameter is part of."""
    if isinstance(model, nn.Parameter) and entry_of(model) is not None:
        return entry_of(model).root  # type: ignore[union-attr]
    roots = roots_of(model)
    if len(roots) > 1:
        raise ValueError(f"{call}: {type(model).__name__} has modules of several sharded models: name one of them")
    return roots[0]


def roots_of(model: nn.Module) -> List[Root]:
    """Those of all sharded models in a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, must be a torch.nn.Module")
    owners = (module.__dict__.get(MODULE_STATE) for module in model.modules())
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
        patch_if_imported()  # get_optimizer_state_dict() looks for gradients, before it asks for a state


@contextlib.contextmanager
def gathered(model: nn.Module, write: bool = True) -> Iterator[None]:
    """Inside, the modules' attributes are the whole weights outside of forward too. Collective.

    write   True: values that one rank writes into them, or several ranks alike, are kept on all. False: none are, which
            saves checksums; a write is an error where the tensor's version tells"""
    with contextlib.ExitStack() as blocks:
        for root in roots_of(model):
            blocks.enter_context(_gathered(root, bool(write)))
        yield


@contextlib.contextmanager
def _gathered(root: Root, write: bool) -> Iterator[None]:
    if root.block is not None or root.depth > 0:
        yield  # in another one's, or in a forward
        return
    root.prepare_weights()
    root.block = GatheredWeights(root, write)
    try:
        yield
        root.block.write_back()
    finally:
        root.block = None


def unshard(module: nn.Module) -> None:
    """From now on the weights of a module, of a sharded model or in it, stay whole once they are gathered, until
    reshard(). Starts to gather them, as one, and waits for nothing. Changed weights are gathered anew at their next
    use. Collective."""
    root, entries = _entries_in("unshard", module)
    for entry in entries:
        entry.keeps = root.group.stage == 3
    _start_gathers(root, [entry.id for entry in entries if entry.kept is None])


def reshard(module: nn.Module) -> None:
    """Ends unshard(): weights go back after their use. All ranks must call it."""
    root, entries = _entries_in("reshard", module)
    for entry in entries:
        if entry.keeps:
            entry.keeps, entry.kept = False, None
            root.group.drop_prefetched(entry.id)


def prefetch(module: nn.Module) -> None:
    """Starts to gather a module's weights, as one, and waits for nothing. They go back after their use, or when the
    forward or backward ends that runs now or is next. Collective."""
    root, entries = _entries_in("prefetch", module)
    ids = [entry.id for entry in entries if entry.kept is None]
    root.prefetched.update(ids if root.group.stage == 3 else ())
    _start_gathers(root, ids)


def _entries_in(call: str, module: nn.Module) -> Tuple[Root, List[ShardedParam]]:
    """A module's parameters, in the order of their numbers."""
    root = root_of(call, module)
    entries = {entry.id: entry for inner in module.modules() if MODULE_STATE in inner.__dict__
               for entry in inner.__dict__[MODULE_STATE].entries.values()}
    return root, [entries[id] for id in sorted(entries)]


def _start_gathers(root: Root, ids: List[int]) -> None:
    if root.depth == 0 and not root.in_backward:
        root.prepare_weights()
    if ids and root.group.stage > 0:
        root.group.prefetch(ids)


def grads_finite(model: nn.Module) -> bool:
    """Whether the gradients of the last backward were finite on every rank, as they went out to be averaged. For
    shard(..., check_finite=True). A step of several backwards asks after each of them, or has all but the last in
    no_sync(), whose sums count. Collective."""
    finite = [root.group.context.grads_finite()[0] for root in roots_of(model)]
    return all(finite)


def stats(model: nn.Module, reset: bool = False) -> libdc.MemoryStats:
    """Memory that the library holds and has moved for a model on this rank, in bytes, and counts since the last
    reset."""
    root = root_of("stats", model)
    result = root.group.context.get_memory_stats()
    if reset:
        root.group.context.reset_stats()
    return result


def trace_start(model: nn.Module, capacity: int = 65536) -> None:
    """Records the last `capacity` pieces of the library's work from now on; 0 stops and forgets."""
    root_of("trace_start", model).group.context.trace_start(capacity)


def trace_read(model: nn.Module, limit: int = 65536) -> List[libdc.TraceEvent]:
    """The pieces of work that were recorded and not read yet, oldest first. op is the operator's name, id the
    parameter's number in order of model.parameters()."""
    events = root_of("trace_read", model).group.context.trace_read(limit)
    return [event._replace(op=event.op.name.lower()) for event in events]
