"""Eager mode: a module's parameters read as whole weights while a forward or backward of the model runs.

shard() gives each module that owns parameters a class of its own, in which a parameter's name is a property. Inside a
forward the property gathers; autograd sees a function whose backward reduces. Outside it is the nn.Parameter itself.
Weights that autograd would save for backward are saved by name instead, and gathered again when it asks for them."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .part import part_of
from .root import Root
from .sharded_param import ShardedParam

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
_frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback


class _UnshardParam(torch.autograd.Function):
    """Weights out, gradient in. The shard itself gets none: reductions complete at the end of the backward."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, entry: ShardedParam, whole: Optional[Tensor] = None) -> Tensor:
        ctx.entry, ctx.root = entry, entry.root  # a graph keeps the root
        ctx.version, ctx.optimizer_steps = entry.data._version, entry.optimizer_steps
        ctx.set_materialize_grads(False)
        return entry.unshard() if whole is None else whole

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> Tuple[None, None, None]:
        entry = ctx.entry
        if ctx.version != entry.data._version or ctx.optimizer_steps != entry.optimizer_steps:
            raise RuntimeError(f"{entry.names[0]} was changed between forward and backward, so the gradients would be "
                               "those of other weights than the loss's: step the optimizer after backward")
        if grad is not None:
            ctx.root.pre_backward()
            entry.reduce(grad)
        return None, None, None


# Function.apply() in Python looks for transforms of torch.func, for values that they left behind and for defaults of
# arguments. No parameter is such a value, and read() asks about the transforms itself: so it calls what that calls.
_unshard_param: Callable[..., Tensor] = super(torch.autograd.Function, _UnshardParam).apply


def make_saved_tensor_hooks(root: Root) -> Tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The hooks by which saved_tensors_hooks() saves gathered weights by name."""
    live, root_of_hooks = root.gathered_storages, weakref.ref(root)

    def pack(tensor: Tensor) -> Any:
        if part_of(tensor) is not None:
            return tensor if tensor.grad_fn is None else tensor.detach()
        # The table keeps the storage's header alive, so that no other storage can have its address.
        found = live.get(tensor.untyped_storage()._cdata)
        if found is None:
            # An operator's own output would keep the graph that keeps it, for ever: a cycle that is never freed.
            return tensor if tensor.grad_fn is None else tensor.detach()
        return root_of_hooks(), found[1], tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(saved: Any) -> Tensor:
        if type(saved) is not tuple:
            return saved
        root, entry, shape, strides, offset = saved
        root.pre_backward()
        return entry.unshard().as_strided(shape, strides, offset)

    return pack, unpack


_numbers = itertools.count()


class ModuleState:
    """A module's own parameters, and the weights gathered for the forward that it runs now."""

    __slots__ = ("root", "number", "entries", "gathered")

    def __init__(self, root: Root) -> None:
        self.root = root
        self.number = next(_numbers)  # the root's name for it
        self.entries: Dict[str, ShardedParam] = {}
        self.gathered: Optional[Dict[str, Tensor]] = None  # None: not in its forward

    def call(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs the module's forward."""
        root = self.root
        outermost = root.depth == 0
        if outermost:
            root.pre_forward(self.number)
        root.depth += 1
        outer, self.gathered = self.gathered, {}
        try:
            # Another pair of hooks on top, for instance checkpointing's, takes precedence: this one would hide it.
            if root.group.stage == 3 and torch.is_grad_enabled() and _saved_tensors_hooks(True) is None:
                with saved_tensors_hooks(*root.saved_tensor_hooks):
                    result = forward(module, *args, **kwargs)
            else:
                result = forward(module, *args, **kwargs)
            for name, weights in self.gathered.items() if root.group.stage else ():
                if not weights.is_inference() and weights._version:
                    self._refuse_write(name)
            return result
        except BaseException:
            if outermost:
                root.abort_forward()
            raise
        finally:
            self.gathered = outer
            root.depth -= 1
            if outermost:
                root.post_forward()

    def _refuse_write(self, name: str) -> None:
        raise RuntimeError(f"{self.entries[name].names[0]}: a forward has written into the weight, but a sharded model "
                           "gathers it for that forward alone, so the change would be lost: write into it in `with "
                           "libdc.torch.gathered(model):`")

    def read(self, name: str, param: Any) -> Any:
        """The value of the module's attribute `name`, whose parameter is `param`."""
        entry = self.entries.get(name)
        if entry is None or entry.param_ref() is not param:
            return param  # replaced: by functional_call, or for good
        root = self.root
        if root.depth == 0:
            if _graph_task() != -1:
                root.pre_backward()  # a checkpointed function runs again
            elif root.block is not None:
                return root.block.read(entry, param.requires_grad and torch.is_grad_enabled(),
                                       lambda whole: _UnshardParam.apply(param, entry, whole))
            elif _frame_callback() is None:
                return param
        grads = torch.is_grad_enabled()
        tracked = grads and param.requires_grad
        gathered = self.gathered
        if gathered is not None:
            weights = gathered.get(name)
            if weights is not None:
                if weights.requires_grad or not tracked:
                    return weights
                if not weights.is_inference() and weights._version:
                    self._refuse_write(name)
        if not tracked:
            weights = entry.unshard()
        elif _functorch():
            weights = _UnshardParam.apply(param, entry)  # says what it cannot do
        else:
            weights = _unshard_param(param, entry)
        if grads and root.group.stage == 3:
            storage = weights.untyped_storage()
            root.gathered_storages[storage._cdata] = (StorageWeakRef(storage), entry)
        if gathered is not None:
            gathered[name] = weights
        return weights
