"""The transformer layer against float64, points 22 to 25, 28 and 32 of its conformance list
(docs/conformance-layer.md): numerics and the interface."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from layer_tools import Case, bits, check, close, dtypes, get, placements, put

from libdc.transformer import Layer, LayerConfig


@placements
@dtypes
@pytest.mark.parametrize("size", [(64, 4, 96), (768, 12, 100)], ids=str)
def test_22_without_variance_it_is_beta(size: tuple, dtype: str, pre: bool) -> None:
    """Tokens whose features are all alike, of any size: their normalised rows are beta, to the bit."""
    for eps in (0.0, 1e-5):  # 0: 1e-12
        case = Case(*size, 1, 5, dtype, weight_scale=0.02, pre_layer_norm=pre, layer_norm_eps=eps)
        case.x = put(np.repeat([[[0.0], [3.0], [0.1], [-777.7], [1e4]]], size[0], -1), dtype)
        output, dx, gradients = case.run()
        assert np.isfinite(get(output)).all()
        if eps or dtype != "float16":  # a million times a gradient is more than float16 holds
            assert all(np.isfinite(get(a)).all() for a in (dx, *gradients))
        zero = put(np.zeros(size[0]), dtype)
        if pre:  # as if the first LN had no scale
            case.weights[10] = zero
            assert bits(case.forward()[0]) == bits(output)
        else:  # nothing but a constant comes to the last LN
            for index in (2, 3, 8, 9):
                case.weights[index] = put(np.zeros(get(case.weights[index]).shape), dtype)
            case.weights[5] = put(np.full(size[0], 0.3), dtype)
            expected = np.broadcast_to(get(case.weights[11]), case.shape)
            assert np.array_equal(get(case.forward()[0]), expected)


@placements
@dtypes
def test_22_rows_without_variance(dtype: str, pre: bool) -> None:
    for eps in (0.0, 1e-5):
        case = Case(64, 4, 96, 2, 8, dtype, pre_layer_norm=pre, layer_norm_eps=eps)
        x = get(case.x)
        x[0, 0], x[0, 1] = 0, 3
        x[1, 2] = np.where(np.arange(64) % 2, 1e4, -1e4)  # a variance of 1e8, over float16's greatest
        x[1, 3] = 1e-30
        case.x = put(x, dtype)
        assert all(np.isfinite(get(a)).all() for a in [case.forward()[0]])
        if pre and eps:  # in Post-LN the great row's scores have no digits behind the point
            check(case, slack=3)


@dtypes
def test_23_large_scores(dtype: str) -> None:
    case = Case(64, 2, 96, 2, 33, dtype)
    case.weights[0] = put(get(case.weights[0]) * 40, dtype)
    output, dx, gradients = case.run()
    assert all(np.isfinite(get(a)).all() for a in (output, dx, *gradients))
    if dtype == "float32":
        close("output", output, case.reference()[0], dtype, 20)
    # Keys that are all alike: attention is the mean of the values.
    flat = Case(64, 2, 96, 1, 1000, dtype)
    w = get(flat.weights[0])
    w[64:128] = 0
    flat.weights[0] = put(w, dtype)
    close("output", flat.forward()[0], flat.reference()[0], dtype)


@placements
@dtypes
def test_24_extremes_and_nan(dtype: str, pre: bool) -> None:
    case = Case(64, 2, 96, 3, 9, dtype, pre_layer_norm=pre)
    clean = get(case.forward()[0])
    x, hidden = get(case.x), get(case.weights[7])
    for value in (np.nan, np.inf, -np.inf):
        broken = x.copy()
        broken[1, 4, 7] = value
        output = get(case.layer.forward(case.weights, put(broken, dtype))[0])
        assert np.array_equal(output[[0, 2]], clean[[0, 2]])
        assert np.isnan(output[1]).any()
    for value in (1e4, -1e4):  # GELU is the value itself, or 0
        case.weights[7] = put(np.full(hidden.shape, value), dtype)
        assert np.isfinite(get(case.forward()[0])).all()
        if pre:
            case.weights[6] = put(np.zeros((96, 64)), dtype)
            case.weights[8] = put(np.eye(64, 96), dtype)
            rest = Case(64, 2, 96, 3, 9, dtype)
            rest.weights = [*case.weights[:8], put(np.zeros((64, 96)), dtype), *case.weights[9:]]
            found = get(case.forward()[0]) - get(rest.forward()[0])
            assert np.abs(found - get(put([max(value, 0.0)], dtype))).max() <= 0.02 * max(value, 0.0)


@dtypes
def test_25_the_same_bits(dtype: str) -> None:
    runs = []
    for threads, stochastic in ((1, False), (2, False), (2, False), (3, False), (2, True)):
        case = Case(96, 4, 200, 3, 130, dtype, ratio=0.1, threads=threads, stochastic_mode=stochastic)
        output, dx, gradients = case.run(offset=4)
        runs.append([bits(a) for a in (output, dx, *gradients)])
    assert all(run == runs[0] for run in runs)


def test_28_one_layer_many_shapes() -> None:
    case = Case(32, 2, 64, 4, 30, batch_size=4, max_seq_length=30)
    rng = np.random.default_rng(3)
    for batch, seq in ((4, 30), (1, 30), (3, 7), (1, 1), (4, 30)):
        case.shape = (batch, seq, 32)
        case.x, case.dy = (put(rng.standard_normal(case.shape), "float32") for _ in range(2))
        check(case)


def test_32_flops() -> None:
    for h, i, b, s in ((1024, 4096, 64, 128), (1024, 4096, 16, 512), (768, 3072, 3, 77)):
        cost = Layer(LayerConfig(h, h // 64, i)).cost(b, s)
        n = b * s
        assert cost.forward_flops + cost.backward_flops == 3 * (8 * n * h * h + 4 * n * h * i + 4 * n * s * h)
    packed = Layer(LayerConfig(64, 1, 64)).cost(3, 20, cu_seqlens=[0, 20, 21, 30])
    assert packed.forward_flops == 30 * 12 * 64 * 64 + 4 * 64 * (400 + 1 + 81)
