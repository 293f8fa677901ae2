"""Eager mode: a module's parameters read as whole weights while a forward or backward of the model runs.

shard() gives each module that owns parameters a class of its own, in which a parameter's name is a property. Inside a
forward the property gathers; autograd sees a function whose backward reduces. Outside it is the nn.Parameter itself.
Weights that autograd would save for backward are saved by name instead, and gathered again when it asks for them."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .root import Entry, Root

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback


class _Gather(torch.autograd.Function):
    """Weights out, gradient in. The shard itself gets none: reductions complete at the end of the backward."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, entry: Entry) -> Tensor:
        ctx.entry = entry
        ctx.version = shard._version, entry.updates
        ctx.set_materialize_grads(False)
        return entry.take()

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> Tuple[None, None]:
        entry = ctx.entry
        if ctx.version != (entry.param._version, entry.updates):
            raise RuntimeError(f"{entry.names[0]} was changed between forward and backward, so the gradients would be "
                               "those of other weights than the loss's: step the optimizer after backward")
        if grad is not None:
            entry.root.enter_backward()
            entry.reduce(grad)
        return None, None


def saving_hooks(root: Root) -> Tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """What saved_tensors_hooks() needs to save gathered weights by name."""
    live = root.live

    def pack(tensor: Tensor) -> Any:
        # A table's entry keeps the storage's head, so that no other storage can have its address.
        found = live.get(tensor.untyped_storage()._cdata)
        return tensor if found is None else (found[1], tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(saved: Any) -> Tensor:
        if type(saved) is not tuple:
            return saved
        entry, shape, strides, offset = saved
        root.enter_backward()
        return entry.take().as_strided(shape, strides, offset)

    return pack, unpack


class Owner:
    """A module's own parameters, and the weights gathered for the forward that it runs now."""

    __slots__ = ("root", "entries", "gathered")

    def __init__(self, root: Root) -> None:
        self.root = root
        self.entries: Dict[str, Entry] = {}
        self.gathered: Optional[Dict[str, Tensor]] = None  # None: not in its forward

    def call(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs the module's forward."""
        root = self.root
        outermost = root.depth == 0
        if outermost:
            root.enter(self)
        root.depth += 1
        outer, self.gathered = self.gathered, {}
        try:
            # Another pair of hooks on top (checkpointing's, say) takes precedence: ours would hide it.
            if root.stage == 3 and torch.is_grad_enabled() and _saved_tensors_hooks(True) is None:
                with saved_tensors_hooks(*root.saving):
                    return forward(module, *args, **kwargs)
            return forward(module, *args, **kwargs)
        finally:
            self.gathered = outer
            root.depth -= 1
            if outermost:
                root.leave()

    def read(self, name: str, param: Any) -> Any:
        """What the module's attribute is."""
        entry = self.entries.get(name)
        if entry is None or entry.param is not param:
            return param  # replaced: by functional_call, or for good
        root = self.root
        if root.depth == 0:
            if _graph_task() != -1:
                root.enter_backward()  # a checkpointed function runs again
            elif _frame_callback() is None:
                return param
        tracked = param.requires_grad and torch.is_grad_enabled()
        gathered = self.gathered
        if gathered is not None:
            weights = gathered.get(name)
            if weights is not None and (weights.requires_grad or not tracked):
                return weights
        weights = _Gather.apply(param, entry) if tracked else entry.take()
        if root.stage == 3:
            storage = weights.untyped_storage()
            root.live[storage._cdata] = (StorageWeakRef(storage), entry)
        if gathered is not None:
            gathered[name] = weights
        return weights
