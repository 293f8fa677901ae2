"""libdc.optim.arrays: arrays in, state out, errors; what the kinds compute is in tests/optim and
tests/torch/optim/test_optim.py."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import libdc
import numpy as np
import pytest
from libdc.linalg import Handle
from libdc.optim.arrays import KFAC, SGD, SOAP, AdamW, Muon


def test_adamw_by_hand() -> None:
    w, g = np.ones(3, np.float32), np.array([1, -2, 0], np.float32)
    optimizer = AdamW(lr=0.1, weight_decay=0.5)
    assert optimizer.add_param((3,)) == 0
    optimizer.step([w], [g])
    np.testing.assert_allclose(w, [0.85, 1.05, 0.95], rtol=1e-6)
    optimizer.step([w], [None])
    np.testing.assert_allclose(w, [0.85, 1.05, 0.95], rtol=1e-6)
    assert optimizer.steps == 1 and optimizer.state_names(0) == ["step", "exp_avg", "exp_avg_sq"]
    np.testing.assert_allclose(optimizer.state(0, "exp_avg").numpy(), 0.1 * g, rtol=1e-6)


def test_zero_is_zero() -> None:
    w = np.ones(1, np.float32)
    optimizer = AdamW(beta1=0.0, lr=0.1)
    optimizer.add_param((1,))
    optimizer.step([w], [np.ones(1, np.float32)])
    assert optimizer.state(0, "exp_avg").numpy()[0] == 1


def test_a_scaled_loss() -> None:
    weights, grad = np.ones((2, 3), np.float32), np.arange(3, dtype=np.float32)
    plain, scaled = SGD(lr=0.5), SGD(lr=0.5)
    scale, found = np.full((), 8.0, np.float32), np.ones(1, np.float32)
    for optimizer in (plain, scaled):
        optimizer.add_param((3,))
    scaled.set_loss_scale(scale, found)
    scaled.step([weights[1]], [8 * grad])
    assert (weights == 1).all() and scaled.stats().skipped_steps == 1 and scaled.steps == 0
    found[0] = 0
    for optimizer, weight, factor in ((plain, weights[0], 1), (scaled, weights[1], 8)):
        optimizer.step([weight], [factor * grad])
    np.testing.assert_array_equal(weights[0], weights[1])
    scaled.set_loss_scale()
    with pytest.raises(libdc.Error, match="found_inf has 3 elements, must have 1"):
        scaled.set_loss_scale(None, grad)
    with pytest.raises(TypeError, match="set_loss_scale: loss_scale is"):
        scaled.set_loss_scale("1")


def test_parts_groups_and_scale() -> None:
    whole, part = np.ones((4, 5), np.float32), np.ones(7, np.float32)
    grad = np.arange(20, dtype=np.float32).reshape(4, 5)
    one, two = SGD(lr=0.5, momentum=0.9), SGD(handle=Handle(1))
    two.set_group(1, momentum=0.9)
    two.set_lr(1, 0.5)
    one.add_param((4, 5))
    two.add_param((4, 5), offset=13, group=1)
    for _ in range(3):
        one.step([whole], [grad])
        two.step([part], [grad.reshape(-1)[13:] * 4], grad_scale=0.25)
    np.testing.assert_array_equal(part, whole.reshape(-1)[13:])


def test_a_state_outlives_the_optimizer_and_goes_to_another() -> None:
    first, second = AdamW(), AdamW()
    for optimizer in (first, second):
        optimizer.add_param((1000,))
    w = np.ones(1000, np.float32)
    first.step([w], [w.copy()])
    second.load(first.save())
    view = first.state(0, "exp_avg").numpy()
    del first
    gc.collect()
    np.testing.assert_array_equal(view, second.state(0, "exp_avg").numpy())
    with pytest.raises(libdc.Error, match="no saved state"):
        second.load(b"x" * 100)
    stats = second.stats()
    assert stats.params == 1 and stats.steps == 0 and stats.state_bytes >= 8000
    second.close()
    with pytest.raises(libdc.Error, match="closed"):
        second.save()


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="no option 'momentum', there are amsgrad, beta1"):
        AdamW(momentum=0.9)
    with pytest.raises(libdc.Error, match="options.beta1 = 1, must be > 0 and < 1"):
        AdamW(beta1=1.0)
    for kind, options in ((AdamW, {"beta1": -1.0}), (AdamW, {"eps": -1}), (AdamW, {"beta2": float("nan")}),
                          (Muon, {"momentum": -1.0}), (Muon, {"steps": 0}), (KFAC, {"damping": 0.0}),
                          (KFAC, {"kl_clip": -1.0}), (KFAC, {"refresh_frequency": 0}), (SOAP, {"max_precond_dim": -1})):
        with pytest.raises(ValueError, match=f"{kind.__name__}: {next(iter(options))} = .*, must be >=? 0"):
            kind(**options)
    optimizer = AdamW()
    optimizer.add_param((2,))
    frozen = np.ones(2, np.float32)
    frozen.flags.writeable = False
    cases: Any = [([frozen], [frozen], TypeError, "read-only"), ([], [frozen], ValueError, "0 weights"),
                  ([np.ones(3, np.float32)], [None], libdc.Error, "has 3 elements, must have 2")]
    for weights, grads, error, text in cases:
        with pytest.raises(error, match=text):
            optimizer.step(weights, grads)


def test_importing_needs_no_numpy_and_no_torch() -> None:
    code = "import libdc.optim.arrays, sys; assert not {'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_know_the_options_of_the_structs():
    from libdc._lib import ffi
    from libdc.optim.arrays import options

    for kind in ("AdamW", "SGD", "Muon", "Shampoo", "SOAP", "KFAC"):
        fields = {name for name, _ in ffi.typeof(f"dc_{kind.lower()}_options").fields} - {"struct_size", "reserved0"}
        assert set(getattr(options, f"{kind}Options").__annotations__) == fields
