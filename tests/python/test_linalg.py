"""libdc.linalg: accuracy on hard spectra against mpmath (60 digits) and float64 (point 18 of the second-order
conformance list). Warm starts over a run of changing matrices, arrays of all kinds, and what tests/linalg does not
reach."""

from __future__ import annotations

import array
import os
import subprocess
import sys
from typing import Any, Callable, Dict, List

import libdc
import numpy as np
import pytest
from libdc import linalg

N = 12


def _orthogonal(n: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]


def with_spectrum(values: np.ndarray, seed: int = 0) -> np.ndarray:
    q = _orthogonal(len(values), seed)
    a = (q * values) @ q.T
    return (a + a.T) / 2


SPECTRA: Dict[str, Callable[[int], np.ndarray]] = {
    **{f"condition 1e{k}": lambda n, k=k: np.logspace(0, -k, n) for k in (0, 1, 2, 4, 6, 8, 10, 12)},
    "clustered": lambda n: np.repeat([1.0, 1e-3, 1e-3 * (1 + 1e-9)], -(-n // 3))[:n],
    "rank n/4": lambda n: np.where(np.arange(n) < max(1, n // 4), 1.0, 0.0),
    "one huge": lambda n: np.where(np.arange(n) == 0, 1e8, 1.0),
    "power law": lambda n: (1.0 + np.arange(n)) ** -2,
    "equal": lambda n: np.full(n, 3.0),
}  # fmt: skip


def mpmath_root(a: np.ndarray, power: float, epsilon: float) -> np.ndarray:
    import mpmath  # type: ignore[import-untyped]

    with mpmath.workdps(60):
        values, q = mpmath.eigsy(mpmath.matrix(a.tolist()))
        d = mpmath.diag([(max(v, mpmath.mpf(0)) + epsilon) ** mpmath.mpf(power) for v in values])
        return np.array((q * d * q.T).tolist(), dtype=np.float64)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", SPECTRA)
def test_18_float64_against_60_digits(name: str, plain: bool) -> None:
    a = with_spectrum(SPECTRA[name](N))
    handle = linalg.Handle(threads=1, plain=plain)
    for power in (-0.25, -0.5, -1.0, 0.5, 0.3):
        info: List[linalg.SpectralInfo] = []
        got = linalg.matrix_power(a, power, eps_rel=1e-10, info=info, handle=handle)
        want = mpmath_root(a, power, info[0].epsilon)
        condition = (info[0].largest + info[0].epsilon) / (max(info[0].smallest, 0) + info[0].epsilon)
        assert np.linalg.norm(got - want) <= 20 * N * 2.3e-16 * max(1.0, abs(power) * condition) * np.linalg.norm(want)


@pytest.mark.parametrize("n", [1, 2, 3, 33, 200])
@pytest.mark.parametrize("name", SPECTRA)
def test_18_float32_against_float64(name: str, n: int) -> None:
    a = with_spectrum(SPECTRA[name](n)).astype(np.float32)
    a = (a + a.T) / 2
    values, q = np.linalg.eigh(a.astype(np.float64))
    for precision in ("float64", "float32", None):
        for eps_rel in (1e-3, 1e-6):
            info: List[linalg.SpectralInfo] = []
            got = linalg.inverse_root(a, 4, eps_rel=eps_rel, precision=precision, info=info)
            want = (q * (np.maximum(values, 0) + info[0].epsilon) ** -0.25) @ q.T
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            # In float32 eigenvalues have errors of n 2^-24 of the largest, which is how much of the smallest.
            narrow = precision == "float32" or (precision is None and eps_rel >= 32 * n * 2.0**-23)
            assert error <= (1e-6 + 2 * n * 2.0**-24 / eps_rel if narrow else 1e-6), (precision, eps_rel)


def test_02_hilbert() -> None:
    hilbert = 1.0 / (np.arange(8)[:, None] + np.arange(8)[None, :] + 1)
    got = linalg.matrix_power(hilbert, -0.5)
    want = mpmath_root(hilbert, -0.5, 0.0)
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)  # condition 1.5e10


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("plain", [False, True])
def test_20_eigenvectors(plain: bool, dtype: str) -> None:
    handle = linalg.Handle(plain=plain)
    eps = np.finfo(dtype).eps
    for name, spectrum in SPECTRA.items():
        for n in (1, 2, 31, 70):
            a = with_spectrum(spectrum(n) - 0.3, seed=n).astype(dtype)
            w, v = linalg.eigh(np.stack([a, a]), handle=handle)
            assert np.array_equal(w[0], w[1]) and np.array_equal(v[0], v[1])
            most = np.abs(w[0]).max()
            assert np.abs(v[0].T @ v[0] - np.eye(n)).max() <= 20 * n * eps
            assert np.abs((v[0] * w[0]) @ v[0].T - a).max() <= 20 * n * eps * most
            assert np.abs(w[0] - np.linalg.eigvalsh(a.astype("float64"))).max() <= 10 * n * eps * most


@pytest.mark.parametrize("basis_type", ["float32", "float64"])
def test_21_warm_start_over_a_run(basis_type: str) -> None:
    """Shampoo's factor of a run with a moving average: each root is as near as the tolerance, most of them warm."""
    n, beta, tolerance = 96, 0.999, 1e-3
    rng = np.random.default_rng(5)
    shape = _orthogonal(n, 1) * np.arange(1, n + 1) ** -0.5
    factor = shape @ shape.T
    basis = np.zeros((n, n), basis_type)
    paths = []
    for _ in range(60):
        g = shape @ rng.standard_normal((n, n)) / n**0.5
        factor = beta * factor + (1 - beta) * g @ g.T
        a = factor.astype(np.float32)
        a = (a + a.T) / 2
        info: List[linalg.SpectralInfo] = []
        got = linalg.inverse_root(a, 4, eps_rel=1e-4, basis=basis, tolerance=tolerance, info=info)
        values, q = np.linalg.eigh(a.astype(np.float64))
        want = (q * (values + info[0].epsilon) ** -0.25) @ q.T
        error = np.linalg.norm(got - want, 2) / np.linalg.norm(want, 2)
        assert error <= tolerance and (info[0].path is not linalg.SpectralPath.WARM or info[0].change <= tolerance)
        paths.append(info[0].path)
    assert paths[0] is linalg.SpectralPath.FRESH or paths[0] is linalg.SpectralPath.PLAIN
    assert paths.count(linalg.SpectralPath.WARM) >= 40


def test_info_takes_the_place_of_an_exception() -> None:
    a = np.stack([np.eye(3), np.full((3, 3), np.nan), 16 * np.eye(3)])
    with pytest.raises(libdc.Error, match=r"a\[1\] has a NaN") as caught:
        linalg.matrix_power(a, -0.25)
    assert caught.value.status == libdc.Status.E_NOT_FINITE
    info: List[linalg.SpectralInfo] = []
    out = np.zeros_like(a)
    linalg.matrix_power(a, -0.25, out=out, info=info)
    assert [report.ok for report in info] == [True, False, True]
    assert np.allclose(out[2], 0.5 * np.eye(3)) and not out[1].any()
    with pytest.raises(libdc.Error, match="must be square"):
        linalg.matrix_power(a[:, :2], -0.25, info=info)
    with pytest.raises(ValueError, match="symmetry = 'none'"):
        linalg.eigh(a, symmetry="none")


def test_views_and_arrays_of_every_kind() -> None:
    a = with_spectrum(SPECTRA["power law"](6))
    big = np.zeros((12, 12))
    big[::2, ::2] = a
    want = linalg.matrix_power(a, -0.25)
    assert np.array_equal(linalg.matrix_power(big[::2, ::2], -0.25), want)
    assert np.allclose(linalg.matrix_power(a[::-1, ::-1], -0.25), want[::-1, ::-1])
    tensor = linalg.zeros((6, 6), "float64")
    np.asarray(tensor)[:] = a
    got = linalg.matrix_power(tensor, -0.25)
    assert isinstance(got, libdc.Tensor) and np.array_equal(np.asarray(got), want)
    flat = memoryview(array.array("d", a.ravel())).cast("B").cast("d", (6, 6))
    assert np.array_equal(np.asarray(linalg.matrix_power(flat, -0.25)), want)
    left = np.random.default_rng(0).standard_normal((3, 4, 5))
    assert np.allclose(linalg.matmul(left.transpose(0, 2, 1), left), np.swapaxes(left, 1, 2) @ left)
    with pytest.raises(TypeError, match="read-only"):
        fixed = np.zeros((6, 6))
        fixed.flags.writeable = False
        linalg.matrix_power(a, 1.0, out=fixed)


def test_23_kron_with_a_limit() -> None:
    a = np.ones((50, 50), np.float32)
    with pytest.raises(libdc.Error, match="max_bytes = 1000"):
        linalg.kron(a, a, max_bytes=1000)
    assert linalg.kron(a, a[:1, :1], max_bytes=10000).nbytes == 10000
    with pytest.raises(ValueError, match="beta = 1"):
        linalg.matmul(a, a, beta=1)


def test_28_files(tmp_path: Any) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((70, 40)), rng.standard_normal((40, 30))
    (tmp_path / "a").write_bytes(b"head" + a.tobytes())
    with open(tmp_path / "a", "rb") as file:
        got = linalg.matmul_bounded(linalg.FileMatrix(file, (70, 40), "float64", 4), b, 8192)
        assert np.allclose(np.asarray(got), a @ b)
    with pytest.raises(FileNotFoundError):
        linalg.matmul_bounded(linalg.FileMatrix(tmp_path / "none", (70, 40)), b, 8192)


def test_28_memory_maps_that_are_not_their_file(tmp_path: Any) -> None:
    values, one = np.arange(6, dtype=np.float32).reshape(2, 3), np.eye(3, dtype=np.float32)
    path = tmp_path / "a"
    path.write_bytes(values.tobytes())
    copy = np.memmap(path, np.float32, "c", shape=(2, 3))
    copy[:] = 7
    assert np.array_equal(np.asarray(linalg.matmul_bounded(copy, one, 1 << 20)), np.full((2, 3), 7))
    assert linalg.matmul_bounded(values + 1, one, 1 << 20, out=copy) is copy and np.array_equal(copy, values + 1)
    frozen = np.memmap(path, np.float32, "r+", shape=(2, 3))
    frozen.flags.writeable = False
    for out in (np.memmap(path, np.float32, "r", shape=(2, 3)), frozen):
        with pytest.raises((BufferError, TypeError, ValueError), match="(?i)read-?only|writ"):
            linalg.matmul_bounded(values + 1, one, 1 << 20, out=out)
    assert path.read_bytes() == values.tobytes()


def test_memory_maps_whose_file_was_replaced(tmp_path: Any) -> None:
    """os.replace() is how files are written atomically; a map stays the one that it was."""
    one, path = np.eye(3, dtype=np.float32), tmp_path / "a"
    old, new = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 7, np.float32)
    path.write_bytes(old.tobytes())
    mapped = np.memmap(path, np.float32, "r+", shape=(2, 3))
    (tmp_path / "b").write_bytes(new.tobytes())
    os.replace(tmp_path / "b", path)
    assert np.array_equal(np.asarray(linalg.matmul_bounded(mapped, one, 1 << 20)), old)
    linalg.matmul_bounded(old + 1, one, 1 << 20, out=mapped)
    assert np.array_equal(mapped, old + 1) and path.read_bytes() == new.tobytes()
    os.remove(path)
    assert np.array_equal(np.asarray(linalg.matmul_bounded(mapped, one, 1 << 20)), old + 1)


def test_28_bytes_in_another_order_are_refused(tmp_path: Any) -> None:
    values, one = np.arange(6, dtype=np.dtype(np.float32).newbyteorder()).reshape(2, 3), np.eye(3, dtype=np.float32)
    (tmp_path / "a").write_bytes(values.tobytes())
    swapped = np.memmap(tmp_path / "a", values.dtype, "r", shape=(2, 3))
    for a in (values, swapped, linalg.FileMatrix(tmp_path / "a", (2, 3), values.dtype)):
        with pytest.raises((BufferError, TypeError, ValueError), match="(?i)byte ?order|format|type"):
            linalg.matmul_bounded(a, one, 1 << 20)
    with pytest.raises(TypeError, match="byte order"):
        libdc.DType.of(values.dtype)


def test_30_samples_from_numpy() -> None:
    rng = np.random.default_rng(2)
    x, delta = rng.standard_normal((4, 3, 5)), rng.standard_normal((4, 3, 6))
    layer = linalg.SampleLayer("linear")
    weight, bias = linalg.per_sample_grads(layer, x, delta)
    assert np.allclose(weight, np.einsum("nto,nti->noi", delta, x)) and np.allclose(bias, delta.sum(1))
    squares = linalg.per_sample_norms(layer, x, delta)
    assert np.allclose(squares, (weight**2).sum((1, 2)) + (bias**2).sum(1))
    factors = linalg.clip_factors(squares, 2.0)
    total, total_bias = linalg.clipped_grad_sum(layer, x, delta, factors)
    assert np.allclose(total, np.einsum("n,noi->oi", factors, weight))
    assert np.allclose(total_bias, factors @ bias)
    out = np.empty((4, 6, 5))
    only, none = linalg.per_sample_grads(layer, x, delta, weight=out, want_bias=False)
    assert only is out and none is None
    linalg.per_sample_norms(layer, x, delta, add_to=squares)
    with pytest.raises(ValueError, match="kind = 'dense'"):
        linalg.per_sample_grads(linalg.SampleLayer("dense"), x, delta)


def test_30_finite_differences() -> None:
    """The loss is the sum of sin(W x + b): its gradient by each entry, sample by sample."""
    rng = np.random.default_rng(30)
    x, w, b, h = rng.standard_normal((3, 2, 4)), rng.standard_normal((5, 4)), rng.standard_normal(5), 1e-6
    weight, bias = linalg.per_sample_grads(linalg.SampleLayer("linear"), x, np.cos(x @ w.T + b))

    def loss(w: Any, b: Any) -> Any:
        return np.sin(x @ w.T + b).sum((1, 2))

    for i, j in np.ndindex(w.shape):
        step = np.zeros_like(w)
        step[i, j] = h
        assert np.allclose(weight[:, i, j], (loss(w + step, b) - loss(w - step, b)) / (2 * h), atol=1e-8)
    for i, step in enumerate(np.eye(5) * h):
        assert np.allclose(bias[:, i], (loss(w, b + step) - loss(w, b - step)) / (2 * h), atol=1e-8)


def test_17_newton_against_eigenvectors() -> None:
    a = np.stack([with_spectrum(SPECTRA["power law"](40)), with_spectrum(SPECTRA["power law"](40))])
    info: list[linalg.IterationInfo] = []
    root = linalg.inverse_root_newton(a, 4, eps_rel=1e-5, info=info)
    assert np.allclose(root, linalg.inverse_root(a, 4, eps_abs=info[0].epsilon), rtol=1e-9, atol=1e-9)
    assert all(i.ok and 4 < i.iterations < 40 and i.residual < 1e-8 for i in info)
    best = linalg.inverse_root_newton(a, 4, eps_rel=1e-5, iterations=3, info=info)
    assert not any(i.ok for i in info) and info[0].iterations == 3 and np.isfinite(best).all()
    with pytest.raises(libdc.Error, match="after 3 iterations"):
        linalg.inverse_root_newton(a, 4, eps_rel=1e-5, iterations=3)


def test_22_orthonormal_factors() -> None:
    a = np.random.default_rng(22).standard_normal((3, 6, 20))
    u, _, v = np.linalg.svd(a, full_matrices=False)
    assert np.allclose(linalg.orthogonalize(a), u @ v, atol=1e-12)
    values = np.linalg.svd(linalg.orthogonalize(a, polynomial="muon"), compute_uv=False)
    assert 0.68 < values.min() and values.max() < 1.16
    with pytest.raises(ValueError, match="polynomial = 'cubic'"):
        linalg.orthogonalize(a, polynomial="cubic")


PEAK = """
import sys, numpy as np
from libdc import linalg

n, budget = 2048, int(sys.argv[2])
a, b, out = (linalg.FileMatrix(f"{sys.argv[1]}/{name}", (n, n)) for name in "abo")
handle = linalg.Handle(threads=2)

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

small = np.ones((512, 512), np.float32)
linalg.matmul(small, small, handle=handle)  # the threads are there
open("/proc/self/clear_refs", "w").write("5")
before = peak()
linalg.matmul_bounded(a, b, budget, out=out, handle=handle)
print(peak() - before)
"""


def test_28_peak_memory(tmp_path: Any) -> None:
    """For operands many times as large, and not mapped, the process's peak grows by the budget at most. The part of two
    threads' scratch memory that they have not touched yet comes on top."""
    rng, n, slack = np.random.default_rng(28), 2048, (2 * 7 + 1) << 20
    a, b = (rng.standard_normal((n, n), np.float32) for _ in "ab")
    for name, values in (("a", a), ("b", b), ("o", np.zeros((1, 1), np.float32))):
        (tmp_path / name).write_bytes(values.tobytes())
    for budget in (512 << 10, 2 << 20):
        grown = int(subprocess.run([sys.executable, "-c", PEAK, str(tmp_path), str(budget)], check=True, text=True,
                                   capture_output=True).stdout)
        assert grown <= budget + slack, (grown, budget)
        got = np.fromfile(tmp_path / "o", np.float32).reshape(n, n)
        assert np.allclose(got, a @ b, atol=1e-2)


def test_54_workspace() -> None:
    a = with_spectrum(SPECTRA["power law"](40))
    want = linalg.matrix_power(a, -0.5)
    with linalg.Handle(threads=1) as handle:
        handle.begin_query()
        linalg.matrix_power(a, -0.5, handle=handle)
        need = handle.end_query()
        memory = linalg.zeros((need,), "uint8")
        handle.set_workspace(memory)
        assert np.array_equal(linalg.matrix_power(a, -0.5, handle=handle), want)
        handle.set_workspace(linalg.zeros((need - 64,), "uint8"))
        with pytest.raises(libdc.Error, match="the workspace has"):
            linalg.matrix_power(a, -0.5, handle=handle)
        handle.set_workspace()
        assert np.array_equal(linalg.matrix_power(a, -0.5, handle=handle), want)
    with pytest.raises(libdc.Error, match="closed"):
        linalg.matrix_power(a, -0.5, handle=handle)


def test_50_devices() -> None:
    assert not linalg.is_cuda_available() and linalg.device_count() == 0 and linalg.device_count("cpu") == 1
    name, reason = linalg.get_optimal_device()
    assert name == "cpu" and reason
    memory = linalg.device_memory()
    assert 0 < memory["free"] <= memory["total"] and 0 <= memory["reserved"] <= memory["peak"]


def in_libdc(array: np.ndarray) -> Any:
    tensor = linalg.zeros(array.shape, array.dtype.name)
    np.asarray(tensor)[:] = array
    return tensor


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("put", [np.asarray, in_libdc])
def test_a_failed_matrix_of_a_batch_has_nan(dtype: Any, put: Any) -> None:
    batch = np.stack([np.eye(64), np.full((64, 64), np.inf)]).astype(dtype)
    for call in (linalg.eigh, lambda a, info: linalg.matrix_power(a, -0.5, info=info),
                 lambda a, info: linalg.inverse_root(a, 2, info=info),
                 lambda a, info: linalg.inverse_root_newton(a, 2, eps_abs=1e-3, info=info)):
        info: List[Any] = []
        results = call(put(batch), info=info)
        for result in results if isinstance(results, tuple) else (results,):
            for report, part in zip(info, np.asarray(result)):
                assert np.isfinite(part).all() if report.ok else np.isnan(part).all()
        assert [report.ok for report in info] == [True, False]
