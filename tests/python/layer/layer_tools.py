"""A layer, its weights and its float64 reference side by side, for the tests of the transformer layer."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
from layer_reference import Reference

import libdc
from libdc.transformer import WEIGHTS, Layer, LayerConfig, empty

DTYPES = ["float32", "float16", "bfloat16"]
FLAGS = ["normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint"]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
placements = pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])

# Relative error in the Frobenius norm, and the greatest error in units of the greatest value (the list's section 7).
GATES = {"float32": (2e-6, 2e-5), "float16": (1.5e-3, 4e-3), "bfloat16": (1.2e-2, 2.5e-2)}


def flags_of(number: int) -> Dict[str, bool]:
    """The memory flags that a number's bits set."""
    return {name: bool(number >> i & 1) for i, name in enumerate(FLAGS)}


def put(values: Any, dtype: str) -> Any:
    """An array of the type, rounded to nearest even; bfloat16, which NumPy has not, is a libdc.Tensor."""
    values = np.asarray(values)
    if dtype != "bfloat16":
        return np.ascontiguousarray(values.astype(dtype))
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    tensor = empty(values.shape, dtype)
    np.asarray(tensor.bits())[...] = rounded.view(np.int16).reshape(values.shape)
    return tensor


def get(array: Any) -> np.ndarray:
    """The array's values in float64."""
    if isinstance(array, libdc.Tensor) and array.dtype is libdc.DType.BFLOAT16:
        bits = np.asarray(array.bits()).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).reshape(array.shape)
    return np.asarray(array).astype(np.float64)


def bits(array: Any) -> bytes:
    """The array's memory."""
    if isinstance(array, libdc.Tensor) and array.dtype is libdc.DType.BFLOAT16:
        array = array.bits()
    return np.asarray(array).tobytes()


class Case:
    """A layer with random weights: scales of 0.5 to 1.5, biases everywhere."""

    def __init__(self, hidden: int, heads: int, intermediate: int, batch: int, seq: int, dtype: str = "float32",
                 ratio: float = 0.0, seed: int = 0, weight_scale: float = 0.05, **config: Any) -> None:
        config.setdefault("threads", 2)
        self.config = LayerConfig(hidden, heads, intermediate, attn_dropout_ratio=ratio, hidden_dropout_ratio=ratio,
                                  dtype=dtype, seed=5, **config)
        self.layer, self.dtype, self.shape = Layer(self.config), dtype, (batch, seq, hidden)
        rng = np.random.default_rng(seed)
        self.weights: List[Any] = []
        for name, shape in self.layer.weight_shapes.items():
            if name in ("attn_nw", "norm_w"):
                values = rng.uniform(0.5, 1.5, shape)
            elif len(shape) == 1:
                values = rng.uniform(-0.5, 0.5, shape)
            else:
                values = rng.standard_normal(shape, np.float32) * np.float32(weight_scale)
            self.weights.append(put(values, dtype))
        self.x, self.dy = (put(rng.standard_normal(self.shape), dtype) for _ in range(2))

    def forward(self, mask: Any = None, offset: int = 0) -> Tuple[Any, Any]:
        return self.layer.forward(self.weights, self.x, mask=mask, offset=offset)

    def run(self, mask: Any = None, offset: int = 0) -> Tuple[Any, Any, List[Any]]:
        output, kept = self.forward(mask, offset)
        return (output, *self.layer.backward(self.weights, self.x, self.dy, kept))

    def drops(self, offset: int) -> Tuple[Any, ...]:
        if not self.config.hidden_dropout_ratio:
            return 1.0, 1.0, 1.0
        masks = (self.layer.dropout_mask(site, *self.shape[:2], offset)
                 for site in ("attention", "projection", "output"))
        return tuple(np.asarray(mask) * scale for mask, scale in masks)

    def reference(self, mask: Any = None, offset: int = 0, gradients: bool = True) -> Any:
        """The output, gradient of x, and the weights' gradients; without gradients the output alone."""
        model = Reference(self.config.heads, self.config.pre_layer_norm, self.config.gelu,
                          self.config.layer_norm_eps or 1e-12)
        weights = dict(zip(WEIGHTS, map(get, self.weights)))
        output = model.forward(weights, get(self.x), None if mask is None else get(mask), self.drops(offset))
        return (output, *model.backward(get(self.dy))) if gradients else output


def close(name: str, found: Any, expected: np.ndarray, dtype: str, slack: float = 1.0) -> None:
    """Within the gates of the type."""
    found = get(found)
    norm, most = GATES[dtype]
    difference = found - expected
    error = np.linalg.norm(difference) / max(np.linalg.norm(expected), 1e-30)
    assert error <= norm * slack, f"{name}: relative error {error:.3g}, must be at most {norm * slack:.3g}"
    peak = np.abs(difference).max() / max(np.abs(expected).max(), 1e-30)
    assert peak <= most * slack, f"{name}: greatest error {peak:.3g}, must be at most {most * slack:.3g}"


def check(case: Case, mask: Any = None, offset: int = 0, slack: float = 1.0) -> None:
    """Output and all thirteen gradients against the reference; the parts of Q, K and V on their own."""
    output, dx, gradients = case.run(mask, offset)
    expected, expected_dx, expected_gradients = case.reference(mask, offset)
    close("output", output, expected, case.dtype, slack)
    close("dx", dx, expected_dx, case.dtype, slack)
    for name, found in zip(WEIGHTS, gradients):
        wanted = expected_gradients[name]
        if name == "attn_qkvw" and case.shape[1] > 1:  # one key alone: P is 1 and has no gradient
            for part, found_part, wanted_part in zip("QKV", np.split(get(found), 3), np.split(wanted, 3)):
                # The gradients of q and k are differences of greater terms.
                close(f"{part} of {name}", found_part, wanted_part, case.dtype, slack * (3 if part in "QK" else 1))
        elif name == "attn_qkvb":  # K's is zero but for rounding: a shift of all scores of a row
            close(name, found, wanted, case.dtype, slack)
        else:
            close(name, found, wanted, case.dtype, slack)
