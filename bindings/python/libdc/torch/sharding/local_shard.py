"""PyTorch's functions on parts: each gives the whole tensor's result, or an error that names an alternative.

Calls with parts among their arguments, ShardedParameter or LocalShard, go through dispatch(). Elementwise functions
work on the part, and their result is a part again. Shapes are the whole's. Views of contiguous pieces are parts of
those pieces. Random numbers fill a whole tensor first. Sums, norms and similar functions are collective
(reductions.py). All other functions would need the whole, and are errors."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, NoReturn, Optional, Tuple

import torch
from torch import Tensor

from . import reductions
from .checkpointable import Checkpointable
from .operands import find_operands, is_in_place, refuse_call
from .part import Part, part_of, plain_tensor, tensors_in

_Handler = Callable[[Any, Tuple[Any, ...], Dict[str, Any]], Any]
_SAVE = ("save with libdc.torch.save_checkpoint() or torch.distributed.checkpoint, or save the results of "
         "full_state_dict(), full_optimizer_state_dict() or full_tensor(); to_local() is the part as a plain tensor")


class LocalShard(Checkpointable, torch.Tensor):
    """A rank's part of a parameter, or of a tensor with its elements: a gradient, an optimizer's state, an average."""

    _part: Any = None

    @classmethod
    def of(cls, part: Part, local: Tensor) -> LocalShard:
        with torch._C.DisableTorchFunctionSubclass():
            shard = local.as_subclass(cls)
        shard._part = part
        return shard

    @classmethod
    def __torch_function__(cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def full_tensor(self) -> Tensor:
        """The whole tensor. Every rank must call it."""
        whole = self._part.gather(self)
        assert whole is not None
        return whole

    def to_local(self) -> Tensor:
        """The part as a plain tensor, over the same memory."""
        return plain_tensor(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self._part}: {plain_tensor(self)}>"

    def __deepcopy__(self, memo: Dict[int, Any]) -> LocalShard:
        memo[id(self)] = copy = LocalShard.of(self._part, plain_tensor(self).clone())
        return copy

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse_saving(self._part)

    __reduce_ex__ = storage = untyped_storage = _refuse  # type: ignore[assignment]


class OwnedState(torch.Tensor):
    """A piece of an optimizer's state that only this rank has, such as a block's."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _near: Any = None  # the part of its parameter

    @classmethod
    def of(cls, part: Part, tensor: Tensor) -> OwnedState:
        state = tensor.as_subclass(cls)
        state._near = part
        return state

    def __deepcopy__(self, memo: Dict[int, Any]) -> OwnedState:
        memo[id(self)] = copy = OwnedState.of(self._near, plain_tensor(self).clone())
        return copy

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse_saving(self._near)

    __reduce_ex__ = storage = untyped_storage = _refuse  # type: ignore[assignment]


def refuse_saving(part: Part) -> NoReturn:
    raise TypeError(f"{part} is not the whole: {_SAVE}")


def dispatch(func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """Calls a PyTorch function that has parts among its arguments."""
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _find_handler(func)
    with torch._C.DisableTorchFunctionSubclass():
        return handler(func, args, kwargs)


# Functions that do not depend on elements, or only on properties that parts and wholes share


def _on_local(func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _on_shape(func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    """Calls the function on a meta tensor of the whole's shape."""
    args, kwargs = _as_meta(args), {name: _as_meta(value) for name, value in kwargs.items()}
    return func(*args, **kwargs)


def _as_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_meta, value)) if type(value) in (list, tuple) else value
    part = part_of(value)
    return value if part is None else torch.empty(part.shape, dtype=value.dtype, device="meta")


def _shape(func: Any, args: Any, kwargs: Dict[str, Any]) -> torch.Size:
    return args[0]._part.shape


def _get_grad(func: Any, args: Any, kwargs: Dict[str, Any]) -> Optional[Tensor]:
    """`.grad` as a part. Autograd's own gradient, for uses outside of the model's forward, is a plain tensor at
    first."""
    grad = func(*args)
    if grad is not None and part_of(grad) is None:
        grad = LocalShard.of(args[0]._part, grad)
        torch.Tensor.grad.__set__(args[0], grad)
    return grad


def _set_grad(func: Any, args: Any, kwargs: Dict[str, Any]) -> None:
    param, grad = args
    part = param._part
    entry = part.entry_ref()
    if grad is None and entry is not None and entry.param_ref() is param:
        entry.drop_local_sum()
    func(param, _values_for(param, grad, "grad") if isinstance(grad, Tensor) else grad)


def _delete_grad(func: Any, args: Any, kwargs: Dict[str, Any]) -> None:
    _set_grad(torch.Tensor.grad.__set__, (args[0], None), kwargs)  # type: ignore[attr-defined]


def _values_for(tensor: Any, values: Tensor, call: str) -> Tensor:
    """A part to replace a tensor's gradient or data. values may be a part, the whole, or this rank's elements."""
    part, other = tensor._part, part_of(values)
    if other is not None and part.fits(other):
        if values.numel() == tensor.numel():
            return values
        elements = plain_tensor(values)  # the result of operands without padding
    elif other is None and values.shape == part.shape:
        elements = part.of(values)
    elif other is None and values.shape in (tensor.shape, (part.count,)):
        elements = values
    else:
        raise RuntimeError(f"{call}: a {other or f'tensor of shape {tuple(values.shape)}'} cannot be that of {part}: "
                           f"give a part of it, a tensor of shape {tuple(part.shape)}, or this rank's elements, of "
                           f"shape {(part.count,)}")
    missing = tensor.numel() - elements.numel()
    return LocalShard.of(part, torch.cat([elements, elements.new_zeros(missing)]) if missing else elements)


def _get_data(func: Any, args: Any, kwargs: Dict[str, Any]) -> Tensor:
    return LocalShard.of(args[0]._part, func(*args))


def _set_data(func: Any, args: Any, kwargs: Dict[str, Any]) -> None:
    func(args[0], _values_for(*args, "data"))


def _autograd_grad(func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    """torch.autograd.grad(): gradients of parts are parts."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    grads = func(*args, **kwargs)
    if isinstance(inputs, Tensor):
        inputs = (inputs,)

    def wrap(grad: Any, source: Any) -> Any:
        part = part_of(source)
        return grad if grad is None or part is None or grad.shape != source.shape else LocalShard.of(part, grad)

    return tuple(map(wrap, grads, inputs))


# Elementwise functions


def _elementwise(func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    source = args[0] if args else None
    part = part_of(source)
    if part is None or len(args) > 1 or kwargs:
        return _with_operands(func, args, kwargs)
    return _wrap(_single(func, args, kwargs, func(source)), source, part, source.shape)


def _single(func: Any, args: Any, kwargs: Dict[str, Any], result: Any) -> Any:
    """Refuses tuples, which are indices, as of where(condition), or several tensors."""
    return refuse_call(func, args, kwargs) if isinstance(result, tuple) else result


def _refuse_channels_last(func: Any, args: Any, kwargs: Dict[str, Any]) -> None:
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        refuse_call(func, args, kwargs)


def _with_operands(func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    _refuse_channels_last(func, args, kwargs)
    source = next(tensor for tensor in tensors_in([*args, *kwargs.values()]) if part_of(tensor) is not None)
    values = *args, *kwargs.values()
    operands, shape = find_operands(values, source, func, kwargs.get("out", args[0] if is_in_place(func) else None))
    result = _single(func, args, kwargs, func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :]))))
    for value, used in zip(values, operands):
        if result is used:
            return value
    return _wrap(result, source, source._part, shape)


def _to(func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    """to() and type_as(). Of another tensor only the type and device count, whatever its shape."""
    _refuse_channels_last(func, args, kwargs)
    source, part = args[0], part_of(args[0])
    result = func(*args, **kwargs)
    return result if part is None else _wrap(result, source, part, source.shape)


def _wrap(result: Any, source: Tensor, part: Part, shape: Optional[torch.Size]) -> Any:
    if result is source or not isinstance(result, Tensor) or result.shape != shape:
        return result
    return LocalShard.of(part, result)


def _foreach(func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    """Functions of lists: called for one tensor after the other, each with the operands at its index."""
    lists = [value for value in args if isinstance(value, (list, tuple)) and any(isinstance(t, Tensor) for t in value)]
    lengths = [len(each) for each in lists]
    if len(set(lengths)) > 1:
        raise RuntimeError(f"{func.__name__}: lists of {lengths} tensors, must have as many each")
    columns: List[List[Any]] = []
    sources = []
    for row in zip(*lists):
        source = next((tensor for tensor in row if part_of(tensor) is not None), None)
        written = row[0] if is_in_place(func) else None
        operands, shape = (list(row), None) if source is None else find_operands(row, source, func, written)
        sources.append((source, shape))
        columns.append(operands)
    given = iter([list(column) for column in zip(*columns)])
    result = func(*(next(given) if any(value is each for each in lists) else value for value in args), **kwargs)
    if func.__name__.endswith("_") or not isinstance(result, (list, tuple)):
        return result
    return type(result)(value if source is None else _wrap(value, source, source._part, shape)
                        for value, (source, shape) in zip(result, sources))


# Views and writes into them


def _view(func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    """Views. A contiguous piece of the whole is a part again."""
    source = args[0]
    if part_of(source) is None:
        return (_on_shape if func.__name__.endswith("_as") else refuse_call)(func, args, kwargs)
    meta = torch.empty(source._part.shape, dtype=source.dtype, device="meta")
    shown = func(meta, *_as_meta(tuple(args[1:])), **kwargs)

    def piece(view: Tensor) -> Tensor:
        if not (view is meta or view._is_view()) or not view.is_contiguous() or view.dtype != source.dtype:
            refuse_call(func, args, kwargs)
        part = source._part.piece(view.shape, view.storage_offset())
        if view.numel() == source._part.numel:
            return LocalShard.of(part, source.view(-1))
        first = part.start + part.begin - source._part.start - source._part.begin
        return LocalShard.of(part, source[first : first + part.count])

    return tuple(map(piece, shown)) if isinstance(shown, (list, tuple)) else piece(shown)


def _set_item(func: Any, args: Any, kwargs: Dict[str, Any]) -> None:
    tensor, index, value = args
    if part_of(tensor) is None:
        refuse_call(func, args, kwargs)
    piece = _view(torch.Tensor.__getitem__, (tensor, index), {})
    dispatch(torch.Tensor.copy_ if isinstance(value, Tensor) else torch.Tensor.fill_, (piece, value), {})


# Random numbers


def _draw(func: Any, args: Any, kwargs: Dict[str, Any]) -> Tensor:
    """Fills a part with random numbers, in place."""
    kwargs = dict(kwargs)
    tensor, args = (kwargs.pop("tensor"), ()) if "tensor" in kwargs else (args[0], args[1:])
    if part_of(tensor) is None:
        refuse_call(func, args, kwargs)
    tensor._part.fill(tensor, lambda whole: func(whole, *args, **kwargs))
    return tensor


def _draw_like(func: Any, args: Any, kwargs: Dict[str, Any]) -> Tensor:
    like = torch.empty_like(args[0], **{name: kwargs[name] for name in ("dtype", "device") if name in kwargs})
    args[0]._part.fill(like, lambda whole: whole.copy_(func(whole, *args[1:], **kwargs)))
    return LocalShard.of(args[0]._part, like)


# The functions of each kind

_DRAWS = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
          "kaiming_uniform_"}
_DRAWS_LIKE = {"bernoulli", "rand_like", "randint_like", "randn_like"}
_SHAPES = {"__len__", "dim", "ndimension", "nelement", "numel", "size", "stride"}
_VIEWS = {"__getitem__", "chunk", "expand_as", "flatten", "narrow", "ravel", "reshape", "reshape_as", "select", "split",
          "squeeze", "tensor_split", "unbind", "unflatten", "unsqueeze", "view", "view_as"}
_LOCAL = {"__format__", "__hash__", "_has_compatible_shallow_copy_type", "_is_view", "backward", "constant_",
          "element_size", "get_device", "has_names", "is_complex", "is_conj", "is_contiguous",
          "is_floating_point", "is_inference", "is_neg",
          "is_pinned", "is_signed", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "requires_grad_",
          "retain_grad", "storage_offset"}
# Elementwise functions besides those that PyTorch tags as pointwise.
_ELEMENTWISE = {"alias", "bfloat16", "bool", "contiguous", "copy", "cpu", "cuda", "detach", "double", "empty_like",
                "fill", "float", "floor_divide", "full_like", "half", "int", "isclose", "long", "ones_like",
                "type", "zero", "zeros_like",
                # Aliases, which PyTorch does not tag.
                "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "byte", "char",
                "conj", "divide", "fix", "greater", "greater_equal", "less", "less_equal", "multiply", "negative",
                "not_equal", "resolve_conj", "resolve_neg", "short", "subtract"}
_OPERATORS = {"and": "bitwise_and", "floordiv": "floor_divide", "invert": "bitwise_not", "lshift": "bitwise_left_shift",
              "mod": "remainder", "or": "bitwise_or", "pos": "positive", "rshift": "bitwise_right_shift",
              "truediv": "div", "xor": "bitwise_xor"}
_FUSED = {"_amp_foreach_non_finite_check_and_unscale_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_",
          "_fused_sgd_"}
_handlers: Dict[Any, _Handler] = {torch.Tensor.shape.__get__: _shape, torch.Tensor.ndim.__get__: _on_shape,
                                  torch.autograd.grad: _autograd_grad,
                                  torch.Tensor.nbytes.__get__: _on_shape,
                                  torch.Tensor.grad.__get__: _get_grad, torch.Tensor.grad.__set__: _set_grad,
                                  torch.Tensor.grad.__delete__: _delete_grad, torch.Tensor.data.__get__: _get_data,
                                  torch.Tensor.data.__set__: _set_data}


def _find_handler(func: Any) -> _Handler:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        changes_shape = getattr(func, "__self__", None) in (torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H,
                                                            torch.Tensor.mH, torch.Tensor.real, torch.Tensor.imag)
        return refuse_call if changes_shape else _on_local
    for names, handler in ((_LOCAL, _on_local), (_SHAPES, _on_shape), (_VIEWS, _view), (_DRAWS, _draw),
                           (_DRAWS_LIKE, _draw_like), (_FUSED, _foreach), ({"to", "type_as"}, _to)):
        if name in names:
            return handler
    if name == "__setitem__":
        return _set_item
    if name in reductions.HANDLERS:
        return reductions.HANDLERS[name]
    if name == "_foreach_norm":
        return reductions.norms
    if name.startswith("_foreach_"):
        single = name[len("_foreach_") :]
        return _foreach if _is_elementwise(single) and single not in reductions.HANDLERS else refuse_call
    return _elementwise if _is_elementwise(name) else refuse_call


def _is_elementwise(name: str) -> bool:
    core = name[2:-2] if name.startswith("__") else name.rstrip("_")
    names = [core] if not name.startswith("__") else [core, core[1:]]  # __radd__, __iadd__
    names = [_OPERATORS.get(each, each) for each in names]
    return any(each in _ELEMENTWISE or _is_pointwise(each) for each in names)


def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads())
