"""Questions and blocks of a sharded model: its root, no_sync(), gathered(), statistics and traces."""

from __future__ import annotations

import contextlib
from typing import Iterator, List

import libdc
import torch
from torch import nn

from .gathered_weights import GatheredWeights
from .managed_modules import MODULE_STATE
from .parameter import entry_of
from .root import Root


def root_of(model: nn.Module) -> Root:
    """The root of a sharded model, or of the one that a module or parameter is part of."""
    if isinstance(model, nn.Parameter) and entry_of(model) is not None:
        return entry_of(model).root  # type: ignore[union-attr]
    return roots_of(model)[0]


def roots_of(model: nn.Module) -> List[Root]:
    """Those of all sharded models in a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, must be a torch.nn.Module")
    own = model.__dict__.get(MODULE_STATE)
    if own is not None:
        return [own.root]
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


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, the modules' attributes are the whole weights outside of forward too. Values that all ranks write into
    them alike are kept. Collective."""
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
    """Memory that the library holds and has moved for a model on this rank, in bytes, and counts since the last
    reset."""
    root = root_of(model)
    result = root.group.context.get_memory_stats()
    if reset:
        root.group.context.reset_stats()
    return result


def trace_start(model: nn.Module, capacity: int = 65536) -> None:
    """Records the last `capacity` pieces of the library's work from now on; 0 stops and forgets."""
    root_of(model).group.context.trace_start(capacity)


def trace_read(model: nn.Module, limit: int = 65536) -> List[libdc.TraceEvent]:
    """The pieces of work that were recorded and not read yet, oldest first. op is the operator's name, id the
    parameter's number in order of model.parameters()."""
    return [event._replace(op=event.op.name.lower()) for event in root_of(model).group.context.trace_read(limit)]
