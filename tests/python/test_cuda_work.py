"""Optimizers and the layer on arrays of a CUDA device, against the CPU; on the simulated driver of the C tests."""

from __future__ import annotations

from typing import Callable

OPTIMIZERS = """
import libdc, numpy as np
from libdc.linalg import Handle
from libdc.optimizers import SGD, AdamW, Shampoo
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
    assert away.state(0, "step").numpy() == 4 and here.save() == away.save()
    refused("step: weights[1] is in host memory, must be on cuda:0", TypeError,
            away.step, [copies[0], weights[1], *copies[2:]], [None] * 4)
    refused("step: grads[3] is in host memory, must be on cuda:0", TypeError,
            away.step, copies, [None, None, None, weights[3]])
    refused("step: weights[0] is on cuda:0, must be in host memory", TypeError, here.step, copies, [None] * 4)

try:
    Shampoo(handle=Handle(1, device=device))
except libdc.Error as error:
    assert error.status == libdc.Status.E_UNSUPPORTED
else:
    raise AssertionError("Shampoo has no kernels there")
print("fine")
"""


def test_optimizers_have_the_bits_of_the_cpu(on_the_simulated_driver: Callable[[str], str]) -> None:
    assert on_the_simulated_driver(OPTIMIZERS) == "fine\n"
