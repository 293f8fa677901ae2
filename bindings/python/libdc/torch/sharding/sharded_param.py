"""The state of one parameter of a sharded model."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .. import devices
from ..ops import eager_calls
from .order.exec_order import Size
from .part import Cut, Part, plain_tensor
from .policy import ParamPolicy

if TYPE_CHECKING:
    from .param_group import ParamGroup
    from .root import Root


class ShardedParam:
    """One parameter's shard, gradient and registration; code calls it an entry of its ParamGroup. The parameter keeps
    it alive; it keeps neither the parameter nor the root."""

    __slots__ = ("root_ref", "param_ref", "id", "names", "shape", "numel", "shard_numel", "cut", "param_dtype",
                 "reduce_dtype", "data", "grad", "grad_data", "registered_ptr", "registered_grad_ptr", "version",
                 "optimizer_steps", "unreduced", "direct", "hooks", "part", "trained", "copied", "policy", "keeps",
                 "kept", "requires_grad", "placeholder", "transposed", "saved_transposed", "__weakref__")  # fmt: skip

    def __init__(self, root: Root, index: int, name: str, param: nn.Parameter, policy: ParamPolicy,
                 shape: Optional[torch.Size] = None) -> None:
        """shape: the whole's, if the parameter's memory is this rank's part already."""
        self.root_ref = weakref.ref(root)
        self.param_ref = weakref.ref(param)
        self.id = index
        self.names = [name]
        self.shape = param.shape if shape is None else shape
        self.numel = math.prod(self.shape)
        self.copied = shape is not None
        self.shard_numel = -(-self.numel // root.group.comm.size)  # of every rank's part, padding included
        self.cut = Cut(root.group.comm.rank, root.group.comm.size, self.shard_numel, self.numel)
        self.policy = policy
        self.param_dtype = policy.param_dtype  # of the gathered weights; None: the shard's own
        self.reduce_dtype = policy.reduce_dtype  # type in which gradients are averaged; None: their own
        self.keeps = False  # between unshard() and reshard(): weights stay whole
        self.kept: Optional[Tensor] = None  # those, once they are used
        self.data: Tensor = param.detach()  # param's, for the library: autograd does not follow it
        self.grad: Optional[Tensor] = None  # what libdc reduces into, and what .grad is
        self.grad_data: Any = None  # its memory, as the library has it
        self.registered_ptr = self.registered_grad_ptr = 0
        self.version = 0  # of the shard, as the library knows it
        self.optimizer_steps = 0  # optimizer steps; fused optimizers leave no trace in the version
        self.unreduced: Optional[Tensor] = None  # whole local sum of no_sync(), see local_sums.py
        self.direct: Optional[Tuple[Optional[Tensor]]] = None  # .grad, while autograd makes a gradient of its own
        # This rank's elements; None at stage 0, where it has all.
        self.part = None if root.group.stage == 0 else Part(weakref.ref(self), name, self.cut, self.shape)
        self.hooks: Optional[Dict[int, Callable[[nn.Parameter], None]]] = None  # called when .grad is complete

        self.requires_grad = param.requires_grad  # the parameter's, which takes longer to read
        self.placeholder: Any = None  # whole weights without memory, at stage 3
        # A matrix's transpose as a view of its storage: what nn.Linear saves for its backward.
        self.transposed: Any = None
        if len(self.shape) == 2:
            self.transposed = (self.shape[1], self.shape[0]), (1, max(self.shape[1], 1)), 0
        self.saved_transposed = False  # autograd has saved it

        # Where tracing reads whether the parameter requires a gradient: entries of dictionaries, under names.
        self.trained: List[Tuple[Dict[str, bool], str]] = []

    @property
    def root(self) -> Root:
        root = self.root_ref()
        if root is None:
            raise RuntimeError(f"{self.names[0]}: the sharded model that this parameter belongs to is gone; keep the "
                               "model for as long as its parameters are used")
        return root

    @property
    def group(self) -> ParamGroup:
        """The group that the parameter is registered in."""
        return self.root.group

    @property
    def alive(self) -> bool:
        """Whether the root is there."""
        return self.root_ref() is not None

    @property
    def param(self) -> nn.Parameter:
        """After shard() this rank's part, flat; at stage 0 whole."""
        return self.param_ref()  # type: ignore[return-value]  # the root keeps it

    @property
    def shard_range(self) -> Tuple[int, int]:
        """This rank's elements, from begin to end, without the padding behind them."""
        return (0, self.numel) if self.part is None else (self.part.begin, self.part.end)

    @property
    def persistent(self) -> bool:
        """Whether weights stay whole once they are gathered, until they change."""
        return self.group.stage < 3 or self.policy.persistent

    @property
    def size(self) -> Size:
        return Size(self.numel, self.policy.group)

    def unshard(self, root: Root, transposed: bool = False) -> Tensor:
        """The whole weights, or their transpose for a backward, as memory that goes back when the tensor dies."""
        order, group = root.order, root.group
        if self.data._version != self.version and group.stage > 0 and not group.fills_unused:
            # The forward under way has written it, as momentum encoders do. With unused="zero" ranks that pass this
            # read over would take no part in a new gather.
            group.params_updated([entry for entry in group.entries if entry.data._version != entry.version])
        stays = self._stays_whole(group)
        if stays and self.kept is not None and (order is None or group.stage == 3):
            weights = self.kept.detach()
            return weights.t() if transposed else weights
        taken = None
        if order is not None:
            order.advance(self.id)
            taken = group.taken.pop(self.id, None)
            if taken is None and ~self.id in group.taken:
                taken = group.taken.pop(~self.id)
                # Without detach() it would be a view, which keeps the tensor that it is a view of.
                return taken if transposed else taken.t().detach()
        if stays:
            if self.kept is None:
                self.kept = self._take_normal(group) if taken is None else taken
            weights = self.kept.detach()
        else:
            weights = self._take(group) if taken is None else taken
        return weights.t() if transposed else weights

    def _stays_whole(self, group: ParamGroup) -> bool:
        """Whether weights are `kept`. At stages 1 and 2 the library overwrites them with the next gather, so those that
        a graph has saved must share a version that params_updated() raises."""
        if self.keeps or not 0 < group.stage < 3:
            return self.keeps
        return not (torch.is_inference_mode_enabled() or devices.captures(group.device)
                    or torch._C._are_functorch_transforms_active())

    def _take_normal(self, group: ParamGroup) -> Tensor:
        """For forwards with gradients too, which cannot use a tensor that was made in inference mode."""
        with torch.inference_mode(False):
            return self._take(group)

    def _take(self, group: ParamGroup) -> Tensor:
        if group.stage > 0:
            return eager_calls.take(self.data, group.graph_id, self.id, self.param_dtype)  # type: ignore[no-any-return]
        weights = self.data.detach()
        return weights if self.param_dtype is None else weights.to(self.param_dtype)

    def reduce(self, grad: Tensor, root: Root) -> None:
        """Takes a whole local gradient, of the backward that runs."""
        if not root.reduce_grads:
            root.local_sums.add(self, grad)
            return
        if self.unreduced is not None:
            grad = root.local_sums.take(self) + grad
        if root.reductions is not None:
            root.reductions.reduce(self.id, grad)
        else:
            root.with_grad[self.id] = self
            root.queue_reduction(self, grad)

    def reduce_now(self, grad: Tensor, root: Root) -> None:
        """Reduces a whole gradient; all ranks must do so."""
        root.queue_reduction(self, grad)
        root.flush_reductions()

    def reduce_nothing(self, root: Root) -> bool:
        """Reduces zeros, or what no_sync() has left; says whether that was something. All ranks must do so."""
        left = self.unreduced is not None
        if left:
            grad = root.local_sums.take(self)
        else:
            grad = torch.zeros(self.shape, dtype=self.param_dtype or self.data.dtype, device=self.data.device)
        self.reduce_now(grad, root)
        return left

    def drop_local_sum(self) -> None:
        """`.grad` was set to None, so what no_sync() has summed goes, too."""
        root = self.root_ref()
        if root is not None and root.local_sums.entries:
            root.local_sums.drop([self])

    def take_up_grad(self, param: Tensor) -> bool:
        """Brings the values of `.grad` into the library's memory, for a backward to add to; says whether there are any.
        The user may have set `.grad` to another tensor, or its `data` to other memory."""
        grad, own = param.grad, self.grad
        if own is None:
            return False
        if own.data_ptr() != self.registered_grad_ptr:
            values = plain_tensor(own)
            torch.Tensor.data.__set__(own, self.grad_data)  # type: ignore[attr-defined]
            if grad is own:
                if values.shape != own.shape:
                    raise RuntimeError(f"{self.names[0]}: .grad.data has the shape {tuple(values.shape)}, must have "
                                       f"{tuple(own.shape)}")
                own.copy_(values)
        if grad is None:
            return False
        if grad is not own:
            own.copy_(grad)
            param.grad = own
        return True

    def take_direct_gradients(self) -> None:
        """The parameter can be used without a module's attribute, and autograd has a gradient then. Hooks tell of it:
        one before autograd adds it to `.grad`, one behind. At stage 0 it is whole, and reduced as all others are.
        At the others it waits for the end of the backward if libdc adds to `.grad` just now, beside autograd."""
        if not self.param.requires_grad:
            return
        reference = weakref.ref(self)

        def before(grad: Optional[Tensor]) -> None:
            entry = reference()
            if grad is not None and entry is not None and entry.alive and entry.requires_grad:
                entry._put_grad_aside()

        def behind(param: Tensor) -> None:
            entry = reference()
            if entry is not None and entry.direct is not None:
                entry._take_direct(entry.direct[0])
            if entry is not None and entry.hooks and entry.alive and entry.group.stage > 0:
                entry._call_hooks_at_end()

        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.register_hook(self.param, before)
            torch.Tensor.register_post_accumulate_grad_hook(self.param, behind)

    def _put_grad_aside(self) -> None:
        """Before autograd adds to `.grad`."""
        param, root = self.param, self.root
        with torch._C.DisableTorchFunctionSubclass():
            if self.group.stage > 0 and not (param.grad is self.grad and root.is_reducing):
                return
            if accumulates(param):
                if self.group.stage == 0:
                    root.pre_backward()
                self.direct = (param.grad,)
                _set_grad(param, None)

    def _call_hooks_at_end(self) -> None:
        """Of the running backward, in which autograd has made a gradient of the parameter itself."""
        if self.root.reduce_grads:
            self.root.pre_backward()
            self.root.hooked[self.id] = self

    def _take_direct(self, aside: Optional[Tensor]) -> None:
        """Autograd's own gradient is there, and what was put aside comes back."""
        param, root, self.direct = self.param, self.root, None
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad
            _set_grad(param, aside)
            if grad is None:
                return
            if self.group.stage == 0:
                self.reduce(grad.detach(), root)
            else:
                before = root.direct.get(self.id)
                root.direct[self.id] = grad.detach() if before is None else before + grad.detach()


# Sets `.grad` alone: where a user sets it to None, a sum of no_sync() goes, too.
_set_grad = torch.Tensor.grad.__set__  # type: ignore[attr-defined]


def accumulates(param: Tensor) -> bool:
    """Whether the running backward adds to `.grad`. autograd.grad() does not: it calls the first hook alone, and may
    raise later, so that hook must change nothing. PyTorch answers this question with an error then."""
    try:
        return torch._C._will_engine_execute_node(_gradient_node(param))
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        return False


def _gradient_node(param: Tensor) -> Any:
    """The node of autograd's graph that adds to `.grad`. It is found by a view, which has a graph only with autograd's
    keys. The backwards of compiled branches run without them."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        return torch.autograd.graph.get_gradient_edge(param).node
