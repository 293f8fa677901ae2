"""libdc's optimizers as torch.optim.Optimizer: on plain models and on those of libdc.torch.shard(). See
docs/optimizers.md. PyTorch is imported when the first of them is used. libdc.optim.arrays, for arrays of any library,
does not need it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .elementwise import SGD, AdamW
    from .kfac import KFAC, sampled_cross_entropy, sampled_mse_loss
    from .muon import Muon
    from .shampoo import SOAP, Shampoo

_MODULES = {"AdamW": "elementwise", "KFAC": "kfac", "Muon": "muon", "SGD": "elementwise", "SOAP": "shampoo",
            "Shampoo": "shampoo", "sampled_cross_entropy": "kfac", "sampled_mse_loss": "kfac"}  # fmt: skip

__all__ = ["KFAC", "AdamW", "Muon", "SGD", "SOAP", "Shampoo", "sampled_cross_entropy", "sampled_mse_loss"]


# Hidden from type checkers, which would otherwise accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'libdc.optim' has no attribute {name!r}")
        from .. import _pytorch  # noqa: F401  # says what to install where there is no PyTorch

        value = globals()[name] = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        return value
