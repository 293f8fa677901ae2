"""The transformer layer against float64, points 1 to 10 of its conformance list (docs/conformance-layer.md): structure
and masks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from layer_reference import Reference
from layer_tools import DTYPES, Case, bits, check, close, dtypes, get, placements, put

from libdc.transformer import WEIGHTS, Layer, LayerConfig


@placements
@dtypes
@pytest.mark.parametrize("size", [(64, 1, 64), (160, 2, 640), (256, 32, 1024), (768, 12, 3072)], ids=str)
def test_01_sizes(size: tuple, dtype: str, pre: bool) -> None:
    for batch in (1, 3) if size[0] > 300 else (1, 3, 8):
        check(Case(*size, batch, 16, dtype, ratio=0.1, pre_layer_norm=pre))


@placements
@dtypes
def test_01_bert_large(dtype: str, pre: bool) -> None:
    batch = {"float32": 1, "float16": 3, "bfloat16": 8}[dtype]
    check(Case(1024, 16, 4096, batch, 2, dtype, ratio=0.1, weight_scale=0.02, pre_layer_norm=pre))


@pytest.mark.slow
@dtypes
@pytest.mark.parametrize("size", [(1600, 25, 6400), (2560, 40, 10240)], ids=str)
def test_01_large_sizes(size: tuple, dtype: str) -> None:
    case = Case(*size, 2, 2, dtype, weight_scale=0.02, pre_layer_norm=dtype == "bfloat16")
    if size[0] < 2000:
        check(case)
    else:
        close("output", case.forward()[0], case.reference(gradients=False), dtype)


@placements
def test_02_sequence_lengths(pre: bool) -> None:
    for length in (1, 2, 7, 15, 16, 17, 21, 51, 53, 63, 64, 65, 119, 127, 128, 129, 381, 384, 509, 511, 512,
                   1000, 2048):
        check(Case(32, 2, 64, 1, length, ratio=0.1, pre_layer_norm=pre, seed=length))


def test_02_more_tokens_that_are_masked() -> None:
    case = Case(32, 2, 64, 2, 150, ratio=0.1)
    mask = np.zeros((2, 150), np.float32)
    mask[:, 97:] = -10000
    whole = get(case.forward(mask)[0])
    short = get(case.layer.forward(case.weights, np.ascontiguousarray(case.x[:, :97]))[0])
    close("output", put(whole[:, :97], "float32"), short, "float32")


@pytest.mark.parametrize("size", [(64, 2, 64), (64, 4, 32), (48, 2, 152), (40, 5, 120), (16, 1, 8), (80, 1, 24),
                                  (96, 1, 96), (128, 1, 64), (36, 3, 20), (320, 4, 100), (80, 2, 80), (64, 1, 192),
                                  (600, 1, 64)], ids=str)
def test_03_widths(size: tuple) -> None:
    for pre, dtype in itertools.product((True, False), DTYPES):
        check(Case(*size, 2, 33, dtype, ratio=0.1, pre_layer_norm=pre))


@dtypes
def test_heads_wider_than_a_tile(dtype: str) -> None:
    check(Case(2112, 1, 64, 1, 4, dtype, weight_scale=0.02))


def test_04_the_reference_itself() -> None:
    rng = np.random.default_rng(0)
    for pre, form in itertools.product((True, False), ("tanh", "erf")):
        model = Reference(2, pre, form, 1e-5)
        shapes = Layer(LayerConfig(8, 2, 12)).weight_shapes
        weights = {name: rng.standard_normal(shape) * 0.5 + (name in ("attn_nw", "norm_w"))
                   for name, shape in shapes.items()}
        x, dy, mask = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 3))
        drops = [rng.integers(0, 2, shape) * 1.5 for shape in ((2, 2, 3, 3), (2, 3, 8), (2, 3, 8))]
        model.forward(weights, x, mask, drops)
        dx, gradients = model.backward(dy)
        for array, gradient in [(x, dx), *((weights[name], gradients[name]) for name in WEIGHTS)]:
            way = rng.standard_normal(array.shape)
            start, slopes = array.copy(), []
            for sign in (1, -1):
                array[...] = start + sign * 1e-5 * way
                slopes.append((model.forward(weights, x, mask, drops) * dy).sum())
            array[...] = start
            slope = (slopes[0] - slopes[1]) / 2e-5
            assert abs(slope - (gradient * way).sum()) <= 1e-6 * max(1, abs(slope))


@placements
@dtypes
def test_04_a_stack_of_three(dtype: str, pre: bool) -> None:
    cases = [Case(64, 4, 128, 2, 20, dtype, seed=i, pre_layer_norm=pre, layer_id=i) for i in range(3)]
    x, kept, inputs = cases[0].x, [], []
    exact, models = get(x), []
    for case in cases:
        inputs.append(x)
        x, k = case.layer.forward(case.weights, x)
        kept.append(k)
        models.append(Reference(4, pre))
        exact = models[-1].forward(dict(zip(WEIGHTS, map(get, case.weights))), exact)
    close("output", x, exact, dtype, 2)
    gradient, exact = cases[0].dy, get(cases[0].dy)
    for case, k, x, model in list(zip(cases, kept, inputs, models))[::-1]:
        gradient, found = case.layer.backward(case.weights, x, gradient, k)
        exact, wanted = model.backward(exact)
        for name, part in zip(WEIGHTS, found):
            close(name, part, wanted[name], dtype, 3)
    close("dx", gradient, exact, dtype, 3)


def test_05_rows_of_q_k_v() -> None:
    case = Case(32, 2, 64, 1, 9)
    first = get(case.forward()[0])
    for swap in ([1, 0, 2], [0, 2, 1]):
        w, b = case.weights[0].copy(), case.weights[1].copy()
        case.weights[0] = np.concatenate([np.split(w, 3)[i] for i in swap])
        case.weights[1] = np.concatenate([np.split(b, 3)[i] for i in swap])
        check(case)
        assert np.abs(get(case.forward()[0]) - first).max() > 1e-3
        case.weights[:2] = w, b


def test_06_names_shapes_and_order() -> None:
    h, i = 64, 96
    assert list(Layer(LayerConfig(h, 4, i)).weight_shapes.items()) == [
        ("attn_qkvw", (3 * h, h)), ("attn_qkvb", (3 * h,)), ("attn_ow", (h, h)), ("attn_ob", (h,)), ("attn_nw", (h,)),
        ("attn_nb", (h,)), ("inter_w", (i, h)), ("inter_b", (i,)), ("output_w", (h, i)), ("output_b", (h,)),
        ("norm_w", (h,)), ("norm_b", (h,))]


@dtypes
def test_06_both_forms_of_gelu(dtype: str) -> None:
    for form in ("tanh", "erf"):
        check(Case(64, 2, 256, 2, 11, dtype, gelu=form, weight_scale=0.2), slack=2)


def test_07_initial_weights() -> None:
    for adjust, rank in itertools.product((True, False), (-1, 0, 3)):
        layer = Layer(LayerConfig(256, 4, 1024, seed=9, num_hidden_layers=24, initializer_range=0.03,
                                  adjust_init_range=adjust, local_rank=rank))
        weights = dict(zip(WEIGHTS, map(np.asarray, layer.initial_weights())))
        for name, w in weights.items():
            if w.ndim == 1:
                assert (w == (name in ("attn_nw", "norm_w"))).all()
                continue
            narrow = adjust and name in ("attn_ow", "output_w")
            deviation = 0.03 / np.sqrt(48) if narrow else 0.03
            n = w.size
            assert abs(w.mean()) <= 4 * deviation / np.sqrt(n)
            assert abs(w.std() - deviation) <= 4 * deviation / np.sqrt(2 * n)
            assert abs((w**4).mean() / w.std() ** 4 - 3) <= 4 * np.sqrt(96 / n)
    again = Layer(LayerConfig(256, 4, 1024, seed=9, num_hidden_layers=24, initializer_range=0.03, threads=1,
                              adjust_init_range=False))
    assert all(bits(a) == bits(weights[name]) for name, a in zip(WEIGHTS, again.initial_weights()))
    other = Layer(LayerConfig(256, 4, 1024, seed=9, layer_id=1, initializer_range=0.03, adjust_init_range=False))
    for a, b in itertools.combinations([*weights.values(), *map(np.asarray, other.initial_weights())], 2):
        if a.ndim == 2 and a.shape == b.shape:
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)


@placements
@dtypes
def test_08_masks(dtype: str, pre: bool) -> None:
    case = Case(64, 4, 96, 3, 37, dtype, pre_layer_norm=pre)
    rng = np.random.default_rng(1)
    zeros = np.zeros((3, 37), np.float32)
    assert bits(case.forward()[0]) == bits(case.forward(zeros)[0])
    suffix, holes, infinite = zeros.copy(), zeros.copy(), zeros.copy()
    for b, length in enumerate((37, 20, 1)):
        suffix[b, length:] = -10000
        holes[b, b::3] = -10000
        infinite[b, length:] = -np.inf
    for mask in (suffix, holes, infinite, rng.standard_normal((3, 37)).astype(np.float32)):
        check(case, mask)
        check(case, put(mask, dtype) if dtype != "float16" else np.maximum(mask, -65504).astype(np.float16))
    shaped = suffix.reshape(3, 1, 1, 37)
    assert bits(case.forward(shaped)[0]) == bits(case.forward(suffix)[0])


@placements
@dtypes
def test_09_rows_without_a_key(dtype: str, pre: bool) -> None:
    case = Case(64, 4, 96, 2, 9, dtype, pre_layer_norm=pre)
    mask = np.zeros((2, 9), np.float32)
    mask[1] = -10000
    check(case, mask, slack=500 if dtype == "float32" else 2)  # scores lose what 10000 rounds away
    alone = get(case.forward()[0])
    mask[1] = -np.inf
    check(case, mask)  # zeros for sample 1
    output, dx, gradients = case.run(mask)
    assert all(np.isfinite(get(a)).all() for a in (output, dx, *gradients))
    assert np.array_equal(get(output)[0], alone[0])


LOWEST = {"float32": -np.finfo(np.float32).max, "float16": -65504.0, "bfloat16": -3.3895313892515355e38}


@placements
@dtypes
@pytest.mark.parametrize("seq", [9, 600])  # the second has several tiles of keys
def test_09_large_finite_masks(seq: int, dtype: str, pre: bool) -> None:
    """Rows whose keys all have one large finite number, and rows of which some have it, in both types of masks."""
    case = Case(48, 3, 80, 2, seq, dtype, pre_layer_norm=pre)
    for value in (-1e4, LOWEST["float16"], -1e6, -1e7, -1e9, LOWEST["bfloat16"], LOWEST["float32"]):
        mask = np.zeros((2, seq), np.float32)
        mask[0, ::2] = mask[1] = value
        for each in [mask, put(mask, dtype)] if dtype != "float32" and value >= LOWEST[dtype] else [mask]:
            if value <= -1e9:  # float32 rounds all scores to the mask: all keys of a row are alike
                check(case, each)
            _, _, gradients = case.run(each)
            by_name = dict(zip(WEIGHTS, map(get, gradients)))
            # Probabilities add up to 1: the gradient of the values' bias is that of the attention's output.
            expected = by_name["attn_ob"] @ get(case.weights[WEIGHTS.index("attn_ow")])
            close(f"values' bias at {value:g}", by_name["attn_qkvb"][96:], expected, dtype)


@placements
@dtypes
def test_10_packed(dtype: str, pre: bool) -> None:
    case = Case(48, 3, 80, 4, 40, dtype, ratio=0.1, pre_layer_norm=pre)
    lengths = [40, 1, 0, 17]
    offsets = np.cumsum([0, *lengths])
    mask, dy = np.zeros((4, 40), np.float32), get(case.dy)
    for b, length in enumerate(lengths):
        mask[b, length:] = -np.inf
        dy[b, length:] = 0
    case.dy = put(dy, dtype)
    output, dx, gradients = case.run(mask)
    rows = np.concatenate([np.arange(b * 40, b * 40 + length) for b, length in enumerate(lengths)])
    x, dy = (put(get(a).reshape(-1, 48)[rows], dtype) for a in (case.x, case.dy))
    packed, kept = case.layer.forward(case.weights, x, cu_seqlens=offsets)
    packed_dx, packed_gradients = case.layer.backward(case.weights, x, dy, kept)
    close("output", packed, get(output).reshape(-1, 48)[rows], dtype)
    close("dx", packed_dx, get(dx).reshape(-1, 48)[rows], dtype)
    for name, a, b in zip(WEIGHTS, packed_gradients, gradients):
        close(name, a, get(b), dtype)


@placements
@dtypes
def test_10_nan_in_a_masked_place(dtype: str, pre: bool) -> None:
    """It reaches its own sample, for 0 times NaN is NaN, and no other; packed batches do not have the place."""
    case = Case(48, 3, 80, 3, 21, dtype, ratio=0.1, pre_layer_norm=pre)
    mask = np.zeros((3, 21), np.float32)
    mask[1, 15:] = -np.inf
    clean = get(case.forward(mask)[0])
    x = get(case.x)
    for value in (np.nan, np.inf):
        x[1, 17, 3] = value
        output = get(case.layer.forward(case.weights, put(x, dtype), mask)[0])
        assert np.array_equal(output[[0, 2]], clean[[0, 2]]) and np.isnan(output[1, 17]).any()
    packed = put(x.reshape(-1, 48)[[*range(21 + 15), *range(42, 63)]], dtype)
    close("output", case.layer.forward(case.weights, packed, cu_seqlens=[0, 21, 36, 57])[0],
          np.concatenate([clean[0], clean[1, :15], clean[2]]), dtype)
