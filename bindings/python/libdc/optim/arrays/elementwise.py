"""Optimizers that update each element by itself: AdamW and SGD."""

from __future__ import annotations

from typing import Any

from ..._lib import lib
from .handle import Optimizer


class AdamW(Optimizer):
    """Options: beta1, beta2, eps, weight_decay, amsgrad, maximize, check_finite; see dc_adamw_options."""

    _struct_name = "dc_adamw_options"
    _counts_on_host = False
    _zero_allowed = ("beta1", "beta2", "eps")

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        return int(lib.dc_adamw_create(linalg, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_adamw_set_group(self._handle, group, options))


class SGD(Optimizer):
    """Options: momentum, dampening, weight_decay, nesterov, maximize, check_finite; see dc_sgd_options."""

    _struct_name = "dc_sgd_options"
    _counts_on_host = False

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        return int(lib.dc_sgd_create(linalg, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_sgd_set_group(self._handle, group, options))
