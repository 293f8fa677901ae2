"""The other arguments of a function on parts, converted to flat tensors of this rank's elements, or an error."""

from __future__ import annotations

from typing import Any, Dict, List, NoReturn, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import reductions
from .part import Part, part_of, tensors_in


def _first_part(args: Any, kwargs: Dict[str, Any]) -> Part:
    parts = (part_of(tensor) for tensor in tensors_in([*args, *kwargs.values()]))
    return next(part for part in parts if part is not None)


def refuse_call(func: Any, args: Any, kwargs: Dict[str, Any]) -> NoReturn:
    part = _first_part(args, kwargs)
    name = getattr(func, "__name__", func)
    compiled = name == "untyped_storage"  # Dynamo calls it
    raise RuntimeError(f"{name}: this is {part}, and the function needs the whole: read the weight in the model's "
                       "forward, or in that of a module with parameters of its own, or in `with libdc.torch.gathered("
                       "model):`, or take full_tensor(), which every rank must call; to_local() is this rank's "
                       "elements as a plain tensor"
                       + ("; under torch.compile, use parameters outside of the compiled function" if compiled else ""))


def is_in_place(func: Any) -> bool:
    """Whether an elementwise function writes into its first argument."""
    name: str = func.__name__
    return name.startswith("__i") if name.startswith("__") else name.endswith("_")


def find_operands(values: Sequence[Any], source: Tensor, func: Any,
                  written: Any) -> Tuple[List[Any], Optional[torch.Size]]:
    """A call's arguments as flat tensors of this rank's elements, and their shape.

    Shape None: arguments and result are wholes. That is for parts of one element together with other tensors, such as
    each rank's own loss. Only one rank has the element, so otherwise the others would begin a backward without a loss.

    source     the first part among the arguments
    written    the tensor that the function writes into, if it does"""
    part: Part = source._part  # type: ignore[attr-defined]
    if isinstance(written, Tensor) and part_of(written) is not None:
        pass
    elif part.numel == 1 and _are_numbers(values):
        return [value if part_of(value) is None else reductions.gather_number(value) for value in values], None
    elif isinstance(written, Tensor) and written.shape != source.shape:
        refuse_call(func, values, {})
    operands = [_operand(value, part, source.shape, func) for value in values]
    lengths = {value.numel() for value in operands if isinstance(value, Tensor) and value.dim() == 1}
    if len(lengths) > 1:  # some with padding, some without
        operands = [value[: part.count] if isinstance(value, Tensor) and value.dim() == 1 else value
                    for value in operands]
    return operands, torch.Size([min(lengths)])


def _are_numbers(values: Sequence[Any]) -> bool:
    """Whether all parts have one element, and there are other tensors too."""
    parts = [part_of(value) for value in values if isinstance(value, Tensor)]
    return None in parts and all(part is None or part.numel == 1 for part in parts)


def _operand(value: Any, part: Part, local: torch.Size, func: Any) -> Any:
    """An argument as a flat tensor of this rank's elements."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return reductions.spread(value, part)
    other = part_of(value)
    if other is not None:
        if not part.fits(other):
            raise RuntimeError(f"{func.__name__}: {part} and {other} do not have the same elements: take full_tensor() "
                               "of both, which every rank must call")
        return value
    if value.numel() == 1:
        return reductions.spread(value, part).reshape(1).expand(local)  # a 0-d type would not count
    spread = _expand(value, part.shape)
    if value.shape in (local, (part.count,)):
        if spread is not None and value.numel() != part.numel:
            raise RuntimeError(f"{func.__name__}: a tensor of shape {tuple(value.shape)} may be this rank's elements "
                               f"of {part}, or values to spread over the whole: give a part, as zeros_like() and "
                               f"clone() make them, or a tensor of shape {tuple(part.shape)}")
        if spread is None or not value.requires_grad:
            return value
    if spread is None:
        raise RuntimeError(f"{func.__name__}: a tensor of shape {tuple(value.shape)} does not go with {part}")
    return part.of(_expand(reductions.spread(value, part), part.shape))  # type: ignore[arg-type]


def _expand(value: Tensor, shape: torch.Size) -> Optional[Tensor]:
    try:
        return value.expand(shape)
    except RuntimeError:
        return None
