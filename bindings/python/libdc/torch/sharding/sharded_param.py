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
    """One parameter's shard, gradient and registration, called an entry of its ParamGroup. The parameter keeps it
    alive; it keeps neither the parameter nor the root alive."""

    __slots__ = ("root_ref", "param_ref", "id", "names", "shape", "numel", "shard_numel", "cut", "param_dtype",
                 "reduce_dtype", "data", "grad", "grad_data", "registered_ptr", "registered_grad_ptr", "version",
                 "optimizer_steps", "unreduced", "direct", "hooks", "part", "trained", "copied", "policy", "keeps",
                 "kept", "requires_grad", "placeholder", "transposed", "saved_transposed", "__weakref__")  # fmt: skip

    def __init__(self, root: Root, index: int, name: str, param: nn.Parameter, policy: ParamPolicy,
                 shape: Optional[torch.Size] = None) -> None:
        """shape: the whole's shape, if the parameter's memory is this rank's part already."""
        self.root_ref = weakref.ref(root)
        self.param_ref = weakref.ref(param)
        self.id = index
        self.names = [name]
        self.shape = param.shape if shape is None else shape
        self.numel = math.prod(self.shape)
        self.copied = shape is not None
        self.shard_numel = -(-self.numel // root.group.comm.size)  # length of every rank's part, including padding
        self.cut = Cut(root.group.comm.rank, root.group.comm.size, self.shard_numel, self.numel)
        self.policy = policy
        self.param_dtype = policy.param_dtype  # type of the gathered weights; None: the shard's own
        self.reduce_dtype = policy.reduce_dtype  # type in which gradients are averaged; None: their own
        self.keeps = False  # weights stay whole, between unshard() and reshard()
        self.kept: Optional[Tensor] = None  # the whole weights, once they are used
        self.data: Tensor = param.detach()  # param's memory without autograd, for the library
        self.grad: Optional[Tensor] = None  # the tensor that libdc reduces into, and `.grad` returns
        self.grad_data: Any = None  # its memory as registered with the library
        self.registered_ptr = self.registered_grad_ptr = 0
        self.version = 0  # the shard's version that the library has seen
        self.optimizer_steps = 0  # counted, since fused optimizers do not raise the version
        self.unreduced: Optional[Tensor] = None  # whole local sum of no_sync(), see local_sums.py
        self.direct: Optional[Tuple[Optional[Tensor]]] = None  # saved .grad, while autograd adds its own gradient
        # This rank's elements; None at stage 0, where each rank has all.
        self.part = None if root.group.stage == 0 else Part(weakref.ref(self), name, self.cut, self.shape)
        self.hooks: Optional[Dict[int, Callable[[nn.Parameter], None]]] = None  # called when .grad is complete

        self.requires_grad = param.requires_grad  # a copy, since the parameter's is slow to read
        self.placeholder: Any = None  # at stage 3: a tensor of the whole's shape without its memory
        # Shape, stride and offset of a matrix's transpose, which nn.Linear saves for its backward.
        self.transposed: Any = None
        if len(self.shape) == 2:
            self.transposed = (self.shape[1], self.shape[0]), (1, max(self.shape[1], 1)), 0
        self.saved_transposed = False  # whether autograd has saved that view

        # (dictionary, key) pairs under which tracing reads whether the parameter requires a gradient.
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
        """Whether the root still exists."""
        return self.root_ref() is not None

    @property
    def param(self) -> nn.Parameter:
        """The parameter: after shard() this rank's flat part; at stage 0 the whole."""
        return self.param_ref()  # type: ignore[return-value]  # the root keeps it

    @property
    def shard_range(self) -> Tuple[int, int]:
        """This rank's elements, begin to end, without padding."""
        return (0, self.numel) if self.part is None else (self.part.begin, self.part.end)

    @property
    def persistent(self) -> bool:
        """Whether gathered weights stay whole until they change."""
        return self.group.stage < 3 or self.policy.persistent

    @property
    def size(self) -> Size:
        return Size(self.numel, self.policy.group)

    def unshard(self, root: Root, transposed: bool = False) -> Tensor:
        """The whole weights, or their transpose for a backward. The memory is freed with the tensor."""
        order, group = root.order, root.group
        if self.data._version != self.version and group.stage > 0 and not group.fills_unused:
            # The running forward has written the weights, as momentum encoders do. Not with unused="zero": ranks that
            # skip this read would not take part in a new gather.
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
                # detach(): a view would keep its base alive.
                return taken if transposed else taken.t().detach()
        if stays:
            if self.kept is None:
                self.kept = self._take_normal(group) if taken is None else taken
            weights = self.kept.detach()
        else:
            weights = self._take(group) if taken is None else taken
        return weights.t() if transposed else weights

    def _stays_whole(self, group: ParamGroup) -> bool:
        """Whether to store whole weights in `kept`. At stages 1 and 2 the next gather overwrites them, so those that a
        graph has saved must share a version counter, which params_updated() raises."""
        if self.keeps or not 0 < group.stage < 3:
            return self.keeps
        return not (torch.is_inference_mode_enabled() or devices.captures(group.device)
                    or torch._C._are_functorch_transforms_active())

    def _take_normal(self, group: ParamGroup) -> Tensor:
        """Takes weights that later forwards with gradients can use too, so not as inference tensors."""
        with torch.inference_mode(False):
            return self._take(group)

    def _take(self, group: ParamGroup) -> Tensor:
        if group.stage > 0:
            return eager_calls.take(self.data, group.graph_id, self.id, self.param_dtype)  # type: ignore[no-any-return]
        weights = self.data.detach()
        return weights if self.param_dtype is None else weights.to(self.param_dtype)

    def reduce(self, grad: Tensor, root: Root) -> None:
        """Reduces a whole local gradient of the running backward, or adds it to the local sum in no_sync()."""
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
        """Reduces a whole gradient at once. All ranks must call it."""
        root.queue_reduction(self, grad)
        root.flush_reductions()

    def reduce_nothing(self, root: Root) -> bool:
        """Reduces zeros, or the local sum of no_sync() if there is one, and returns whether there was. All ranks must
        call it."""
        left = self.unreduced is not None
        if left:
            grad = root.local_sums.take(self)
        else:
            grad = torch.zeros(self.shape, dtype=self.param_dtype or self.data.dtype, device=self.data.device)
        self.reduce_now(grad, root)
        return left

    def drop_local_sum(self) -> None:
        """Drops the local sum of no_sync(), when `.grad` was set to None."""
        root = self.root_ref()
        if root is not None and root.local_sums.entries:
            root.local_sums.drop([self])

    def take_up_grad(self, param: Tensor) -> bool:
        """Copies the values of `.grad` into the library's memory, so that a backward adds to them. Returns whether
        there are any. The user may have set `.grad` to another tensor, or its `data` to other memory."""
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
        """Adds hooks for uses of the parameter other than as a module's attribute, for which autograd computes a
        gradient. One hook runs before autograd adds it to `.grad`, one after. At stage 0 the gradient is whole, and
        reduced as all others. At other stages it is kept until the end of the backward, if libdc is adding to `.grad`
        at the same time."""
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
        """Saves `.grad` before autograd adds to it."""
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
        """Has hooks called at the end of the running backward, in which autograd computed a gradient of the parameter
        itself."""
        if self.root.reduce_grads:
            self.root.pre_backward()
            self.root.hooked[self.id] = self

    def _take_direct(self, aside: Optional[Tensor]) -> None:
        """Takes autograd's own gradient out of `.grad`, and restores the saved one."""
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


# Sets only `.grad`. When a user sets it to None, the local sum of no_sync() is dropped too.
_set_grad = torch.Tensor.grad.__set__  # type: ignore[attr-defined]


def accumulates(param: Tensor) -> bool:
    """Whether the running backward adds to `.grad`. autograd.grad() does not: it calls only the first hook, and may
    raise later, so that hook must change nothing. PyTorch answers the question with an error in that case."""
    try:
        return torch._C._will_engine_execute_node(_gradient_node(param))
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        return False


def _gradient_node(param: Tensor) -> Any:
    """The node of autograd's graph that adds to `.grad`. It is found through a view, which has a graph only with
    autograd's dispatch keys. Backwards of compiled branches run without these keys, so they are enabled here."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        return torch.autograd.graph.get_gradient_edge(param).node
