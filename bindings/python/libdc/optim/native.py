"""torch.optim.Optimizer over libdc's handle: PyTorch's groups, hooks, schedulers and state_dict(), with one call of the
library for a step."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Type

import torch
from libdc import DType
from libdc.linalg import Handle
from torch import Tensor

from ..torch import devices
from ..torch.dtypes import DTYPES, FLOAT_DTYPES
from . import arrays
from .native_state import NativeState
from .param_shard import ParamShard, on_elements


def betas_of(group: Dict[str, Any], closed: bool = False) -> Dict[str, float]:
    """A group's betas as the library's options. closed: beta2 may be 1."""
    try:
        beta1, beta2 = (float(beta) for beta in group["betas"])
    except (TypeError, ValueError):
        raise ValueError(f"betas = {group['betas']!r}, must be two numbers") from None
    for index, beta in enumerate((beta1, beta2)):
        if not (0 <= beta < 1 or (closed and index == 1 and beta == 1)):
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    return {"beta1": beta1, "beta2": beta2}


def _address(tensor: Optional[Tensor]) -> Optional[int]:
    """The address of a tensor of one element, or None."""
    if tensor is None:
        return None
    if tensor.numel() != 1:
        raise ValueError(f"grad_scale and found_inf must have one element, not {tensor.numel()}")
    return tensor.data_ptr()


class NativeOptimizer(NativeState):
    """A subclass sets `_native_class`, a class of libdc.optim.arrays, and defines `_options()`, which converts a group
    to that class's options. Groups' options and `state` may change at any time, by schedulers or by hand: each step
    reads them. Replacing a group's parameters is an error."""

    _step_supports_amp_scaling = True  # torch.amp.GradScaler sets `grad_scale` and `found_inf`, and does not wait
    _native_class: Type[arrays.Optimizer]
    _is_collecting = False  # whether PyTorch's constructor is still adding groups
    _devices: Tuple[str, ...] = ("cpu",)  # types of devices on which parameters may be
    _negative_errors = {"lr": "Invalid learning rate", "eps": "Invalid epsilon value",
                        "momentum": "Invalid momentum value",
                        "weight_decay": "Invalid weight_decay value"}  # PyTorch's texts for numbers < 0

    def __init__(self, params: Any, defaults: Dict[str, Any]) -> None:
        self._reset_native()
        self._is_collecting = True
        super().__init__(params, defaults)
        self._is_collecting = False
        for index in range(len(self.param_groups)):
            self._adopt_group(index)

    def _reset_native(self) -> None:
        self._native: Optional[arrays.Optimizer] = None  # made with the first group's options
        self._device = devices.CPU  # the first parameter's, which all others must share
        self._parts: List[ParamShard] = []
        self._param_ids: List[int] = []  # of `_parts`, and the number in each group, as last compared
        self._group_lengths: List[int] = []
        self._state_ids: Optional[List[int]] = None
        self._synced: List[Tuple[float, Dict[str, Any]]] = []  # each group's lr and options as the library has them
        self._tensors: Any = None  # a step's weights and gradients, as C structs
        self._stream_address: Optional[int] = None  # the CUDA stream on which steps run

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        raise NotImplementedError

    def _create_native(self, options: Dict[str, Any]) -> arrays.Optimizer:
        return self._native_class(handle=self._handle(), **options)

    def _handle(self) -> Handle:
        return Handle(torch.get_num_threads(), device=devices.open_device(self._name(), self._device))

    # ---- groups ----

    @on_elements
    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._is_collecting:
            return
        try:
            self._adopt_group(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    @on_elements
    def _adopt_group(self, group: int) -> None:
        """Adds a group to the library. The first group creates the library's optimizer, which depends on all groups."""
        self._find_device()
        params = self.param_groups[group]["params"]
        numbers: Dict[int, int] = {}
        for index, param in enumerate(params, len(self._parts)):  # checks all before it adds any to the library
            self._check_param(param, index)
            if numbers.setdefault(id(param), index) != index:
                raise ValueError(f"{self._name()}: parameters {numbers[id(param)]} and {index} are one tensor, which "
                                 "would have two states: give it once")
        self._check_apart(params)
        self._try_group(self.param_groups[group])
        self._sync_group(group)
        for param in params:
            self._add_param(param, group)

    def _check_apart(self, params: List[Tensor]) -> None:
        """Refuses parameters in the same memory: threads would step them at once, and lose one's step."""
        everything = [*(part.param for part in self._parts), *params]
        spans = sorted((param.data_ptr(), param.data_ptr() + param.numel() * param.element_size(), index)
                       for index, param in enumerate(everything) if param.numel() > 0 and param.is_contiguous())
        for (_, end, one), (begin, _, other) in zip(spans, spans[1:]):
            if begin < end:
                raise ValueError(f"{self._name()}: parameters {min(one, other)} and {max(one, other)} overlap in "
                                 "memory: to tie modules, give them one Parameter")

    def _try_group(self, group: Dict[str, Any]) -> None:
        """Adds a group's parameters to a trial optimizer, which is then dropped. After an error the real one would keep
        some of them."""
        if self._native is None:
            return
        trial = self._native_class(handle=self._handle(), **self._options(self._numbers(group)))
        for param in group["params"]:
            part = ParamShard(param)
            trial.add_param(part.shape, part.offset, part.count, DTYPES[param.dtype])

    def _find_device(self) -> None:
        """Sets the device from the first parameter, if the library's optimizer does not exist yet."""
        params = [param for group in self.param_groups for param in group["params"]]
        if self._native is None and params:
            self._device = params[0].device

    def _sync_group(self, index: int, group: Optional[Dict[str, Any]] = None) -> None:
        """Sets a group's options and learning rate in the library if they have changed."""
        numbers = self._numbers(self.param_groups[index] if group is None else group)
        now = float(numbers["lr"]), self._options(numbers)
        if index < len(self._synced) and self._synced[index] == now:
            return
        if self._native is None:
            self._native = self._create_native(now[1])
        else:
            self._native.set_group(index, **now[1])
        self._native.set_lr(index, now[0])
        self._synced[index:index + 1] = [now]

    def _numbers(self, group: Dict[str, Any]) -> Dict[str, Any]:
        """A group's arguments, with plain numbers in place of tensors and NumPy scalars, which may change in place.
        Refuses values that PyTorch refuses, with its error texts; the library checks the rest."""
        if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        numbers = {name: group[name] for name in self.defaults if name in group}
        for name, value in numbers.items():
            try:
                numbers[name] = value.item() if hasattr(value, "item") else value
            except (RuntimeError, ValueError):
                raise ValueError(f"{self._name()}: {name} = {value!r}, must be one number") from None
        for name, text in self._negative_errors.items():
            value = numbers.get(name, 0)
            try:
                allowed = value >= 0
            except TypeError:
                raise TypeError(f"{self._name()}: {name} = {value!r}, must be a number") from None
            if not allowed:
                raise ValueError(f"{text}: {value}")
        return numbers

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
        part = ParamShard(param, group)
        self._native.add_param(part.shape, part.offset, part.count, DTYPES[param.dtype], group)
        self._parts.append(part)
        self._tensors = None

    # ---- steps ----

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """Makes one step. closure: recomputes the loss and its gradients, and returns the loss. On a CUDA device the
        step runs in the order of PyTorch's current stream."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    @on_elements
    def _step_all(self) -> None:
        try:
            self.sync_groups()
            self._sync_state()
            grads = [self._grad_of(index, part) for index, part in enumerate(self._parts)]
            with self._scaled():
                self._step_native(grads)
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # GradScaler's next step would multiply by what is left there
                self.__dict__.pop(name, None)
            raise

    @contextlib.contextmanager
    def _scaled(self) -> Iterator[None]:
        """A step inside divides gradients by `grad_scale`, and does nothing if `found_inf` is not 0. It reads both when
        it runs."""
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
        """Passes changes of the groups to the library, as each step does. Use it to change learning rates between the
        launches of a CUDA graph that captured a step."""
        self._check_groups()
        self._use_current_stream()
        for index in range(len(self.param_groups)):
            self._sync_group(index)

    def _check_groups(self) -> None:
        """Raises if the groups' parameters are not those that the library has."""
        if [id(param) for group in self.param_groups for param in group["params"]] == self._param_ids and \
                [len(group["params"]) for group in self.param_groups] == self._group_lengths:
            return
        parts = iter(self._parts)
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                part = next(parts, None)
                if part is None or part.param is not param or part.group != number:
                    raise RuntimeError(f"{self._name()}: parameter {index} of group {number} is not the one that the "
                                       "optimizer was given there: add_param_group() adds parameters; to drop or "
                                       "replace some make another optimizer")
        part = next(parts, None)
        if part is not None:
            raise RuntimeError(f"{self._name()}: a parameter of group {part.group} is gone, which the optimizer was "
                               "given there: to drop parameters make another optimizer")
        self._param_ids = [id(part.param) for part in self._parts]
        self._group_lengths = [len(group["params"]) for group in self.param_groups]

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
        """The number of steps that check_finite or found_inf skipped. Waits for queued steps."""
        self._use_current_stream()
        return 0 if self._native is None else self._native.stats().skipped_steps

    def _grad_of(self, index: int, part: ParamShard) -> Optional[Tensor]:
        grad = part.param.grad
        if grad is None:
            return None
        if grad.numel() != part.length or part.param.numel() != part.length:
            raise RuntimeError(f"{self._name()}: parameter {index} has {part.param.numel()} elements and its gradient "
                               f"{grad.numel()}, but it had {part.length} when the optimizer was made: make it after "
                               "libdc.torch.shard()")
        if part.param.is_neg():
            raise RuntimeError(f"{self._name()}: parameter {index} is a lazy negative, must have its values in memory: "
                               "resolve_neg() gives them")
        if part.param.device != self._device:
            raise RuntimeError(f"{self._name()}: parameter {index} is on {part.param.device}, but was on "
                               f"{self._device} when the optimizer was made: move the model before that")
        if grad.layout != torch.strided:
            raise RuntimeError(f"{self._name()}: the gradient of parameter {index} is {grad.layout}, must be strided; "
                               "libdc has no sparse updates")
        if grad.dtype not in FLOAT_DTYPES:
            raise RuntimeError(f"{self._name()}: the gradient of parameter {index} is {grad.dtype}, must be float32, "
                               "float16 or bfloat16")
        return grad.resolve_neg().contiguous() if grad.is_neg() else grad.contiguous()

    def _step_native(self, grads: List[Optional[Tensor]]) -> None:
        native = self._native
        assert native is not None
        if self._tensors is None:
            counts, dtypes = [part.count for part in self._parts], [DTYPES[part.param.dtype] for part in self._parts]
            self._tensors = [arrays.FlatTensors(counts, dtypes) for _ in range(2)]
        weights = [part.param if part.param.is_contiguous() else part.param.contiguous() for part in self._parts]
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
            if weight is part.param:
                changed.append(part.param)
            else:
                part.param.copy_(weight)
            if part.pieces is None:
                self._show_state(index, self._views(index))
        torch.autograd.graph.increment_version(changed)
