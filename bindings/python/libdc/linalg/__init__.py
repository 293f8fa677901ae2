"""Second-order operators on arrays of any library: NumPy, PyTorch, or any with DLPack or the buffer protocol.

Results have the first array's kind: NumPy arrays for NumPy, tensors for PyTorch, libdc.Tensor otherwise, unless
`out` is given. They have no graph, so a tensor that requires grad is refused unless torch.no_grad() is on.
Chapter 13 of dc_api.h says what each function computes and which errors it has."""

from .devices import device_count, device_memory, get_optimal_device, is_cuda_available, zeros
from .handle import Handle, default
from .products import FileMatrix, kron, kron_apply, kron_nearest, kron_solve, matmul, matmul_bounded
from .samples import SampleLayer, clip_factors, clipped_grad_sum, per_sample_grads, per_sample_norms
from .spectral import (IterationInfo, SpectralInfo, SpectralPath, eigh, inverse_root, inverse_root_newton, matrix_power,
                       orthogonalize)

__all__ = [
    "FileMatrix", "Handle", "IterationInfo", "SampleLayer", "SpectralInfo", "SpectralPath", "clip_factors",
    "clipped_grad_sum", "default", "device_count", "device_memory", "eigh", "get_optimal_device", "inverse_root",
    "inverse_root_newton", "is_cuda_available", "kron", "kron_apply", "kron_nearest", "kron_solve", "matmul",
    "matmul_bounded", "matrix_power", "orthogonalize", "per_sample_grads", "per_sample_norms", "zeros",
]  # fmt: skip
