"""The transformer layer against float64: the list of section 7 of the layer's conformance, by number. Wrong arguments,
guard bytes, streams and threads (27 to 30) are in tests/test_layer.c, random bits in tests/kernels/test_rows.c."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from layer_reference import Reference
from layer_tools import Case, bits, check, close, get, put

from libdc.transformer import WEIGHTS, Layer, LayerConfig

DTYPES = ["float32", "float16", "bfloat16"]
FLAGS = ["normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint"]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
placements = pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])


def flags_of(number: int) -> dict:
    return {name: bool(number >> i & 1) for i, name in enumerate(FLAGS)}


# ---- A. structure


@placements
@dtypes
@pytest.mark.parametrize("size", [(64, 1, 64), (160, 2, 640), (256, 32, 1024), (768, 12, 3072)], ids=str)
def test_01_sizes(size: tuple, dtype: str, pre: bool) -> None:
    for batch in (1, 3) if size[0] > 300 else (1, 3, 8):
        check(Case(*size, batch, 16, dtype, ratio=0.1, pre_layer_norm=pre))


@pytest.mark.parametrize("size", [(1024, 16, 4096), (1600, 25, 6400), (2560, 40, 10240)], ids=str)
def test_01_large_sizes(size: tuple) -> None:
    case = Case(*size, 1, 8, "float32", weight_scale=0.02)
    close("output", case.forward()[0], case.reference()[0], "float32")


@placements
def test_02_sequence_lengths(pre: bool) -> None:
    for length in (1, 2, 7, 15, 16, 17, 21, 51, 53, 63, 64, 65, 119, 127, 128, 129, 381, 511, 512, 1000):
        check(Case(32, 2, 64, 1, length, ratio=0.1, pre_layer_norm=pre, seed=length))
    long = Case(32, 2, 64, 2, 2048, pre_layer_norm=pre)
    close("output", long.forward()[0], long.reference()[0], "float32")


def test_02_more_tokens_that_are_masked() -> None:
    case = Case(32, 2, 64, 2, 150, ratio=0.1)
    mask = np.zeros((2, 150), np.float32)
    mask[:, 97:] = -10000
    whole = get(case.forward(mask)[0])
    short = get(case.layer.forward(case.weights, np.ascontiguousarray(case.x[:, :97]))[0])
    close("output", put(whole[:, :97], "float32"), short, "float32")


@pytest.mark.parametrize("size", [(64, 2, 64), (64, 4, 32), (48, 2, 152), (40, 5, 120), (16, 1, 8), (80, 1, 24),
                                  (96, 1, 96), (128, 1, 64), (36, 3, 20), (320, 4, 100), (600, 1, 64)], ids=str)
def test_03_widths(size: tuple) -> None:
    for pre, dtype in itertools.product((True, False), DTYPES):
        check(Case(*size, 2, 33, dtype, ratio=0.1, pre_layer_norm=pre))


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


# ---- B. masks


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


@dtypes
def test_09_rows_without_a_key(dtype: str) -> None:
    case = Case(64, 4, 96, 2, 9, dtype)
    mask = np.zeros((2, 9), np.float32)
    mask[1] = -10000
    check(case, mask, slack=500 if dtype == "float32" else 2)  # scores lose what 10000 rounds away
    alone = get(case.forward()[0])
    mask[1] = -np.inf
    check(case, mask)  # zeros for sample 1
    output, dx, gradients = case.run(mask)
    assert all(np.isfinite(get(a)).all() for a in (output, dx, *gradients))
    assert np.array_equal(get(output)[0], alone[0])


@placements
def test_10_packed(pre: bool) -> None:
    case = Case(48, 3, 80, 4, 40, ratio=0.1, pre_layer_norm=pre)
    lengths = [40, 1, 0, 17]
    offsets = np.cumsum([0, *lengths])
    mask = np.zeros((4, 40), np.float32)
    for b, length in enumerate(lengths):
        mask[b, length:] = -np.inf
        case.dy[b, length:] = 0
    output, dx, gradients = case.run(mask)
    rows = np.concatenate([np.arange(b * 40, b * 40 + length) for b, length in enumerate(lengths)])
    x, dy = (a.reshape(-1, 48)[rows] for a in (case.x, case.dy))
    packed, kept = case.layer.forward(case.weights, x, cu_seqlens=offsets)
    packed_dx, packed_gradients = case.layer.backward(case.weights, x, dy, kept)
    close("output", packed, get(output).reshape(-1, 48)[rows], "float32")
    close("dx", packed_dx, get(dx).reshape(-1, 48)[rows], "float32")
    for name, a, b in zip(WEIGHTS, packed_gradients, gradients):
        close(name, a, get(b), "float32")


# ---- C. dropout


@dtypes
def test_11_no_dropout(dtype: str) -> None:
    case = Case(64, 4, 96, 2, 19, dtype)
    dropping = Case(64, 4, 96, 2, 19, dtype, ratio=0.3)
    assert bits(case.forward()[0]) == bits(case.layer.inference(case.weights, case.x))
    assert bits(case.forward()[0]) == bits(dropping.layer.inference(case.weights, case.x))
    output, kept = dropping.forward()
    wanted = dropping.layer.backward(case.weights, case.x, case.dy, kept)[0]
    output, kept = dropping.forward()
    dropping.layer.inference(case.weights, case.x)  # between a forward and its backward
    assert bits(dropping.layer.backward(case.weights, case.x, case.dy, kept)[0]) == bits(wanted)


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_12_keep_rate(ratio: float) -> None:
    layer = Layer(LayerConfig(256, 4, attn_dropout_ratio=ratio, hidden_dropout_ratio=ratio))
    threshold = round(ratio * 65536)
    for site in ("attention", "projection", "output"):
        mask, scale = layer.dropout_mask(site, 4, 128)
        kept = np.asarray(mask)
        assert set(np.unique(kept)) == {0, 1}
        assert scale == np.float32(65536 / (65536 - threshold))
        p = threshold / 65536
        assert abs(kept.mean() - (1 - p)) <= 4 * np.sqrt(p * (1 - p) / kept.size)


def masks_of(layer: Layer, batch: int = 2, seq: int = 48, offset: int = 0) -> list:
    return [np.asarray(layer.dropout_mask(site, batch, seq, offset)[0])
            for site in ("attention", "projection", "output")]


def layer_with(**config: Any) -> Layer:
    config = {"seed": 5, "attn_dropout_ratio": 0.1, "hidden_dropout_ratio": 0.1, **config}
    return Layer(LayerConfig(96, 12, **config))


def test_13_masks_are_functions() -> None:
    first = masks_of(layer_with())
    for same in (layer_with(threads=1), layer_with(dtype="bfloat16", normalize_invertible=True, gelu_checkpoint=True),
                 layer_with(pre_layer_norm=False, num_hidden_layers=3)):
        assert all(np.array_equal(a, b) for a, b in zip(first, masks_of(same)))
    for other in (masks_of(layer_with(seed=6)), masks_of(layer_with(layer_id=1)), masks_of(layer_with(), offset=1),
                  masks_of(layer_with(), offset=1 << 40)):
        assert not any(np.array_equal(a, b) for a, b in zip(first, other))
    assert not np.array_equal(first[1], first[2])
    larger = masks_of(layer_with(), batch=5, seq=61)  # samples and places keep theirs
    assert np.array_equal(larger[0][:2, :, :48, :48], first[0])
    assert np.array_equal(larger[1][:2, :48], first[1])


def test_13_the_documented_draw() -> None:
    """docs/transformer.md, on Python's integers."""

    def philox(counter: list, key: list) -> list:
        for _ in range(10):
            a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
            counter = [b >> 32 ^ counter[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
            key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
        return counter

    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123's kat_vectors
    seed, layer_id, offset = 0x123456789ABCDEF, 3, (7 << 32) + 1
    attention, projection, _ = masks_of(layer_with(seed=seed, layer_id=layer_id), 2, 21, offset)
    for site, mask, places in ((1, attention, [(1, 3, 20, 17), (0, 0, 5, 2)]), (2, projection, [(1, 20, 95)])):
        key = philox([offset & 0xFFFFFFFF, offset >> 32, layer_id, site], [seed & 0xFFFFFFFF, seed >> 32])[:2]
        for *planes, i, j in places:
            plane = planes[0] * 12 + planes[1] if site == 1 else planes[0]
            word = philox([j // 8, i, plane, 0], key)[j % 8 // 2]
            assert mask[(*planes, i, j)] == ((word >> 16 * (j % 2) & 0xFFFF) >= round(0.1 * 65536))


def test_14_masks_are_not_correlated() -> None:
    layers = [layer_with(), layer_with(layer_id=1)]
    for batch, seq in ((3, 48), (1, 16)):
        groups: dict = {}
        for layer, offset in itertools.product(layers, range(4)):
            for mask in masks_of(layer, batch, seq, offset):
                groups.setdefault(mask.shape, []).append(mask.ravel() - mask.mean())
        for masks in groups.values():
            for a, b in itertools.combinations(masks, 2):
                assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(a.size)
            for mask in masks:
                for lag in (1, 2, 8, 16, 96):
                    assert abs((mask[lag:] * mask[:-lag]).mean() / mask.var()) < 5 / np.sqrt(mask.size)


@placements
@dtypes
def test_15_gradients_with_dropout(dtype: str, pre: bool) -> None:
    case = Case(64, 4, 96, 2, 70, dtype, ratio=0.3, pre_layer_norm=pre)
    for offset in (0, 12345678901234567):
        check(case, offset=offset)


# ---- D. memory flags


@placements
@dtypes
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_17_flags_change_no_bits(ratio: float, dtype: str, pre: bool) -> None:
    plain = Case(64, 4, 96, 2, 19, dtype, ratio, pre_layer_norm=pre).run()
    for number in range(1, 8):
        case = Case(64, 4, 96, 2, 19, dtype, ratio, pre_layer_norm=pre, **flags_of(number))
        output, dx, gradients = case.run()
        assert bits(output) == bits(plain[0])
        if pre or not case.config.normalize_invertible:
            assert all(bits(a) == bits(b) for a, b in zip([dx, *gradients], [plain[1], *plain[2]]))
        else:
            check(case)


@placements
@dtypes
def test_18_bytes(dtype: str, pre: bool) -> None:
    e = 4 if dtype == "float32" else 2
    for number, (h, a, i, b, s) in itertools.product(range(8), ((1024, 16, 4096, 1, 512), (48, 3, 100, 2, 19))):
        inv, gelu, _ = (number >> k & 1 for k in range(3))
        layer = Layer(LayerConfig(h, a, i, dtype=dtype, pre_layer_norm=pre, **flags_of(number)))
        n = b * s
        parts = [e * n * 3 * h] + [e * n * h] * (4 - 2 * inv) + [e * n * i] * (2 - gelu) + [4 * n * a] + [8 * n] * 2
        cost = layer.cost(b, s)
        assert cost.reserve_bytes == sum((part + 63) // 64 * 64 for part in parts)
        assert cost.kept_bytes == cost.reserve_bytes + e * n * h


@placements
@dtypes
def test_19_scales_that_cannot_be_inverted(dtype: str, pre: bool) -> None:
    for gamma, beta in ((0.0, 0.3), (1e-8, 0.3), (-0.5, 0.1), (1e-3, 1.0), (1.0, 30.0 if dtype == "float16" else 1000.0)):
        for where in (slice(5, 6), slice(None)):
            case = Case(64, 4, 96, 2, 19, dtype, ratio=0.1, pre_layer_norm=pre, normalize_invertible=True)
            values = get(case.weights[10]), get(case.weights[11])
            values[0][where], values[1][where] = gamma, beta
            case.weights[10], case.weights[11] = (put(v, dtype) for v in values)
            plain = Case(64, 4, 96, 2, 19, dtype, ratio=0.1, pre_layer_norm=pre)
            plain.weights = case.weights
            for found, wanted in zip(case.run()[2], plain.run()[2]):
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


@dtypes
def test_21_accumulation_and_wide_gradients(dtype: str) -> None:
    case = Case(64, 4, 96, 2, 40, dtype, grad_dtype="float32")
    output, kept = case.forward()
    first = case.layer.backward(case.weights, case.x, case.dy, kept)[1]
    expected = case.reference()[2]
    for name, found in zip(WEIGHTS, first):
        assert np.asarray(found).dtype == np.float32
        close(name, found, expected[name], dtype)
    sums = [np.asarray(g).copy() for g in first]
    case.layer.backward(case.weights, case.x, case.dy, kept, grad_weights=sums, accumulate=True)
    for name, found, one in zip(WEIGHTS, sums, first):
        close(name, found, 2 * get(one), "float32")


# ---- E. numerics


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
        if pre and eps:
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


def test_24_extremes_and_nan() -> None:
    case = Case(64, 2, 96, 3, 9)
    for index, value in ((7, 1e4), (7, -1e4)):
        before = case.weights[index].copy()
        case.weights[index][:] = value
        assert np.isfinite(get(case.forward()[0])).all()
        case.weights[index] = before
    clean = get(case.forward()[0])
    for value in (np.nan, np.inf):
        x = case.x.copy()
        x[1, 4, 7] = value
        output = get(case.layer.forward(case.weights, x)[0])
        assert np.array_equal(output[[0, 2]], clean[[0, 2]])
        assert np.isnan(output[1]).any()


@dtypes
def test_25_the_same_bits(dtype: str) -> None:
    runs = []
    for threads, stochastic in ((1, False), (2, False), (2, False), (3, False), (2, True)):
        case = Case(96, 4, 200, 3, 130, dtype, ratio=0.1, threads=threads, stochastic_mode=stochastic)
        output, dx, gradients = case.run(offset=4)
        runs.append([bits(a) for a in (output, dx, *gradients)])
    assert all(run == runs[0] for run in runs)


# ---- F. interface


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
