"""The transformer layer against float64, points 17 to 21 of its conformance list (docs/conformance-layer.md): memory
flags."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from layer_tools import Case, bits, check, close, dtypes, flags_of, get, placements, put

from libdc.transformer import WEIGHTS, Layer, LayerConfig


@placements
@dtypes
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_17_flags_change_no_bits(ratio: float, dtype: str, pre: bool) -> None:
    plain = Case(64, 4, 96, 2, 19, dtype, ratio, pre_layer_norm=pre).run()
    check(Case(64, 4, 96, 2, 19, dtype, ratio, pre_layer_norm=pre))
    for number in range(1, 8):
        case = Case(64, 4, 96, 2, 19, dtype, ratio, pre_layer_norm=pre, **flags_of(number))
        output, dx, gradients = case.run()
        assert bits(output) == bits(plain[0])
        if pre or not case.config.normalize_invertible:
            assert all(bits(a) == bits(b) for a, b in zip([dx, *gradients], [plain[1], *plain[2]]))
        check(case)


@placements
@dtypes
def test_18_bytes(dtype: str, pre: bool) -> None:
    e = 4 if dtype == "float32" else 2
    for number, (h, a, i, b, s) in itertools.product(range(8), ((1024, 16, 4096, 1, 512), (48, 3, 100, 2, 19))):
        inv, gelu, _ = (number >> k & 1 for k in range(3))
        layer = Layer(LayerConfig(h, a, i, dtype=dtype, pre_layer_norm=pre, **flags_of(number)))
        n = b * s
        parts = [e * n * 3 * h] + [e * n * h] * (4 - 2 * inv) + [e * n * i] * (2 - gelu) + [8 * n * a] + [8 * n] * 2
        cost = layer.cost(b, s)
        assert cost.reserve_bytes == sum((part + 63) // 64 * 64 for part in parts)
        assert cost.kept_bytes == cost.reserve_bytes + e * n * h


@placements
@dtypes
def test_19_scales_that_cannot_be_inverted(dtype: str, pre: bool) -> None:
    largest = 30.0 if dtype == "float16" else 1000.0
    for gamma, beta in ((0.0, 0.3), (1e-8, 0.3), (-0.5, 0.1), (1e-3, 1.0), (1.0, largest)):
        for where in (slice(5, 6), slice(None)):
            case = Case(64, 4, 96, 2, 19, dtype, ratio=0.1, pre_layer_norm=pre, normalize_invertible=True)
            values = get(case.weights[10]), get(case.weights[11])
            values[0][where], values[1][where] = gamma, beta
            case.weights[10], case.weights[11] = (put(v, dtype) for v in values)
            plain = Case(64, 4, 96, 2, 19, dtype, ratio=0.1, pre_layer_norm=pre)
            plain.weights = case.weights
            _, kept = case.forward()
            _, dx, gradients = plain.run()
            poisoned = [put(np.full(get(w).shape, np.nan), dtype) for w in (case.x, *case.weights)]
            case.layer.backward(case.weights, case.x, case.dy, kept, poisoned[0], poisoned[1:])
            for found, wanted in zip(poisoned, [dx, *gradients]):
                assert np.isfinite(get(found)).all()
                close("gradient", found, get(wanted), dtype)


def test_20_interleaved() -> None:
    case = Case(64, 4, 96, 2, 19, ratio=0.1)
    x2 = put(np.random.default_rng(9).standard_normal(case.shape), "float32")

    def step(x: Any, offset: int) -> Any:
        return case.layer.forward(case.weights, x, offset=offset)[1]

    def back(x: Any, kept: Any) -> list:
        dx, gradients = case.layer.backward(case.weights, x, case.dy, kept)
        return [bits(a) for a in (dx, *gradients)]

    one, two = back(case.x, step(case.x, 1)), back(x2, step(x2, 2))
    first, second = step(case.x, 1), step(x2, 2)
    assert back(x2, second) == two and back(case.x, first) == one
    assert back(case.x, first) == one and back(x2, second) == two


@placements
def test_20_two_layers_interleaved(pre: bool) -> None:
    layers = [Case(64, 4, 96, 2, 19, ratio=0.1, layer_id=i, seed=i, pre_layer_norm=pre, **flags_of(5 * i))
              for i in range(2)]
    alone = [[bits(a) for a in (dx, *gradients)] for _, dx, gradients in (case.run() for case in layers)]
    for order in ((1, 0), (0, 1)):
        kept = [case.forward()[1] for case in layers]
        for i in order:
            case = layers[i]
            dx, gradients = case.layer.backward(case.weights, case.x, case.dy, kept[i])
            assert [bits(a) for a in (dx, *gradients)] == alone[i]


@dtypes
def test_21_accumulation_and_wide_gradients(dtype: str) -> None:
    case = Case(64, 4, 96, 2, 40, dtype, grad_dtype="float32")
    output, kept = case.forward()
    dx, first = case.layer.backward(case.weights, case.x, case.dy, kept)
    expected = case.reference()[2]
    for name, found in zip(WEIGHTS, first):
        assert np.asarray(found).dtype == np.float32
        close(name, found, expected[name], dtype)
    sums = [np.asarray(g).copy() for g in first]
    x_gradient = put(np.full(case.shape, 7), dtype)
    case.layer.backward(case.weights, case.x, case.dy, kept, x_gradient, sums, accumulate=True)
    assert bits(x_gradient) == bits(dx)
    for name, found, one in zip(WEIGHTS, sums, first):
        close(name, found, 2 * get(one), "float32")


def test_gradients_that_are_not_wanted() -> None:
    case = Case(64, 4, 96, 2, 19)
    _, kept = case.forward()
    _, all_gradients = case.layer.backward(case.weights, case.x, case.dy, kept)
    wanted = np.arange(len(WEIGHTS)) % 3 == 0
    memory = [np.full_like(np.asarray(gradient), 7) for gradient in all_gradients]
    for given in (None, memory):
        _, found = case.layer.backward(case.weights, case.x, case.dy, kept, grad_weights=given, wanted=wanted)
        assert [bits(g) if w else g for g, w in zip(found, wanted)] == \
            [bits(g) if w else None for g, w in zip(all_gradients, wanted)]
    assert all((array == 7).all() for array, want in zip(memory, wanted) if not want)
