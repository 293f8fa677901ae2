"""Gradients per sample, their norms, and clipped sums."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Tuple

from .._lib import ffi, lib, new_struct
from ..arguments import c_double, choice, flag
from ..errors import check
from .handle import Array, Handle, handle_ptr, output_array

_KINDS = {"linear": 1, "conv": 2, "embedding": 3, "layer_norm": 4, "rms_norm": 5, "bag_sum": 6, "bag_mean": 7,
          "group_norm": 8}
_TABLES = ("embedding", "bag_sum", "bag_mean")


class SampleLayer(NamedTuple):
    """A layer's constants; see dc_sample_layer. kind: "linear", "conv", "embedding", "bag_sum", "bag_mean",
    "layer_norm", "rms_norm" or "group_norm"."""

    kind: str
    kernel: Sequence[int] = ()
    stride: Sequence[int] = ()
    padding: Sequence[int] = ()
    dilation: Sequence[int] = ()
    groups: int = 0
    rows: int = 0
    padding_row: Optional[int] = None
    features: int = 0
    eps: float = 0.0

    @property
    def has_bias(self) -> bool:
        return self.kind not in (*_TABLES, "rms_norm")

    def c(self) -> Any:
        layer = new_struct("dc_sample_layer")
        layer.kind, layer.groups, layer.rows = choice("kind", self.kind, _KINDS), self.groups, self.rows
        if self.padding_row is not None:
            layer.has_padding_row, layer.padding_row = 1, self.padding_row
        layer.features, layer.eps = self.features, self.eps
        for name in ("kernel", "stride", "padding", "dilation"):
            for i, length in enumerate(getattr(self, name)):
                getattr(layer, name)[i] = length
        return layer

    def shapes(self, x: Sequence[int], delta: Sequence[int]) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
        """The shapes of weight and bias, given those of x and delta."""
        if self.kind == "linear":
            return (delta[-1], x[-1]), (delta[-1],)
        if self.kind == "conv":
            return (delta[1], x[1] // (self.groups or 1), *self.kernel), (delta[1],)
        if self.kind in _TABLES:
            return (self.rows, delta[-1]), ()
        if self.kind == "group_norm":
            return (x[1],), (x[1],)
        return (self.features or x[-1],), (self.features or x[-1],)


def per_sample_grads(layer: SampleLayer, x: Any, delta: Any, *, weight: Any = None, bias: Any = None,
                     want_weight: bool = True, want_bias: Optional[bool] = None,
                     handle: Optional[Handle] = None) -> Tuple[Any, Any]:
    """(weight, bias): the gradients, with the samples in the first dimension. weight, bias: memory for the results;
    want_weight, want_bias: whether to compute each; want_bias None: if the layer has one."""
    inputs, deltas = Array(x, "x", handle), Array(delta, "delta", handle)
    shapes = [(deltas.shape[0], *shape) for shape in layer.shapes(inputs.shape, deltas.shape)]
    wanted = _wanted(layer, want_weight, want_bias)
    parts = [output_array(given, delta, shape, deltas.dtype, handle, name) if want else None
             for given, shape, want, name in zip((weight, bias), shapes, wanted, ("weight", "bias"))]
    check(lib.dc_per_sample_grads(handle_ptr(handle), layer.c(), inputs.c, deltas.c, *_pointers(parts)))
    return _arrays(parts)


def per_sample_norms(layer: SampleLayer, x: Any, delta: Any, *, want_weight: bool = True,
                     want_bias: Optional[bool] = None, add_to: Any = None, handle: Optional[Handle] = None) -> Any:
    """The squared norms of each sample's gradients. add_to: an array to which they are added."""
    inputs, deltas = Array(x, "x", handle), Array(delta, "delta", handle)
    squares = output_array(add_to, delta, deltas.shape[:1], deltas.dtype, handle, "add_to")
    with_weight, with_bias = _wanted(layer, want_weight, want_bias)
    parts = int(with_weight) + 2 * int(with_bias)
    check(lib.dc_per_sample_norms(handle_ptr(handle), layer.c(), inputs.c, deltas.c, parts, add_to is not None,
                                  squares.c))
    return squares.array


def clip_factors(squares: Any, max_norm: float, *, out: Any = None, handle: Optional[Handle] = None) -> Any:
    """min(1, max_norm / (norm + 1e-6)), and 0 for a norm that is not finite."""
    given = Array(squares, "squares", handle)
    factors = output_array(out, squares, given.shape, given.dtype, handle)
    check(lib.dc_clip_factors(handle_ptr(handle), given.c, c_double("max_norm", max_norm), factors.c))
    return factors.array


def clipped_grad_sum(layer: SampleLayer, x: Any, delta: Any, factors: Any = None, *, weight: Any = None,
                     bias: Any = None, want_weight: bool = True, want_bias: Optional[bool] = None,
                     accumulate: bool = False, handle: Optional[Handle] = None) -> Tuple[Any, Any]:
    """(weight, bias): the sum over samples of factor times gradient. accumulate: adds to weight and bias; those that
    are wanted must then be given."""
    inputs, deltas = Array(x, "x", handle), Array(delta, "delta", handle)
    scales = None if factors is None else Array(factors, "factors", handle)
    wanted, accumulate = _wanted(layer, want_weight, want_bias), flag("accumulate", accumulate)
    for name, given, want in zip(("weight", "bias"), (weight, bias), wanted):
        if accumulate and want and given is None:
            raise ValueError(f"accumulate = {accumulate!r}, but there is no {name} to which it could add; "
                             f"want_{name}=False leaves it out")
    shapes = layer.shapes(inputs.shape, deltas.shape)
    parts = [output_array(given, delta, shape, deltas.dtype, handle, name) if want else None
             for given, shape, want, name in zip((weight, bias), shapes, wanted, ("weight", "bias"))]
    check(lib.dc_clipped_grad_sum(handle_ptr(handle), layer.c(), inputs.c, deltas.c, scales.c if scales else ffi.NULL,
                                  accumulate, *_pointers(parts)))
    return _arrays(parts)


def _wanted(layer: SampleLayer, want_weight: bool, want_bias: Optional[bool]) -> Tuple[bool, bool]:
    """Whether the weight's part is wanted, and the bias'."""
    return flag("want_weight", want_weight), layer.has_bias if want_bias is None else flag("want_bias", want_bias)


def _pointers(parts: Sequence[Optional[Array]]) -> Tuple[Any, ...]:
    return tuple(part.c if part else ffi.NULL for part in parts)


def _arrays(parts: Sequence[Optional[Array]]) -> Tuple[Any, Any]:
    weight, bias = (part.array if part else None for part in parts)
    return weight, bias
