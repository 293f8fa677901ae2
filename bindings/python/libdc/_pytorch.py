"""Imported first by the packages for PyTorch: libdc.torch, libdc.optim and libdc.torchium. Without PyTorch, an
ImportError names the package to install."""

try:
    import torch as torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "libdc.torch, libdc.optim and libdc.torchium need PyTorch 2.11 or later, and there is none here: pip install "
        "'torch>=2.11'. Without it there are libdc, libdc.optim.arrays, libdc.linalg and libdc.transformer",
        name="torch") from None
