"""Eager mode: while a forward or backward of the model runs, a module's parameters read as whole weights.

shard() gives each module that owns parameters a new class, in which a parameter's name is a property. Inside a forward
the property gathers the weights, and returns an autograd leaf whose hook reduces the gradient. Outside of forwards it
returns the nn.Parameter itself. Instead of weights, autograd saves their names for backward, which gathers them
again."""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .. import devices
from .part import part_of
from .root import Root
from .sharded_param import ShardedParam
from .untraced import untraced, untraced_itself

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_is_autocast_enabled: Callable[[str], bool] = torch.is_autocast_enabled
_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
_frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback


# Gradients of whole weights


@untraced
def _take_grad(weights: Any) -> None:
    """The hook of weights for which autograd has computed a gradient. The parameter's is complete at the end of the
    backward."""
    root, entry, version, optimizer_steps = weights.dc_use
    grad, weights.grad = weights.grad, None
    if not entry.requires_grad:
        return  # frozen since the forward
    if grad.requires_grad:
        raise RuntimeError(f"{entry.names[0]}: backward(create_graph=True) would make .grad without a graph, and a "
                           "loss of it no gradient: take torch.autograd.grad(..., create_graph=True) by inputs, or an "
                           "unsharded copy")
    if version != entry.data._version or optimizer_steps != entry.optimizer_steps:
        _refuse_changed_weights(entry)
    if root.graph_task != _graph_task():
        root.pre_backward()
    entry.reduce(grad, root)


class _GradHooks(Dict[int, Any]):
    """The hooks that all weights share: a dictionary for each would cost more than the hook."""

    def __setitem__(self, key: int, hook: Any) -> None:
        raise RuntimeError("register_post_accumulate_grad_hook: these are whole weights, gathered for a forward: "
                           "register the hook on the parameter, outside of forwards")


_GRAD_HOOKS = _GradHooks({0: _take_grad})


def _refuse_hook(*_: Any) -> None:
    raise RuntimeError("register_hook: a whole weight is gathered for one use, so the hook would miss other uses and "
                       "later steps: register it on a tensor that the forward makes of it, as weight.view_as(weight), "
                       "or change .grad after backward()")


@untraced
def track(weights: Any, entry: ShardedParam, root: Root) -> Tensor:
    """Makes whole weights an autograd leaf, whose gradient is reduced."""
    if _functorch():
        raise RuntimeError(f"{entry.names[0]}: torch.func's transforms cannot go through a sharded model's weights: "
                           "read the weight before the transform, at stages 0 to 2, or transform an unsharded copy")
    weights.requires_grad = True
    weights._post_accumulate_grad_hooks = _GRAD_HOOKS
    weights.register_hook = _refuse_hook
    weights.dc_use = root, entry, entry.data._version, entry.optimizer_steps  # so a graph keeps the root alive
    return weights  # type: ignore[no-any-return]


def _refuse_changed_weights(entry: ShardedParam) -> None:
    raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace "
                       f"operation: {entry.names[0]} was changed between forward and backward, so the gradients would "
                       "be those of other weights than the loss's: step the optimizer after backward")


def _refuse_changed(tensor: Tensor, version: int) -> None:
    """Raises PyTorch's own error. PyTorch compares versions itself only for tensors that no hooks saved."""
    raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace "
                       f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected "
                       f"version {version} instead. Hint: run one process with the model before shard() and "
                       "torch.autograd.set_detect_anomaly(True), which finds the operation")


class _ReadWeights:
    """Whole weights that a forward has read. A backward gathers them once, however often it asks for them. An RNN's
    backward asks at each step of a sequence, and ranks may have sequences of different lengths."""

    __slots__ = ("entry", "version", "optimizer_steps", "saved", "weights", "graph_task", "left")

    def __init__(self, entry: ShardedParam) -> None:
        self.entry, self.version, self.optimizer_steps = entry, entry.data._version, entry.optimizer_steps
        self.saved = 0  # number of times that autograd has saved them
        self.weights: Optional[Tensor] = None  # gathered for backward graph_task, which asks `left` more times

    def unshard(self, root: Root) -> Tensor:
        """The weights for a backward. They are kept until it has asked for all that was saved, or ends."""
        task, weights = _graph_task(), self.weights
        if weights is None or task != self.graph_task:
            weights = self.entry.unshard(root)
            if task == -1:
                return weights  # a program inspects saved tensors
            self.weights, self.graph_task, self.left = weights, task, self.saved
            _queue_callback(self._release)
        self.left -= 1
        if self.left <= 0:
            self.weights = None
        return weights

    def _release(self) -> None:
        self.weights = None


def make_saved_tensor_hooks(root: Root) -> Tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Hooks for saved_tensors_hooks(). They save gathered weights by name, and other tensors with their version."""
    by_storage, root_of_hooks = root.read_by_storage, weakref.ref(root)

    @untraced
    def pack(tensor: Tensor) -> Any:
        plain = tensor.layout is torch.strided and (type(tensor) is Tensor or part_of(tensor) is None)
        read = by_storage.get(tensor.untyped_storage()._cdata) if plain else None
        if read is None:
            # Without detach(), an operator's own output would keep the graph that keeps it: a cycle that is never
            # freed.
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version
        read.saved += 1
        entry = read.entry
        view: Any = tensor.shape, tensor.stride(), tensor.storage_offset()
        if tensor.dtype != entry.placeholder.dtype or tensor.is_neg() or tensor.is_conj():
            view = *view, tensor.dtype, tensor.is_conj(), tensor.is_neg()
        elif view == entry.transposed:
            entry.saved_transposed, view = True, None
        return root_of_hooks(), read, view

    @untraced
    def unpack(saved: Any) -> Tensor:
        if len(saved) == 2:
            tensor, version = saved
            if tensor._version != version:
                _refuse_changed(tensor, version)
            return tensor  # type: ignore[no-any-return]
        root, read, view = saved
        entry = read.entry
        if read.version != entry.data._version or read.optimizer_steps != entry.optimizer_steps:
            _refuse_changed_weights(entry)
        if root.graph_task != _graph_task():
            root.pre_backward()
        once = read.saved == 1
        if view is None:
            return entry.unshard(root, True) if once else read.unshard(root).t()  # type: ignore[no-any-return]
        weights = entry.unshard(root) if once else read.unshard(root)
        if len(view) > 3:
            return _reinterpreted(weights, *view)
        return weights if view[:2] == (weights.shape, weights.stride()) else weights.as_strided(*view)

    return pack, unpack


def _reinterpreted(weights: Tensor, shape: Tuple[int, ...], stride: Tuple[int, ...], offset: int, dtype: torch.dtype,
                   conjugated: bool, negated: bool) -> Tensor:
    """A view of weights with another element type, or with PyTorch's lazy conjugation or negation."""
    view = torch.empty(0, dtype=dtype, device=weights.device).set_(weights.untyped_storage(), offset, shape, stride)
    view = view.conj() if conjugated else view
    return torch._neg_view(view) if negated else view


# Memory of whole weights at stage 3


def _references_of_a_graph() -> Tuple[int, int]:
    """The counts of PyTorch's and Python's references to a leaf that is held by a tuple in a list, a variable and a
    graph that accumulates its gradient. The leaf is not passed to a function, since a call may hold another reference
    if Dynamo has replaced the interpreter's frame evaluation."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [(0, torch.zeros(1, requires_grad=True))]
        graph = leaves[0][1] * torch.ones(1)
    for _, leaf in leaves:
        references = leaf._use_count(), sys.getrefcount(leaf)  # type: ignore[attr-defined]
    del graph
    return references


_TORCH_REFERENCES, _PYTHON_REFERENCES = _references_of_a_graph()


@untraced
def _return_weights(root: Root, lent: List[Tuple[int, Any, ShardedParam]]) -> List[Tuple[int, Any, ShardedParam]]:
    """Frees the memory of weights that a module's forward has read, and returns those that a variable still refers to.
    A graph keeps its leaves alive, so their memory is freed here: the backward gathers the weights again."""
    kept = []
    for storage, weights, entry in lent:
        references = sys.getrefcount(weights)
        if references > _PYTHON_REFERENCES:
            kept.append((storage, weights, entry))
            continue
        root.read_by_storage.pop(storage, None)  # after unshard() two may share a storage
        if references == _PYTHON_REFERENCES and weights._use_count() == _TORCH_REFERENCES and weights.requires_grad:
            weights.data = entry.placeholder
    return kept


# Detection of writes into weights, which would be lost


@untraced
def _refuse_write(entry: ShardedParam, weights: Tensor) -> None:
    if (weights.requires_grad or not weights.is_inference()) and weights._version and _is_written(entry, weights):
        if entry.kept is not None:
            entry.group.params_updated([entry])  # so that the next forward gathers it again
        raise RuntimeError(f"{entry.names[0]}: a forward has written into the weight, but a sharded model gathers it "
                           "for that forward alone, so the change would be lost: write into it in `with "
                           "libdc.torch.gathered(model):`")


@untraced
def _is_written(entry: ShardedParam, weights: Tensor) -> bool:
    """Whether the weights were written. At stages 1 and 2 params_updated() also raises their version, once, when it
    drops them."""
    group, kept = entry.group, entry.kept
    raised = (0 < group.stage < 3 and not devices.captures(group.device)
              and (kept is None or kept._version != weights._version))
    return weights._version > int(raised)


@untraced
def _version_of(weights: Tensor, entry: ShardedParam) -> Tensor:
    """A tensor that shares the weights' version counter. At stage 3 it does not keep their memory."""
    if entry.placeholder is None:
        return weights
    shadow = weights.detach()
    shadow.data = entry.placeholder
    return shadow


for _method in (Root.pre_forward, Root.post_forward, Root.abort_forward, Root.pre_backward, ShardedParam.unshard):
    untraced(_method)
_numbers = itertools.count()


class ModuleState:
    """A module's own parameters, and the weights that are gathered for its running forward."""

    __slots__ = ("root", "number", "entries", "given", "gathered")

    def __init__(self, root: Root, given: Dict[str, bool]) -> None:
        """given: of functional_call(), the names of parameters that others stand for just now."""
        self.root, self.given = root, given
        self.number = next(_numbers)  # by which the root knows the module
        self.entries: Dict[str, ShardedParam] = {}
        self.gathered: Optional[Dict[str, Tensor]] = None  # None: its forward does not run

    @untraced_itself
    def call(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs the module's forward."""
        root = self.root
        outermost = root.depth == 0
        if outermost:
            root.pre_forward(self.number)
        root.depth += 1
        outer, self.gathered = self.gathered, {}
        lent, root.lent = root.lent, []
        try:
            # If other hooks are active, such as checkpointing's, these are not added, since they would hide them.
            hooks = root.saved_tensor_hooks
            if hooks is not None and _saved_tensors_hooks(True) is None and _is_grad_enabled():
                with saved_tensors_hooks(*hooks):
                    result = forward(module, *args, **kwargs)
            else:
                result = forward(module, *args, **kwargs)
            if root.group.stage:
                self._refuse_writes(outermost)
            return result
        except BaseException:
            if outermost:
                root.abort_forward()
            raise
        finally:
            self.gathered = outer
            if root.lent:
                lent += _return_weights(root, root.lent)
            root.lent = lent
            root.depth -= 1
            # Autocast caches a cast of each leaf until it ends, and each forward has new leaves.
            if (outermost or not _is_grad_enabled()) and _is_autocast_enabled(root.group.device.type):
                torch.clear_autocast_cache()
            if outermost:
                root.post_forward()

    @untraced
    def _refuse_writes(self, outermost: bool) -> None:
        """Raises, at the end of its forward, if its own weights, or those that it read of other modules, were
        written."""
        root = self.root
        for name, weights in (self.gathered or {}).items():
            _refuse_write(self.entries[name], weights)
        for _, weights, entry in root.lent:
            _refuse_write(entry, weights)
        for entry, weights in root.read_elsewhere if outermost else ():
            _refuse_write(entry, weights)

    @untraced_itself
    def read(self, name: str, param: Any) -> Any:
        """The value of the module's attribute `name`, whose parameter is `param`."""
        entry = self.entries.get(name)
        if entry is None or entry.param_ref() is not param:
            if self.root.depth > 0 and isinstance(param, nn.Parameter) and name not in self.given:
                raise RuntimeError(f"{name if entry is None else entry.names[0]} is not the parameter that shard() "
                                   "found, but another one, as of an assignment to module._parameters, and no rank "
                                   "would average its gradient: replace parameters before shard(), or write values "
                                   "into the one that is there (copy_(), load_state_dict())")
            return param  # replaced by functional_call()
        root = self.root
        grads = _is_grad_enabled()
        tracked = grads and entry.requires_grad
        if root.depth == 0:
            if _graph_task() != -1:
                root.pre_backward()  # a checkpointed function is recomputed
            elif root.block is not None:
                return root.block.read(entry, tracked, track)
            elif _frame_callback() is None:
                return param
        if entry.requires_grad and not grads and (root.depth > 0 or _graph_task() != -1):
            tracked = not (torch.is_inference_mode_enabled() or _functorch())  # it may be used after no_grad() ends
        gathered = self.gathered
        if gathered is not None:
            weights = gathered.get(name)
            if weights is not None:
                if weights.requires_grad or not tracked:
                    return weights
                _refuse_write(entry, weights)
        weights = entry.unshard(root)
        if tracked:
            track(weights, entry, root)
        if root.depth > 0 and (grads or tracked) and root.group.stage == 3:
            storage = weights.untyped_storage()._cdata
            root.read_by_storage[storage] = _ReadWeights(entry)
            root.lent.append((storage, weights, entry))
        elif root.depth > 0 and gathered is None and root.group.stage and not weights.is_inference():
            root.read_elsewhere.append((entry, _version_of(weights, entry)))
        if gathered is not None:
            gathered[name] = weights
        return weights
