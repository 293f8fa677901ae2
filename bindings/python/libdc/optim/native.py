"""torch.optim.Optimizer over libdc's handle: PyTorch's groups, hooks, schedulers and state_dict() outside, one call of
the library inside a step."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any, Callable, Dict, Iterator, List, Optional, Pattern, Sequence, Set, Tuple, Type, TypeVar

import torch
from libdc import DType
from libdc.linalg import Handle
from torch import Tensor

from ..torch import devices
from ..torch.dtypes import DTYPES, FLOAT_DTYPES
from ..torch.sharding.parameter import entry_of
from ..torch.sharding.part import plain_tensor
from . import arrays


_Method = TypeVar("_Method", bound=Callable[..., Any])


def on_elements(method: _Method) -> _Method:
    """A method to which a sharded model's parameters, gradients and states are plain tensors of this rank's
    elements."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return method(*args, **kwargs)

    return call  # type: ignore[return-value]


class ParamShard:
    """A parameter as the library knows it: this rank's elements of it."""

    __slots__ = ("param", "shape", "offset", "count", "length")

    def __init__(self, param: Tensor) -> None:
        entry = entry_of(param)
        self.param = param
        self.shape = tuple(param.shape if entry is None else entry.shape)
        self.length = param.numel()  # with the padding of a sharded parameter's last part
        self.offset, self.count = 0, self.length
        if entry is not None:
            self.offset, end = entry.shard_range
            self.count = end - self.offset

    def view(self, state: Tensor) -> Tensor:
        """A piece of state that has the part's elements, in the parameter's shape where all of it is here."""
        whole = self.count == self.length and state.shape == (self.count,)
        return state.view(self.param.shape) if whole else state


def betas_of(group: Dict[str, Any], closed: bool = False) -> Dict[str, float]:
    """A group's betas as the library's options. closed: the second one may be 1."""
    try:
        beta1, beta2 = (float(beta) for beta in group["betas"])
    except (TypeError, ValueError):
        raise ValueError(f"betas = {group['betas']!r}, must be two numbers") from None
    for index, beta in enumerate((beta1, beta2)):
        if not (0 <= beta < 1 or (closed and index == 1 and beta == 1)):
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    return {"beta1": beta1, "beta2": beta2}


def _address(tensor: Optional[Tensor]) -> Optional[int]:
    """Of a tensor of one element."""
    if tensor is None:
        return None
    if tensor.numel() != 1:
        raise ValueError(f"grad_scale and found_inf must have one element, not {tensor.numel()}")
    return tensor.data_ptr()


class NativeOptimizer(torch.optim.Optimizer):
    """A subclass has `_native_class`, the class of libdc.optim.arrays, and `_options()`, which makes that one's options
    of a group. Groups may change at any time, by schedulers or by hand: each step reads them."""

    _step_supports_amp_scaling = True  # torch.amp.GradScaler sets `grad_scale` and `found_inf`, and does not wait
    _native_class: Type[arrays.Optimizer]
    _owned_state: Optional[Pattern[str]] = None  # names of state that one rank has for all: a block's or a layer's
    _devices: Tuple[str, ...] = ("cpu",)  # types of devices on which parameters may be
    _negative_errors = {"lr": "Invalid learning rate", "eps": "Invalid epsilon value",
                        "momentum": "Invalid momentum value",
                        "weight_decay": "Invalid weight_decay value"}  # PyTorch's texts for a number below 0
    _optional_state: Sequence[str] = ("master",)  # pieces of state that torch.optim's namesake does not have

    def __init__(self, params: Any, defaults: Dict[str, Any]) -> None:
        self._reset_native()
        super().__init__(params, defaults)

    def _reset_native(self) -> None:
        self._native: Optional[arrays.Optimizer] = None  # made with the first group's options
        self._device = devices.CPU  # of all parameters: what the first one's is
        self._parts: List[ParamShard] = []
        self._synced: List[Tuple[float, Dict[str, Any]]] = []  # of each group: what the library knows
        self._tensors: Any = None  # a step's weights and gradients, in C
        self._stream_address: Optional[int] = None  # the CUDA stream on which steps are

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        raise NotImplementedError

    def _create_native(self, options: Dict[str, Any]) -> arrays.Optimizer:
        return self._native_class(handle=self._handle(), **options)

    def _handle(self) -> Handle:
        return Handle(torch.get_num_threads(), device=devices.open_device(self._name(), self._device))

    def _name(self) -> str:
        return type(self).__name__

    # ---- groups ----

    @on_elements
    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._find_device()
        try:
            for index, param in enumerate(self.param_groups[-1]["params"]):  # all, before any is added to the library
                self._check_param(param, len(self._parts) + index)
            self._sync_group(len(self.param_groups) - 1)
            for param in self.param_groups[-1]["params"]:
                self._add_param(param, len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def _find_device(self) -> None:
        """Sets the device, while the library does not know it yet."""
        params = self.param_groups[0]["params"]
        if self._native is None and params:
            self._device = params[0].device

    def _sync_group(self, index: int, group: Optional[Dict[str, Any]] = None) -> None:
        """Sets a group's options and learning rate in the library, where they are new."""
        group = self.param_groups[index] if group is None else group
        self._check_numbers(group)
        now = float(group["lr"]), self._options(group)
        if index < len(self._synced) and self._synced[index] == now:
            return
        if self._native is None:
            self._native = self._create_native(now[1])
        else:
            self._native.set_group(index, **now[1])
        self._native.set_lr(index, now[0])
        self._synced[index:index + 1] = [now]

    def _check_numbers(self, group: Dict[str, Any]) -> None:
        """Refuses arguments that PyTorch refuses, with its texts; the library checks the rest."""
        if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        for name, text in self._negative_errors.items():
            if name in group and not group[name] >= 0:
                raise ValueError(f"{text}: {group[name]}")

    def _check_param(self, param: Tensor, index: int) -> None:
        if param.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{self._name()}: parameter {index} is {param.dtype}, must be float32, float16 or "
                             "bfloat16")
        if param.device.type not in self._devices or param.layout != torch.strided:
            allowed = "the cpu" if "cuda" not in self._devices else "the cpu or on a cuda device"
            raise ValueError(f"{self._name()}: parameter {index} is on {param.device} and {param.layout}, must be on "
                             f"{allowed} and strided")
        if param.device != self._device:
            raise ValueError(f"{self._name()}: parameter {index} is on {param.device}, but the first is on "
                             f"{self._device}: all must be on one device")

    def _add_param(self, param: Tensor, group: int) -> None:
        assert self._native is not None
        part = ParamShard(param)
        self._native.add_param(part.shape, part.offset, part.count, DTYPES[param.dtype], group)
        self._parts.append(part)
        self._tensors = None

    # ---- steps ----

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """One step; closure: computes the loss again, and its gradients. On a CUDA device in the order of PyTorch's
        current stream."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    @on_elements
    def _step_all(self) -> None:
        self.sync_groups()
        grads = [self._grad_of(index, part) for index, part in enumerate(self._parts)]
        with self._scaled():
            self._step_native(grads)

    @contextlib.contextmanager
    def _scaled(self) -> Iterator[None]:
        """A step inside has gradients of a loss that was multiplied by `grad_scale`, and does nothing if `found_inf` is
        not 0: numbers that it reads when it takes place."""
        named = [getattr(self, name, None) for name in ("grad_scale", "found_inf")]
        if self._native is None or all(number is None for number in named):
            yield
            return
        numbers = [None if number is None else torch.as_tensor(number, dtype=torch.float32, device=self._device)
                   for number in named]
        self._native.set_loss_scale_at(*map(_address, numbers))
        try:
            yield
        finally:
            self._native.set_loss_scale_at(None, None)

    def sync_groups(self) -> None:
        """Says to the library what changed in the groups, as each step does; for learning rates between the launches of
        a CUDA graph in which a step was captured."""
        self._use_current_stream()
        for index in range(len(self.param_groups)):
            self._sync_group(index)

    def _use_current_stream(self) -> None:
        """Queues steps on PyTorch's current stream."""
        if self._native is None or self._device.type != "cuda":
            return
        now = torch.cuda.current_stream(self._device).cuda_stream
        if now != self._stream_address:
            self._native.set_stream(devices.current_stream(self._device))
            self._stream_address = now

    @property
    def skipped_steps(self) -> int:
        """Steps that a gradient which is not finite kept from being made, with check_finite; waits for them."""
        self._use_current_stream()
        return 0 if self._native is None else self._native.stats().skipped_steps

    def _grad_of(self, index: int, part: ParamShard) -> Optional[Tensor]:
        grad = part.param.grad
        if grad is None:
            return None
        if grad.numel() != part.length:
            raise RuntimeError(f"{self._name()}: parameter {index} has {grad.numel()} elements, but had {part.length} "
                               "when the optimizer was made: make it after libdc.torch.shard()")
        if part.param.device != self._device:
            raise RuntimeError(f"{self._name()}: parameter {index} is on {part.param.device}, but was on "
                               f"{self._device} when the optimizer was made: move the model before that")
        if grad.layout != torch.strided:
            raise RuntimeError(f"{self._name()}: the gradient of parameter {index} is {grad.layout}, must be strided; "
                               "libdc has no sparse updates")
        if grad.dtype not in FLOAT_DTYPES:
            raise RuntimeError(f"{self._name()}: the gradient of parameter {index} is {grad.dtype}, must be float32, "
                               "float16 or bfloat16")
        return grad.contiguous()

    def _step_native(self, grads: List[Optional[Tensor]]) -> None:
        native = self._native
        assert native is not None
        if self._tensors is None:
            counts, dtypes = [part.count for part in self._parts], [DTYPES[part.param.dtype] for part in self._parts]
            self._tensors = [arrays.FlatTensors(counts, dtypes) for _ in range(2)]
        weights = [torch.Tensor.detach(part.param).contiguous() for part in self._parts]
        c_weights, c_grads = self._tensors
        for index, (weight, grad) in enumerate(zip(weights, grads)):
            c_weights.set(index, weight.data_ptr(), DTYPES[weight.dtype])
            if grad is None:
                c_grads.set(index, 0, DType.NONE)
            else:
                c_grads.set(index, grad.data_ptr(), DTYPES[grad.dtype])
        native.step_tensors(c_weights, c_grads)
        changed = []
        for index, (part, weight, grad) in enumerate(zip(self._parts, weights, grads)):
            if grad is None:
                continue
            if part.param.is_contiguous():
                changed.append(part.param)
            else:
                part.param.copy_(weight)
            if part.param not in self.state:
                self.state[part.param] = self._views(index)
        torch.autograd.graph.increment_version(changed)

    # ---- state ----

    def _views(self, index: int) -> Dict[str, Tensor]:
        """The pieces of a parameter's state: the library's own memory."""
        native, part = self._native, self._parts[index]
        assert native is not None
        pieces = {name: torch.from_dlpack(native.state(index, name)) for name in native.state_names(index)}
        return {name: piece if self.is_owned(name) else part.view(piece) for name, piece in pieces.items()}

    def is_owned(self, name: str) -> bool:
        """Whether a piece of state is of a block or a layer that one rank owns."""
        return self._owned_state is not None and self._owned_state.match(name) is not None

    def pieces(self, param: Tensor) -> Set[str]:
        """The names of a parameter's state on this rank."""
        assert self._native is not None
        index = next(i for i, part in enumerate(self._parts) if part.param is param)
        return set(self._native.state_names(index))

    @on_elements
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:  # type: ignore[override]
        """As PyTorch's, but that state keeps its own types; a state of torch.optim's namesake is taken, too. Where a
        parameter has state, all of it must be there. A state that does not fit is an error, and changes nothing."""
        saved = self._own_copies(state_dict["state"])
        super().load_state_dict({**state_dict, "state": saved})
        self._load_state({part.param: saved[i] for i, part in enumerate(self._parts) if i in saved})

    def _own_copies(self, state: Dict[int, Any]) -> Dict[int, Any]:
        """A state with copies in place of the library's own memory, which loading clears first: state_dict() shows it,
        and torch.distributed.checkpoint loads into it."""
        own = {piece.data_ptr() for index in range(len(self._parts)) for piece in self._views(index).values()}

        def own_copy(value: Any) -> Any:
            shared = isinstance(value, Tensor) and plain_tensor(value).untyped_storage().data_ptr() in own
            return copy.deepcopy(value) if shared else value

        return {number: {name: own_copy(value) for name, value in values.items()} for number, values in state.items()}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """The end of load_state_dict(). A copy or an unpickled optimizer gets a new handle of the library."""
        for group in state["param_groups"]:  # torch.optim's own states lack what it does not know
            for name, value in getattr(self, "defaults", state.get("defaults", {})).items():
                group.setdefault(name, value)
        if "_native" in self.__dict__:  # refused before the groups and the old state go
            self._match_state(state["state"], state["param_groups"])
            self._use_current_stream()
            for index, group in enumerate(state["param_groups"]):
                self._sync_group(index, group)
        super().__setstate__(state)
        given = self.state
        if "_native" not in self.__dict__:
            self._reset_native()
            self._find_device()
            for index, group in enumerate(self.param_groups):
                self._sync_group(index)
                for param in group["params"]:
                    self._add_param(param, index)
        self.state = type(given)(dict)
        self._clear()
        self._load_state(given)

    def _clear(self) -> None:
        for index in range(len(self._parts)):
            for name, piece in self._views(index).items():
                piece.zero_()
                self._init_state_piece(name, piece)

    def _init_state_piece(self, name: str, piece: Tensor) -> None:
        """Fills a new piece of state whose initial values are not zeros."""

    def _load_state(self, given: Any) -> None:
        """Copies a state dictionary's values into the library's memory."""
        for param, views, values in self._match_state(given, self.param_groups):
            for name, value in values.items():
                views[name].copy_(value)
            self.state[param] = views

    def _match_state(self, given: Any, groups: Any) -> List[Tuple[Tensor, Dict[str, Tensor], Dict[str, Tensor]]]:
        """Parameters that have state in a dictionary, with the library's pieces and the values for them."""
        fitted = []
        group_of = [group for group in groups for _ in group["params"]]
        for index, (part, group) in enumerate(zip(self._parts, group_of)):
            if not given.get(part.param):
                continue
            views = self._views(index)
            saved = {name: value for name, value in given[part.param].items() if value is not None}
            state = self._from_torch_state(saved, part, group, views)
            lacking = [name for name in views if name not in state and name not in self._optional_state]
            if lacking:
                raise ValueError(f"{self._name()}: the state of parameter {index} lacks {lacking[0]!r}")
            values = {}
            for name, value in state.items():
                if name not in views:
                    raise ValueError(f"{self._name()}: parameter {index} has no state {name!r}, only "
                                     f"{', '.join(views)}")
                values[name] = self._check_piece(index, name, views[name], torch.as_tensor(value))
            fitted.append((part.param, views, values))
        return fitted

    def _from_torch_state(self, state: Dict[str, Any], part: ParamShard, group: Dict[str, Any],
                  views: Dict[str, Tensor]) -> Dict[str, Any]:
        """A parameter's state in the library's pieces, where it is of torch.optim's namesake and has others."""
        return state

    def _check_piece(self, index: int, name: str, view: Tensor, value: Tensor) -> Tensor:
        part = self._parts[index]
        if view.shape == (part.count,) and value.shape == (part.length,):
            value = value[: part.count]  # of a sharded parameter, with its padding
        if value.shape != view.shape:
            raise ValueError(f"{self._name()}: state {name!r} of parameter {index} has shape {tuple(value.shape)}, "
                             f"must be {tuple(view.shape)}")
        return value
