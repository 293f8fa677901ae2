"""Sums, norms and similar functions of parts. They are collective: every rank must call them, and gets the whole's
result."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, NoReturn, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .part import Part, part_of


class _SumOverRanks(torch.autograd.Function):
    """A sum of the ranks' values, which every rank's loss may contain. The gradient is that of the mean of the ranks'
    losses, as for all gradients that libdc averages. So each rank's value gets the mean of the ranks' gradients of the
    sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, part: Part) -> Tensor:
        ctx.part = part
        return part.gather_value(value).sum().to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        return ctx.part.gather_value(grad, all_ranks=True).mean().to(grad.device), None


class _SpreadOverRanks(torch.autograd.Function):
    """A tensor that all ranks have, as an operand with a part. This rank's elements give a share of its gradient; the
    gradient is the sum of the ranks' shares."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, part: Part) -> Tensor:
        ctx.part = part
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        return ctx.part.sum_over_ranks(grad), None


class _WholeNumber(torch.autograd.Function):
    """The element of a part of one element, on every rank. Its gradient is the mean of the ranks' gradients, as for all
    parameters."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, part: Part) -> Tensor:
        ctx.part, ctx.local = part, value.shape
        whole = part.gather(value)
        assert whole is not None
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        return ctx.part.gather_value(grad, all_ranks=True).mean().to(grad.device).expand(ctx.local), None


def gather_number(value: Tensor) -> Tensor:
    """The element of a part of one element, as a plain tensor."""
    return _WholeNumber.apply(value, part_of(value))  # type: ignore[no-any-return]


def spread(value: Tensor, part: Part) -> Tensor:
    """An operand that all ranks have, used with a part. Its gradient is summed over all ranks' elements."""
    if part.cut.size == 1 or not value.requires_grad or not torch.is_grad_enabled():
        return value
    return _SpreadOverRanks.apply(value, part)  # type: ignore[no-any-return]


def _elements(call: str, args: Any, kwargs: Dict[str, Any], allowed: Tuple[str, ...]) -> Tuple[Part, Tensor]:
    """The part and this rank's elements, for a reduction of all elements."""
    source = args[0] if args else next(iter(kwargs.values()))
    part = part_of(source)
    if part is None or any(
            not (value is None or value is False) for name, value in kwargs.items() if name not in allowed):
        _refuse_some(call)
    return part, source[: part.count]


def _refuse_some(call: str) -> NoReturn:
    raise RuntimeError(f"{call}: parts of a sharded model's parameters are reduced over all elements: take "
                       "full_tensor() for more, which every rank must call")


def _is_narrow(dtype: torch.dtype) -> bool:
    """Whether PyTorch computes sums and norms of the type in float32, so that intermediate results do not overflow."""
    return dtype in (torch.float16, torch.bfloat16)


def _total(local: Tensor, part: Part, dtype: Optional[torch.dtype]) -> Tuple[Tensor, torch.dtype]:
    """The sum of all elements, and the type of the result, which may be narrower."""
    result = local.dtype if dtype is None else dtype
    value = local.sum(dtype=torch.float32 if _is_narrow(result) else dtype)
    return _SumOverRanks.apply(value, part), result if _is_narrow(result) else value.dtype


def _sum(func: Any, args: Any, kwargs: Dict[str, Any]) -> Tensor:
    _one_argument("sum", args)
    part, local = _elements("sum", args, kwargs, ("dtype", "input"))
    total, dtype = _total(local, part, kwargs.get("dtype"))
    return total.to(dtype)


def _mean(func: Any, args: Any, kwargs: Dict[str, Any]) -> Tensor:
    _one_argument("mean", args)
    part, local = _elements("mean", args, kwargs, ("dtype", "input"))
    total, dtype = _total(local, part, kwargs.get("dtype"))
    return (total / part.numel).to(dtype)


def _one_argument(call: str, args: Any) -> None:
    if len(args) > 1:
        _refuse_some(call)


def _norm(func: Any, args: Any, kwargs: Dict[str, Any]) -> Tensor:
    part, local = _elements("norm", args[:1], kwargs, ("p", "ord", "input", "x", "A"))
    _one_argument("norm", args[1:])
    order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord"))
    if order == "nuc" or (func.__name__ == "linalg_norm" and len(part.shape) > 1 and order not in (None, "fro")):
        _refuse_some(f"norm of order {order!r}")  # a matrix norm
    order = 2.0 if order in (None, "fro") else float(order)
    if math.isinf(order):
        return _extreme(local.abs(), part, largest=order > 0)
    if order == 0:
        return _SumOverRanks.apply((local != 0).sum(), part).to(local.dtype)
    wide = (local.float() if _is_narrow(local.dtype) else local).abs()
    powers = _without_zeros(wide, lambda size: size.pow(order)) if 0 < order < 1 else wide.pow(order)
    total = _SumOverRanks.apply(powers.sum(), part)
    return _without_zeros(total, lambda power: power.pow(1.0 / order)).to(local.dtype)


def norms(func: Any, args: Any, kwargs: Dict[str, Any]) -> Tuple[Tensor, ...]:
    """torch._foreach_norm(), which is collective for each part in the list."""
    return tuple(func([tensor], *args[1:], **kwargs)[0] if part_of(tensor) is None
                 else _norm(func, (tensor, *args[1:]), kwargs) for tensor in args[0])


def _without_zeros(value: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The function's values, except that zeros stay zeros with gradient 0, as in PyTorch's norms. The function's own
    gradient would be infinite there."""
    is_zero = value == 0
    return torch.where(is_zero, torch.zeros_like(value), function(value.masked_fill(is_zero, 1)))


def _extreme(local: Tensor, part: Part, largest: bool) -> Tensor:
    if local.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{'max' if largest else 'min'}: {part} has no gradient through an extreme value over the "
                           "ranks: take it in the model's forward, or under torch.no_grad()")
    limits = torch.finfo(local.dtype) if local.is_floating_point() else torch.iinfo(local.dtype)
    least = -math.inf if local.is_floating_point() else limits.min
    most = math.inf if local.is_floating_point() else limits.max
    if local.numel() == 0:
        mine = local.new_full((), least if largest else most)
    else:
        mine = local.amax() if largest else local.amin()
    values = part.gather_value(mine)
    return values.amax() if largest else values.amin()


def _extreme_of(largest: bool) -> Callable[..., Tensor]:
    def reduce(func: Any, args: Any, kwargs: Dict[str, Any]) -> Tensor:
        _one_argument(func.__name__, args)
        part, local = _elements(func.__name__, args, kwargs, ("input",))
        return _extreme(local, part, largest)

    return reduce


def _truth_of(every: bool) -> Callable[..., Tensor]:
    def reduce(func: Any, args: Any, kwargs: Dict[str, Any]) -> Tensor:
        _one_argument(func.__name__, args)
        part, local = _elements(func.__name__, args, kwargs, ("input",))
        values = part.gather_value((local.all() if every else local.any()).to(torch.int32)).bool()
        return values.all() if every else values.any()

    return reduce


def _count_nonzero(func: Any, args: Any, kwargs: Dict[str, Any]) -> Tensor:
    _one_argument("count_nonzero", args)
    part, local = _elements("count_nonzero", args, kwargs, ("input",))
    return part.gather_value(local.count_nonzero()).sum()


def _equal(func: Any, args: Any, kwargs: Dict[str, Any]) -> bool:
    """equal() and allclose() of a part with a part, or with a whole."""
    first, second = args[0], args[1]
    part = part_of(first) or second._part
    operands = []
    for value in (first, second):
        other = part_of(value)
        if value.shape != part.shape if other is None else not part.fits(other):
            return False
        operands.append(part.of(value) if other is None else value[: part.count])
    same = torch.tensor(int(func(*operands, *args[2:], **kwargs)), dtype=torch.int32)
    return bool(part.gather_value(same).bool().all())


def _on_whole(func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    """Conversions of a part of one element: all ranks get the element, which one rank has."""
    return func(args[0]._part.gather(args[0]), *args[1:], **kwargs)


HANDLERS: Dict[str, Callable[..., Any]] = {
    "sum": _sum, "mean": _mean, "norm": _norm, "vector_norm": _norm, "linalg_norm": _norm, "linalg_vector_norm": _norm,
    "max": _extreme_of(True), "amax": _extreme_of(True), "min": _extreme_of(False), "amin": _extreme_of(False),
    "all": _truth_of(True), "any": _truth_of(False), "count_nonzero": _count_nonzero, "equal": _equal,
    "allclose": _equal, "item": _on_whole, "tolist": _on_whole, "__float__": _on_whole, "__int__": _on_whole,
    "__bool__": _on_whole, "__index__": _on_whole,
}  # fmt: skip
