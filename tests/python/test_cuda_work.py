"""Optimizers, the layer and matrix operators on arrays of a CUDA device, against the CPU; on the simulated driver of
the C tests."""

from __future__ import annotations

from typing import Callable

OPTIMIZERS = """
import libdc, numpy as np
from libdc.linalg import Handle, SampleLayer
from libdc.optim.arrays import KFAC, SGD, SOAP, AdamW, Muon, Shampoo
from simulated import memory, refused, there

device = libdc.Device("cuda:0")
generator = np.random.default_rng(5)
shapes = [(7, 33), (1,), (0, 4), (4097,)]
def random(shape, dtype):
    values = generator.standard_normal(shape, np.float32)
    return values if dtype == "float32" else values.astype(np.float16)

for kind, options in (AdamW, {"weight_decay": 0.1, "amsgrad": True}), (SGD, {"momentum": 0.9, "nesterov": True}):
    types = ["float32", "float16", "float32", "float16"]
    here, away = kind(1e-2, **options), kind(1e-2, Handle(1, device=device), **options)
    for shape, dtype in zip(shapes, types):
        for optimizer in (here, away):
            optimizer.add_param(shape, dtype=dtype)
    assert away.place == (2, 0)
    weights = [random(shape, dtype) for shape, dtype in zip(shapes, types)]
    copies = [there(w, device) for w in weights]
    for step in range(5):
        grads = [None if step == i else random(shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, types))]
        here.step(weights, grads, 0.5)
        away.step(copies, [None if g is None else there(g, device) for g in grads], 0.5)
    for i, (w, copy) in enumerate(zip(weights, copies)):
        assert w.tobytes() == memory(copy).tobytes(), (kind, i)
        assert here.state_names(i) == away.state_names(i)
        for name in away.state_names(i)[1:]:
            assert here.state(i, name).numpy().tobytes() == memory(away.state(i, name)).tobytes(), (kind, i, name)
    assert memory(away.state(0, "step")).view(np.int64) == 4 and here.save() == away.save()
    assert here.steps == away.steps == 4
    stream = libdc.Stream(device)
    away.set_stream(stream)
    for step in range(3):
        away.set_lr(0, 0.1 / (1 + step)), here.set_lr(0, 0.1 / (1 + step))
        grads = [random(shape, dtype) for shape, dtype in zip(shapes, types)]
        here.step(weights, grads)
        away.step(copies, [there(g, device) for g in grads])
    assert here.save() == away.save() and weights[3].tobytes() == memory(copies[3]).tobytes()
    assert away.stats().steps == 8 and away.stats().skipped_steps == 0
    away.set_stream(None)
    refused("step: weights[1] is in host memory, must be on cuda:0", TypeError,
            away.step, [copies[0], weights[1], *copies[2:]], [None] * 4)
    refused("step: grads[3] is in host memory, must be on cuda:0", TypeError,
            away.step, copies, [None, None, None, weights[3]])
    refused("step: weights[0] is on cuda:0, must be in host memory", TypeError, here.step, copies, [None] * 4)

def near(what, ours, theirs):
    error = np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max(initial=0)
    assert error <= 1e-3 * np.abs(theirs.astype(np.float64)).max(initial=0), (what, error)

muon, shampoo = {"precision": libdc.DType.FLOAT32}, {"eps_rel": 1e-3, "max_block": 5}
for kind, options in (Muon, muon), (Shampoo, shampoo), (SOAP, {"precondition_frequency": 2}):
    shapes = [(8, 8), (11, 1) if kind is Muon else (11,), (0, 4), (3, 4, 5)]
    here, away = kind(1e-2, **options), kind(1e-2, handle=Handle(1, device=device), **options)
    for shape in shapes:
        here.add_param(shape), away.add_param(shape)
    weights = [random(shape, "float32") for shape in shapes]
    copies = [there(w, device) for w in weights]
    for step in range(4):
        grads = [random(shape, "float32") for shape in shapes]
        here.step(weights, grads)
        away.step(copies, [there(g, device) for g in grads])
        if step == 1:
            away.load(here.save())
            for w, copy in zip(weights, copies):
                memory(copy)[:] = w.reshape(-1).view(memory(copy).dtype)
    for i, (w, copy) in enumerate(zip(weights, copies)):
        near((kind, i), memory(copy).view(np.float32).reshape(w.shape), w)
        assert here.state_names(i) == away.state_names(i)
    assert away.state(0, "momentum.0" if kind is Muon else "factor.0.0").place == (2, 0)
    assert kind is Muon or away.state(0, "failures.0.0").numpy() == 0

for inverse, approximation in ("eigen", "expand"), ("factored", "reduce"):
    options = {"damping": 0.1, "inverse": inverse, "refresh_frequency": 2}
    here, away = KFAC(1e-2, **options), KFAC(1e-2, handle=Handle(1, device=device), **options)
    shapes, weights, copies = [(6, 5), (6,), (4, 3, 3), (7,)], [], []
    for optimizer in (here, away):
        for shape in shapes:
            optimizer.add_param(shape)
        optimizer.add_layer(SampleLayer("linear"), 0, 1, approximation)
        optimizer.add_layer(SampleLayer("conv", kernel=[3], padding=[1]), 2, approximation=approximation)
    weights = [random(shape, "float32") for shape in shapes]
    copies = [there(w, device) for w in weights]
    for step in range(3):
        for layer, x, delta in (0, (5, 2, 5), (5, 2, 6)), (1, (5, 3, 8), (5, 4, 8)):
            batch = random(x, "float16"), random(delta, "float32")
            here.accumulate(layer, *batch, 5)
            away.accumulate(layer, *[there(array, device) for array in batch], 5)
        grads = [random(shape, "float32") for shape in shapes]
        here.step(weights, grads)
        away.step(copies, [there(g, device) for g in grads])
        if step == 1:
            away.load(here.save())
            for w, copy in zip(weights, copies):
                memory(copy)[:] = w.reshape(-1).view(memory(copy).dtype)
    for i, (w, copy) in enumerate(zip(weights, copies)):
        near((inverse, i), memory(copy).view(np.float32).reshape(w.shape), w)
        assert here.state_names(i) == away.state_names(i)
    assert away.state(0, "counts").numpy()[0] == 3 and away.state(2, "factor_g").place == (2, 0)
    refused("x is in host memory, must be on cuda:0", TypeError, away.accumulate, 0, *batch, 5)
print("fine")
"""


def test_optimizers_have_the_bits_of_the_cpu(on_the_simulated_driver: Callable[[str], str]) -> None:
    assert on_the_simulated_driver(OPTIMIZERS) == "fine\n"


LAYER = """
import libdc, numpy as np
from libdc.transformer import Layer, LayerConfig
from simulated import memory, refused, there

device = libdc.Device("cuda:0")
stream = libdc.Stream(device)
generator = np.random.default_rng(5)
gates = {"float32": 2e-5, "float16": 4e-3}

def copy(tensor):
    return memory(tensor).view(tensor.dtype.name.lower()).reshape(tensor.shape)

def close(what, ours, theirs):
    error = np.abs(copy(ours).astype(np.float64) - np.asarray(theirs).astype(np.float64)).max()
    assert error <= gates[ours.dtype.name.lower()] * np.abs(np.asarray(theirs)).max(), (what, error)

def run(packed=False, masked=False, on=None, **options):
    config = LayerConfig(32, 2, 48, threads=1, seed=3, initializer_range=0.2, attn_dropout_ratio=0.1,
                         hidden_dropout_ratio=0.1, **options)
    here, away = Layer(config), Layer(config, device)
    assert away.place == (2, 0)
    dtype = here.dtype.name.lower()
    weights, copies = here.initial_weights(), away.initial_weights()
    for w, c in zip(weights, copies):
        assert w.numpy().tobytes() == memory(c).tobytes(), "initial weights"
    shape = (9, 32) if packed else (2, 7, 32)
    x, dy = (generator.standard_normal(shape).astype(dtype) for _ in range(2))
    given = {"cu_seqlens": [0, 6, 6, 9]} if packed else {}
    mask = np.where(generator.random((2, 7)) < 0.3, -10000, 0).astype(np.float32) if masked else None
    tx, tdy, tmask = there(x, device), there(dy, device), None if mask is None else there(mask, device)
    y, kept = here.forward(weights, x, mask, offset=11, **given)
    dx, dw = here.backward(weights, x, dy, kept)
    ty, tkept = away.forward(copies, tx, tmask, offset=11, stream=on, **given)
    tdx, tdw = away.backward(copies, tx, tdy, tkept, stream=on)
    ti = away.inference(copies, tx, tmask, stream=on, **given)
    if on is not None:
        on.synchronize()
        assert not on._pins
    close("y", ty, y)
    close("dx", tdx, dx)
    close("inference", ti, here.inference(weights, x, mask, **given))
    for i, (ours, theirs) in enumerate(zip(tdw, dw)):
        close(i, ours, theirs)
    site = here.dropout_mask("output", 2, 7, 4), away.dropout_mask("output", 2, 7, 4)
    assert site[0][0].numpy().tobytes() == memory(site[1][0]).tobytes() and site[0][1] == site[1][1]
    return away, copies, weights, x, tx

run(dtype="float32")
run(dtype="float16", masked=True, pre_layer_norm=False, on=stream)
away, copies, weights, x, tx = run(dtype="float32", packed=True, on=stream, gelu="erf")
refused("x is in host memory, must be on cuda:0", TypeError, away.forward, copies, x)
refused("weights[inter_w] is in host memory, must be on cuda:0", TypeError,
        away.inference, [*copies[:6], weights[6], *copies[7:]], tx, cu_seqlens=[0, 9])
refused("workspace is in host memory, must be on cuda:0", TypeError,
        away.forward, copies, tx, cu_seqlens=[0, 9], workspace=np.empty(10, np.uint8))
refused("reserve is in host memory, must be on cuda:0", TypeError,
        away.forward, copies, tx, cu_seqlens=[0, 9], reserve=np.empty(10, np.uint8))
print("fine")
"""


def test_the_layer_is_the_cpus_within_rounding(on_the_simulated_driver: Callable[[str], str]) -> None:
    assert on_the_simulated_driver(LAYER) == "fine\n"


MATRICES = """
import libdc, numpy as np, tempfile
from libdc import linalg
from simulated import memory, refused, there

device = libdc.Device("cuda:0")
away = linalg.Handle(device=device)
random = np.random.default_rng(7).standard_normal

def agree(fn, *arrays, **options):
    here = fn(*arrays, **options)
    ours = fn(*(there(array, device) for array in arrays), handle=away, **options)
    brought = memory(ours).view(here.dtype).reshape(ours.shape)
    assert brought.shape == here.shape and np.abs(brought - here).max() <= 1e-11 * np.abs(here).max(), fn

a, b, x = random((5, 5)), random((3, 3)), random((2, 5, 3))
agree(linalg.inverse_root_newton, a @ a.T, root=4, eps_rel=1e-3)
agree(linalg.inverse_root, a @ a.T, root=4, eps_rel=1e-3)
agree(linalg.matrix_power, a @ a.T, power=0.5)
agree(lambda given, **at: linalg.eigh(given, **at)[0], a @ a.T)
agree(linalg.orthogonalize, x)
agree(linalg.kron, a, b)
agree(linalg.kron_apply, a, b, x)
agree(lambda *arrays, **at: linalg.kron_solve(*arrays[:4], 0.5, arrays[4], **at), a, np.ones(5), b, np.ones(3), x[0])
agree(linalg.matmul, x, b, alpha=2)
for part in range(2):
    agree(lambda array, **at: linalg.kron_nearest(array, (5, 5), (3, 3), **at)[part],
          np.kron(a, b) + 0.01 * random((15, 15)))

with tempfile.NamedTemporaryFile() as file, tempfile.NamedTemporaryFile() as result:
    wide, tall = random((70, 150)), random((150, 90))
    wide.tofile(file.name)
    given = linalg.FileMatrix(file.name, (70, 150), "float64")
    out = linalg.FileMatrix(result.name, (70, 90), "float64")
    for budget in 180000, 10000000:
        agree(lambda array, **at: linalg.matmul_bounded(given, array, budget, **at), tall)
        agree(lambda array, **at: linalg.matmul_bounded(array, given, budget, **at), tall[:, :70])
    assert linalg.matmul_bounded(given, there(tall, device), 180000, out=out, handle=away) is out
    assert np.abs(np.fromfile(result.name).reshape(70, 90) - wide @ tall).max() <= 1e-11
    mapped = np.memmap(file.name, np.float64, "r", shape=(150, 70))
    product = linalg.matmul_bounded(given, mapped, 180000, handle=away)
    square = memory(product).view("float64").reshape(70, 70)
    assert np.abs(square - wide @ mapped).max() <= 1e-11
    try:
        linalg.matmul_bounded(given, there(tall, device), 1, handle=away)
    except libdc.Error as error:
        assert error.needed > 1000
    refused("b is in host memory, must be on cuda:0", TypeError, linalg.matmul_bounded, given, tall, 180000,
            handle=away)
refused("a is in host memory, must be on cuda:0", TypeError, linalg.kron, a, b, handle=away)
refused("a is on cuda:0, must be in host memory", TypeError, linalg.kron, there(a, device), b)
print("fine")
"""


def test_matrix_operators_are_the_cpus_within_rounding(on_the_simulated_driver: Callable[[str], str]) -> None:
    assert on_the_simulated_driver(MATRICES) == "fine\n"


SAMPLES = """
import libdc, numpy as np
from libdc import linalg
from simulated import memory, refused, there

device = libdc.Device("cuda:0")
away = linalg.Handle(device=device)
random = np.random.default_rng(8)

def agree(fn, layer, *arrays, **options):
    here = fn(layer, *arrays, **options)
    ours = fn(layer, *(there(array, device) for array in arrays), handle=away, **options)
    for a, b in zip(*(found if isinstance(found, tuple) else (found,) for found in (here, ours))):
        assert (a is None) == (b is None)
        if a is not None:
            brought = memory(b).view(a.dtype).reshape(a.shape)
            assert np.abs(brought - a).max() <= 1e-11 * np.abs(a).max(), (fn, layer)
    return here

shapes = {"linear": ((3, 4, 5), (3, 4, 6)), "conv": ((3, 4, 5, 5), (3, 6, 4, 4)), "layer_norm": ((3, 4, 5), (3, 4, 5)),
          "rms_norm": ((3, 4, 5), (3, 4, 5)), "group_norm": ((3, 4, 5), (3, 4, 5)), "embedding": ((3, 4), (3, 4, 6)),
          "bag_mean": ((3, 4), (3, 6))}
for kind, (x, delta) in shapes.items():
    layer = linalg.SampleLayer(kind, kernel=(2, 2) if kind == "conv" else (), eps=1e-3,
                               rows=5 if len(x) == 2 else 0, groups=2 if kind in ("conv", "group_norm") else 0)
    x = random.integers(0, 5, x) if layer.rows else random.standard_normal(x)
    delta = random.standard_normal(delta)
    agree(linalg.per_sample_grads, layer, x, delta)
    squares = agree(linalg.per_sample_norms, layer, x, delta)
    factors = agree(lambda _, given, **at: linalg.clip_factors(given, 1.0, **at), layer, squares)
    agree(linalg.clipped_grad_sum, layer, x, delta, factors)
refused("x is in host memory, must be on cuda:0", TypeError, linalg.per_sample_norms, layer, x, delta, handle=away)
print("fine")
"""


def test_gradients_per_sample_are_the_cpus_within_rounding(on_the_simulated_driver: Callable[[str], str]) -> None:
    assert on_the_simulated_driver(SAMPLES) == "fine\n"
