"""libdc.torchium: the documentation page's code after changing one import, and each defect of Torchium (its version
0.1.5) as a test that passes here."""

from __future__ import annotations

from typing import Any, List

import libdc
import numpy as np
import pytest
import torch
from libdc import linalg
from libdc.torchium import (CUDAGradientOps, CUDAMatrixOps, CUDAMemoryOps, cuda_memory_info, get_cuda_device_count,
                            get_optimal_device, is_cuda_available)
from torch import nn

power = CUDAMatrixOps.matrix_sqrt_inv_eigen


def spd(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    g = torch.randn(n, 2 * n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (g @ g.T / n).to(dtype)


def loop(model: nn.Module, loss_fn: Any, inputs: torch.Tensor, targets: torch.Tensor) -> List[torch.Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(loss_fn(model(inputs[i : i + 1]), targets[i : i + 1]), parameters, allow_unused=True)
            for i in range(len(inputs))]
    return [torch.stack([row[k] if row[k] is not None else torch.zeros_like(p) for row in rows])
            for k, p in enumerate(parameters)]


# ---- the page ----


def test_the_pages_calls() -> None:
    device = get_optimal_device()
    G = torch.randn(100, 100, device=device)
    G = G @ G.t()
    root = power(G, power=-0.25, eps=1e-8)
    values, vectors = torch.linalg.eigh(G.double())
    want = (vectors * (values.clamp_min(0) + 1e-8) ** -0.25) @ vectors.T
    assert (root - want).norm() < 1e-4 * want.norm()
    A, B = torch.randn(5, 5, device=device), torch.randn(7, 7, device=device)
    assert torch.equal(CUDAMatrixOps.kronecker_product_approx(A, B), torch.kron(A, B))
    A, B = torch.randn(300, 200, device=device), torch.randn(200, 300, device=device)
    assert torch.allclose(CUDAMemoryOps.memory_efficient_matmul(A, B), A @ B, atol=1e-4)
    A, B = torch.randn(4, 3, 5), torch.randn(4, 5, 2)
    assert torch.allclose(CUDAMatrixOps.batch_matrix_multiply(A, B), A @ B, atol=1e-5)
    info = cuda_memory_info()
    print(f"{info['total_memory'] / 1e9:.2f} {info['allocated_memory'] / 1e9:.2f} {info['free_memory'] / 1e9:.2f}")


def test_the_pages_optimizer() -> None:
    class CUDAShampoo(torch.optim.Optimizer):  # as on the page, but for the step between refreshes
        def __init__(self, params: Any, lr: float = 0.03, eps: float = 1e-4, update_freq: int = 100) -> None:
            super().__init__(params, dict(lr=lr, eps=eps, update_freq=update_freq))

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    grad, state = p.grad.data, self.state[p]
                    if len(state) == 0:
                        state["step"] = 0
                        for name, n in (("G_l", p.shape[0]), ("G_r", p.shape[1])):
                            state[name] = CUDAMemoryOps.efficient_tensor_creation((n, n), p.device, p.dtype)
                    state["step"] += 1
                    state["G_l"].add_(torch.mm(grad, grad.t()))
                    state["G_r"].add_(torch.mm(grad.t(), grad))
                    direction = grad
                    if state["step"] % group["update_freq"] == 0:
                        left = power(state["G_l"], power=-0.25, eps=group["eps"])
                        right = power(state["G_r"], power=-0.25, eps=group["eps"])
                        direction = CUDAMemoryOps.memory_efficient_matmul(
                            CUDAMemoryOps.memory_efficient_matmul(left, grad), right)
                    p.data.add_(direction, alpha=-group["lr"])

    weight = nn.Parameter(torch.eye(6, 4))
    optimizer = CUDAShampoo([weight], lr=0.3, update_freq=1)
    target = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(200):
        loss = (weight - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


# ---- matrix powers (1.1) ----


@pytest.mark.parametrize("shape", [(2, 3), (3,), (2, 3, 4)])
def test_shapes_that_are_no_square_matrices_are_named(shape: Any) -> None:
    with pytest.raises(libdc.Error, match="must be square|must have 2"):
        power(torch.ones(shape))


def test_batches_are_taken() -> None:
    both = torch.stack([spd(5, 1), spd(5, 2)])
    assert torch.equal(power(both)[1], power(both[1]))


def test_what_is_not_symmetric_is_refused_and_both_triangles_are_looked_at() -> None:
    a = spd(4)
    a[0, 3] += 1
    with pytest.raises(libdc.Error, match="not symmetric"):
        power(a)
    for value in (float("nan"), float("inf")):
        for place in ((0, 3), (3, 0), (2, 2)):
            bad = spd(4)
            bad[place] = value
            with pytest.raises(libdc.Error, match=rf"\[{place[0]}, {place[1]}\]") as caught:
                power(bad)
            assert caught.value.name == "DC_E_NOT_FINITE"


def test_negative_matrices_are_refused_not_made_the_largest() -> None:
    with pytest.raises(libdc.Error, match="negative eigenvalue -1"):
        power(-torch.eye(3))


def test_zero_with_no_epsilon_is_an_error_not_nan() -> None:
    assert torch.allclose(power(torch.zeros(3, 3)), 100 * torch.eye(3))
    with pytest.raises(libdc.Error, match="zero"):
        power(torch.zeros(3, 3), eps=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_types_are_taken(dtype: torch.dtype) -> None:
    result = power(torch.eye(3, dtype=dtype) * 16)
    assert result.dtype is dtype and torch.allclose(result.float(), 0.5 * torch.eye(3))


def test_integers_are_refused() -> None:
    with pytest.raises(libdc.Error, match="int64, must be float32 or float64"):
        power(torch.eye(3, dtype=torch.int64))


def test_complex_numbers_are_refused_and_empty_matrices_taken() -> None:
    with pytest.raises((TypeError, ValueError, libdc.Error), match="(?i)complex|type"):
        power(torch.eye(3, dtype=torch.complex64))
    assert power(torch.zeros(0, 0)).shape == (0, 0)


def test_a_stack_of_gradients_leaves_autograd_alone() -> None:
    """The page's PerSampleGradFunction gives a stack where autograd adds it up, and none to bias and input."""
    layer, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
    weight, bias = CUDAGradientOps.per_sample_gradients(layer, nn.MSELoss(reduction="sum"), x.detach(),
                                                        torch.zeros(5, 3))
    layer(x).square().sum().backward()
    assert weight.shape == (5, 3, 4) and bias.shape == (5, 3) and x.grad is not None and x.grad.any()
    assert torch.allclose(weight.sum(0), layer.weight.grad, atol=1e-5)
    assert torch.allclose(bias.sum(0), layer.bias.grad, atol=1e-5)


def test_a_relative_epsilon_is_there() -> None:
    tiny = torch.eye(3, dtype=torch.float64) * 1e-30
    assert torch.allclose(linalg.matrix_power(tiny, -0.25, eps_rel=1e-6), 1e-30**-0.25 * torch.eye(3).double())


def test_it_is_a_matrix_power_not_one_of_the_entries() -> None:
    a = torch.tensor([[2.0, -1.0], [-1.0, 2.0]], dtype=torch.float64)
    half = power(a, power=0.5, eps=0.0)
    assert torch.allclose(half @ half, a)
    assert not torch.isnan(half).any()


# ---- gradients per sample (1.1, 1.3) ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 3, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(x))
        x = self.relu(self.one(self.relu(self.one(x))))  # one layer twice, and changed in place
        return self.two(x.mean(1))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.ReLU(inplace=True),
                         nn.Conv2d(4, 3, (2, 4), padding="same", dilation=(1, 2)), nn.Flatten(), nn.Linear(27, 3))


def bag(mode: str) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(11, 6, mode=mode, padding_idx=0), nn.RMSNorm(6), nn.Linear(6, 3))


def norms() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.InstanceNorm2d(4, affine=True),
                         nn.Flatten(), nn.Linear(48, 3))


# second-order: 30, 32, 33, 34, 35, 36, 38
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["linear", "net", "conv", "bag_sum", "bag_mean", "norms"])
def test_gradients_are_those_of_a_loop(kind: str, reduction: str) -> None:
    torch.manual_seed(0)
    model = {"linear": lambda: nn.Linear(4, 3), "net": Net, "conv": conv, "bag_sum": lambda: bag("sum"),
             "bag_mean": lambda: bag("mean"), "norms": norms}[kind]().double()
    images, words = torch.randn(5, 2, 5, 6).double(), torch.randint(0, 11, (5, 7))
    inputs = {"linear": torch.randn(5, 4).double(), "conv": images, "norms": images}.get(kind, words)
    targets = torch.randint(0, 3, (5,))
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)  # what an earlier step left must not be seen, nor changed
    got = CUDAGradientOps.per_sample_gradients(model, loss_fn, inputs, targets)
    for a, b, p in zip(got, loop(model, loss_fn, inputs, targets), model.parameters()):
        assert a.shape == (5, *p.shape) and torch.allclose(a, b, atol=1e-12)
        assert torch.equal(p.grad, torch.full_like(p, 7.0))
    mean = torch.autograd.grad(loss_fn(model(inputs), targets), list(model.parameters()))
    for a, b in zip(got, mean):
        assert torch.allclose(a.mean(0) if reduction == "mean" else a.sum(0), b, atol=1e-12)


def test_other_parameters_and_frozen_ones() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.linear(x)

    model, x, y = Scaled(), torch.randn(5, 4), torch.randn(5, 3)
    got = CUDAGradientOps.per_sample_gradients(model, nn.MSELoss(), x, y)
    for a, b in zip(got, loop(model, nn.MSELoss(), x, y)):
        assert torch.allclose(a, b, atol=1e-6)
    linear = nn.Linear(4, 3)
    linear.weight.requires_grad_(False)
    (bias,) = CUDAGradientOps.per_sample_gradients(linear, nn.MSELoss(), x, y)
    assert torch.allclose(bias, loop(linear, nn.MSELoss(), x, y)[0], atol=1e-6)


def test_empty_batches_and_batch_norm() -> None:
    got = CUDAGradientOps.per_sample_gradients(nn.Linear(4, 3), nn.MSELoss(), torch.zeros(0, 4), torch.zeros(0, 3))
    assert [tuple(g.shape) for g in got] == [(0, 3, 4), (0, 3)]
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="mixes samples"):
        CUDAGradientOps.per_sample_gradients(model, nn.MSELoss(), torch.zeros(2, 4), torch.zeros(2, 3))


# second-order: 34
def test_bags_with_offsets_or_weights_are_refused_by_name() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(11, 3, mode="sum")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bag(x, per_sample_weights=torch.full(x.shape, 2.0))

    with pytest.raises(ValueError, match="EmbeddingBag"):
        CUDAGradientOps.per_sample_gradients(Weighted(), nn.MSELoss(), torch.ones(2, 4).long(), torch.zeros(2, 3))


# ---- memory and devices (1.1) ----


def test_tensors_are_zero_and_aligned_and_the_device_may_be_a_word() -> None:
    for device in ("cpu", torch.device("cpu")):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            t = CUDAMemoryOps.efficient_tensor_creation((17, 3), device=device, dtype=dtype)
            assert t.shape == (17, 3) and t.dtype is dtype and not t.any() and t.data_ptr() % 256 == 0


def test_a_budget_is_kept_or_refused(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    files = []
    for name, shape in (("a", (120, 150)), ("b", (150, 90))):
        array = np.memmap(tmp_path / name, np.float32, "w+", shape=shape)
        array[:] = rng.standard_normal(shape)
        array.flush()
        files.append(array)
    want = np.asarray(files[0]) @ np.asarray(files[1])
    result = CUDAMemoryOps.memory_efficient_matmul(*files, budget_bytes=40_000)
    assert isinstance(result, np.ndarray) and np.allclose(result, want, atol=1e-4)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(120, 90))
    CUDAMemoryOps.memory_efficient_matmul(*files, budget_bytes=40_000, out=out)
    assert np.allclose(out, want, atol=1e-4)
    tensors = [torch.from_numpy(np.array(file)) for file in files]
    for given in (out, linalg.FileMatrix(tmp_path / "out", (120, 90)), torch.zeros(120, 90)):
        out[:] = 0
        assert CUDAMemoryOps.memory_efficient_matmul(*tensors, budget_bytes=40_000, out=given) is given
        assert np.allclose(given if isinstance(given, torch.Tensor) else out, want, atol=1e-4)
    with pytest.raises(libdc.Error, match="must be >= 1"):
        CUDAMemoryOps.memory_efficient_matmul(*files, budget_bytes=0)
    with pytest.raises(libdc.Error, match="budget_bytes = 10, must be") as caught:
        CUDAMemoryOps.memory_efficient_matmul(*files, budget_bytes=10)
    CUDAMemoryOps.memory_efficient_matmul(*files, budget_bytes=caught.value.needed)  # type: ignore[attr-defined]
    with pytest.raises(libdc.Error, match="b has 3 rows, must have 2"):
        CUDAMemoryOps.memory_efficient_matmul(torch.ones(4, 2), torch.ones(3, 4))


def test_all_keys_on_every_machine() -> None:
    assert is_cuda_available() is False and get_cuda_device_count() == 0
    assert get_optimal_device() == torch.device("cpu")
    info = cuda_memory_info()
    assert {"available", "device", "total_memory", "allocated_memory", "cached_memory", "free_memory"} <= set(info)
    assert 0 < info["free_memory"] <= info["total_memory"]


# second-order: 19
def test_nothing_depends_on_pytorchs_precision_or_threads() -> None:
    a = torch.randn(3, 64, 64)
    a = a @ a.mT
    x, results = torch.randn(64, 48), []
    before = torch.get_float32_matmul_precision()
    for precision, threads in (("highest", 2), ("medium", 1)):
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        results.append((power(a), linalg.matmul(a, x), linalg.inverse_root_newton(a, 4, eps_rel=1e-3)))
        assert torch.get_float32_matmul_precision() == precision and torch.get_num_threads() == threads
    torch.set_float32_matmul_precision(before)
    assert all(torch.equal(one, other) for one, other in zip(*results))


# second-order: 51
def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    power(spd(4))
    CUDAGradientOps.per_sample_gradients(nn.Linear(4, 3), nn.MSELoss(), torch.ones(2, 4), torch.ones(2, 3))
    assert capfd.readouterr() == ("", "")
