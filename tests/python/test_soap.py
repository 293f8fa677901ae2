"""SOAP against a reference in float64: point 45 of the second-order conformance list. By hand, on ranks and on failure
it is tested in C (tests/optim/blockwise/test_soap.c)."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import numpy as np
import pytest
from libdc.optim.arrays import SOAP
from numpy.typing import NDArray

Array = NDArray[np.float64]
LR = 0.1


def unfold(x: Array, d: int) -> Array:
    return np.moveaxis(x, d, 0).reshape(x.shape[d], -1)


def along(x: Array, matrix: Array, d: int) -> Array:
    """x times the matrix, along dimension d."""
    return np.moveaxis(np.tensordot(matrix, x, (0, d)), 0, d)


class Reference:
    """One block by the definition. bases: "qr", or "eigh" for a decomposition at every refresh."""

    def __init__(self, weight: Array, frequency: int, beta1: float = 0.95, beta2: float = 0.95,
                 shampoo_beta: float = 0.95,
                 eps: float = 1e-8, decay: float = 0.0, longest: int = 10000, bases: str = "qr") -> None:
        self.w, self.m, self.v, self.t = weight.astype(np.float64), np.zeros(weight.shape), np.zeros(weight.shape), -1
        self.frequency, self.betas, self.c, self.eps, self.decay = frequency, (beta1, beta2), shampoo_beta, eps, decay
        sides = weight.ndim > 1
        self.factors = {d: np.zeros((n, n)) for d, n in enumerate(weight.shape) if sides and n <= longest}
        self.q: Dict[int, Array] = {}
        self.bases = bases

    def rotate(self, x: Array, back: bool) -> Array:
        for d, q in self.q.items():
            x = along(x, q.T if back else q, d)
        return x

    def step(self, g: Array) -> None:
        self.t += 1
        if self.t > 0:
            b1, b2 = self.betas
            rotated = self.rotate(g, False)
            self.m = b1 * self.m + (1 - b1) * rotated
            self.v = b2 * self.v + (1 - b2) * rotated ** 2
            u = self.m / (1 - b1 ** self.t) / (np.sqrt(self.v / (1 - b2 ** self.t)) + self.eps)
            self.w = (1 - LR * self.decay) * self.w - LR * self.rotate(u, True)
        for d, factor in self.factors.items():
            self.factors[d] = self.c * factor + (1 - self.c) * unfold(g, d) @ unfold(g, d).T
        if self.t % self.frequency == 0:
            self.refresh()

    def refresh(self) -> None:
        m = self.rotate(self.m, True)
        for d, factor in self.factors.items():
            if self.t == 0 or self.bases == "eigh":
                self.q[d] = np.linalg.eigh(factor)[1][:, ::-1]
                continue
            order = np.argsort(-np.diag(self.q[d].T @ factor @ self.q[d]), kind="stable")
            self.v = np.take(self.v, order, d)
            self.q[d] = np.linalg.qr(factor @ self.q[d][:, order])[0]
        self.m = self.rotate(m, False)


def gradients(shape: Sequence[int], steps: int, spread: float = 0.5) -> List[Any]:
    """With spectra that decay, whose eigenvectors are well defined: numbers along each dimension, in a basis of its
    own."""
    rng = np.random.default_rng(7)
    rotations = [np.linalg.qr(rng.standard_normal((n, n)))[0] * spread ** np.arange(n)[:, None] for n in shape]
    made = []
    for _ in range(steps):
        g = rng.standard_normal(shape)
        for d, rotation in enumerate(rotations):
            g = along(g, rotation, d)
        made.append(np.ascontiguousarray(g, np.float32))
    return made


def run(weight: Any, grads: Sequence[Any], **options: Any) -> Any:
    w = weight.astype(np.float32)
    optimizer = SOAP(lr=LR, **options)
    optimizer.add_param(w.shape)
    for g in grads:
        optimizer.step([w], [np.ascontiguousarray(g)])
    return w


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("shape", [(6, 6), (3, 4, 5), (2, 3, 2, 2), (9,), ()])
def test_45_the_definition(shape: Sequence[int], frequency: int) -> None:
    weight, grads = np.ones(shape), gradients(shape, 12)
    options: Dict[str, Any] = dict(beta1=0.9, beta2=0.99, shampoo_beta=0.8, eps=1e-3)
    reference = Reference(weight, frequency, decay=0.1, **options)
    for g in grads:
        reference.step(g.astype(np.float64))
    ours = run(weight, grads, precondition_frequency=frequency, weight_decay=0.1, **options)
    np.testing.assert_allclose(ours, reference.w, atol=2e-3)
    assert np.abs(reference.w - 1).max() > 0.1


def test_45_dimensions_that_are_too_long_merged_or_cut() -> None:
    weight, grads = np.ones((4, 8)), gradients((4, 8), 9)
    sides = Reference(weight, 2, longest=4)
    blocks = [Reference(weight[:, at:at + 4], 2) for at in (0, 4)]
    merged = Reference(weight, 2, longest=4)
    for g in grads:
        sides.step(g.astype(np.float64))
        merged.step(g.astype(np.float64))
        for at, block in zip((0, 4), blocks):
            block.step(g[:, at:at + 4].astype(np.float64))
    np.testing.assert_allclose(run(weight, grads, precondition_frequency=2, max_precond_dim=4), sides.w, atol=2e-3)
    np.testing.assert_allclose(run(weight, grads, precondition_frequency=2, max_block=4),
                               np.concatenate([block.w for block in blocks], 1), atol=2e-3)
    small = [g.reshape(4, 2, 4) for g in grads]
    np.testing.assert_allclose(run(weight.reshape(4, 2, 4), small, precondition_frequency=2, max_precond_dim=4,
                                   merge_below=8).reshape(4, 8), merged.w, atol=2e-3)


def test_45_none_has_a_factor_and_all_is_adam() -> None:
    weight, grads = np.ones((5, 5)), gradients((5, 5), 9)
    flat = [g.reshape(-1) for g in grads]
    adam = Reference(weight.reshape(-1), 1)
    for g in flat:
        adam.step(g.astype(np.float64))
    for ours in (run(weight, grads, max_precond_dim=0), run(weight.reshape(-1), flat)):
        np.testing.assert_allclose(ours.reshape(-1), adam.w, atol=1e-5)


def test_45_every_step_it_follows_the_eigenvectors() -> None:
    """One step of the iteration at every step comes to a decomposition at every step; a basis that stays does not."""
    weight, grads = np.zeros((6, 6)), gradients((6, 6), 300, spread=0.3)
    exact, stays = Reference(weight, 1, bases="eigh"), Reference(weight, 1000)
    for g in grads:
        exact.step(g.astype(np.float64))
        stays.step(g.astype(np.float64))
    length = np.linalg.norm(exact.w)
    assert np.linalg.norm(run(weight, grads, precondition_frequency=1) - exact.w) < 0.05 * length
    assert np.linalg.norm(stays.w - exact.w) > 0.5 * length
