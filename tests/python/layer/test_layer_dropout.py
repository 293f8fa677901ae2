"""The transformer layer against float64, points 11 to 16 of its conformance list (docs/conformance-layer.md):
dropout."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from layer_tools import Case, bits, check, close, dtypes, get, placements, put

from libdc.transformer import WEIGHTS, Layer, LayerConfig


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


def test_a_layer_for_inference_drops_nothing() -> None:
    layer = Layer(LayerConfig(64, 4, attn_dropout_ratio=0.5, hidden_dropout_ratio=0.5, training=False))
    for site in ("attention", "projection", "output"):
        mask, scale = layer.dropout_mask(site, 2, 8)
        assert np.asarray(mask).all() and scale == 1


@pytest.mark.parametrize("ratio", [0.1, 0.5])
@dtypes
def test_12_values_are_zero_or_scaled(dtype: str, ratio: float) -> None:
    """Each site alone between a one and the output: what comes out is its mask times the factor, to the bit."""
    case = Case(64, 4, 96, 2, 16, dtype, ratio)
    zeros, ones = [put(get(w) * 0, dtype) for w in case.weights], [put(get(w) * 0 + 1, dtype) for w in case.weights]
    case.x = put(np.zeros(case.shape), dtype)
    masks = dict(zip(("attention", "projection", "output"), case.drops(9)))

    def output(**weights: Any) -> np.ndarray:
        case.weights = [weights.get(name, zero) for name, zero in zip(WEIGHTS, zeros)]
        return get(case.forward(offset=9)[0])

    for site, name in (("projection", "attn_ob"), ("output", "output_b")):
        found = output(**{name: ones[WEIGHTS.index(name)]})
        assert np.array_equal(found, get(put(masks[site], dtype)))
        assert abs(found.mean() - 1) <= 4 * np.sqrt(ratio / (1 - ratio) / found.size) + 0.004
    # Values of one, and equal probabilities: a head's features are the mean of its row of the mask.
    features = np.zeros(192)
    features[128:] = 1
    found = output(attn_qkvb=put(features, dtype), attn_ow=put(np.eye(64), dtype))
    rows = masks["attention"].mean(-1).transpose(0, 2, 1).repeat(16, -1)
    close("attention", found, rows * masks["projection"], dtype)


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
                assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(a.size)
            for mask in masks:
                for lag in (1, 2, 8, 16, 96):
                    assert abs((mask[lag:] * mask[:-lag]).mean() / mask.var()) < 4 / np.sqrt(mask.size)


@placements
@dtypes
def test_15_gradients_with_dropout(dtype: str, pre: bool) -> None:
    case = Case(64, 4, 96, 2, 70, dtype, ratio=0.3, pre_layer_norm=pre)
    for offset in (0, 12345678901234567):
        check(case, offset=offset)


@dtypes
def test_15_dropped_elements_have_no_gradient(dtype: str) -> None:
    """Of a bias by one output: 0 where the element is dropped, the factor where it is kept."""
    case = Case(64, 4, 96, 1, 9, dtype, ratio=0.4)
    _, scale = case.layer.dropout_mask("output", 1, 9, 3)
    mask = case.drops(3)[2]
    dy = np.zeros(case.shape)
    dy[0, 4] = 1
    case.dy = put(dy, dtype)
    found = get(case.run(offset=3)[2][WEIGHTS.index("output_b")])
    assert np.array_equal(found, get(put(mask[0, 4], dtype))) and set(np.unique(mask)) == {0, scale}
