"""Functions on a sharded model: its root, no_sync(), gathered(), statistics and traces."""

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
    """The root of a sharded model, or of the one that contains a module or parameter."""
    if isinstance(model, nn.Parameter) and entry_of(model) is not None:
        return entry_of(model).root  # type: ignore[union-attr]
    roots = roots_of(model)
    if len(roots) > 1:
        raise ValueError(f"{call}: {type(model).__name__} has modules of several sharded models: name one of them")
    return roots[0]


def roots_of(model: nn.Module) -> List[Root]:
    """The roots of all sharded models in a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, must be a torch.nn.Module")
    owners = (module.__dict__.get(MODULE_STATE) for module in model.modules())
    roots = list(dict.fromkeys(owner.root for owner in owners if owner is not None))
    if not roots:
        raise ValueError("not a sharded model: call libdc.torch.shard(model) first")
    return roots


def full_shape(param: nn.Parameter) -> torch.Size:
    """A parameter's shape before shard(); for any other tensor its shape."""
    entry = entry_of(param)
    return param.shape if entry is None else entry.shape


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside only sum whole gradients on this rank; the next one outside averages them together with its own.
    Until then they are not in `.grad`. Sums are in the wider of the gradients' type and `reduce_dtype`. model: a whole
    sharded model, or a module that contains several."""
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
        patch_if_imported()  # get_optimizer_state_dict() looks for gradients before it reads states


@contextlib.contextmanager
def gathered(model: nn.Module, write: bool = True) -> Iterator[None]:
    """Inside, modules' attributes are whole weights outside of forwards too. Collective.

    write   True: values that one rank, or several ranks equally, write into them are kept on all ranks. False: none
            are kept, which saves checksums; a write is an error if the tensor's version shows it"""
    with contextlib.ExitStack() as blocks:
        for root in roots_of(model):
            blocks.enter_context(_gathered(root, bool(write)))
        yield


@contextlib.contextmanager
def _gathered(root: Root, write: bool) -> Iterator[None]:
    if root.block is not None or root.depth > 0:
        yield  # inside another block, or a forward
        return
    root.prepare_weights()
    root.block = GatheredWeights(root, write)
    try:
        yield
        root.block.write_back()
    finally:
        root.block = None


def unshard(module: nn.Module) -> None:
    """Keeps the weights of a sharded model, or of a module in one, whole until reshard(). Starts to gather them as one,
    and does not wait. Changed weights are gathered again at their next use. Collective."""
    root, entries = _entries_in("unshard", module)
    for entry in entries:
        entry.keeps = root.group.stage == 3
    _start_gathers(root, [entry.id for entry in entries if entry.kept is None])


def reshard(module: nn.Module) -> None:
    """Ends unshard(): weights are freed after their use again. All ranks must call it."""
    root, entries = _entries_in("reshard", module)
    for entry in entries:
        if entry.keeps:
            entry.keeps, entry.kept = False, None
            root.group.drop_prefetched(entry.id)


def prefetch(module: nn.Module) -> None:
    """Starts to gather a module's weights as one, and does not wait. They are freed after their use, or at the end of
    the current or next forward or backward. Collective."""
    root, entries = _entries_in("prefetch", module)
    ids = [entry.id for entry in entries if entry.kept is None]
    root.prefetched.update(ids if root.group.stage == 3 else ())
    _start_gathers(root, ids)


def _entries_in(call: str, module: nn.Module) -> Tuple[Root, List[ShardedParam]]:
    """The root of a module, and the module's parameters in the order of their numbers."""
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
    """Whether the last backward's gradients, before averaging, were finite on every rank. Needs shard(...,
    check_finite=True). In a step of several backwards, call it after each, or put all but the last into no_sync(),
    whose sums are checked too. Collective."""
    finite = [root.group.context.grads_finite()[0] for root in roots_of(model)]
    return all(finite)


def stats(model: nn.Module, reset: bool = False) -> libdc.MemoryStats:
    """Bytes that the library holds and has moved for a model on this rank, and counts since the last reset. reset:
    starts new counts."""
    root = root_of("stats", model)
    result = root.group.context.get_memory_stats()
    if reset:
        root.group.context.reset_stats()
    return result


def trace_start(model: nn.Module, capacity: int = 65536) -> None:
    """Records the last `capacity` pieces of the library's work from now on; 0 stops recording and drops them."""
    root_of("trace_start", model).group.context.trace_start(capacity)


def trace_read(model: nn.Module, limit: int = 65536) -> List[libdc.TraceEvent]:
    """Up to `limit` recorded pieces of work that were not read yet, oldest first. op is the operator's name, id the
    parameter's number in the order of model.parameters()."""
    events = root_of("trace_read", model).group.context.trace_read(limit)
    return [event._replace(op=event.op.name.lower()) for event in events]
