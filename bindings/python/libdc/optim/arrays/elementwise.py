"""Optimizers that update each element by itself: AdamW and SGD."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ..._lib import lib
from ...linalg.handle import Handle
from .handle import Optimizer
from .options import AdamWOptions, SGDOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AdamW(Optimizer):
    """Options: beta1, beta2, eps, weight_decay, amsgrad, maximize, check_finite; see dc_adamw_options."""

    if TYPE_CHECKING:  # declares the options by name

        def __init__(self, lr: float = 1e-3, handle: Optional[Handle] = None,
                     **options: Unpack[AdamWOptions]) -> None: ...

        def set_group(self, group: int, **options: Unpack[AdamWOptions]) -> None: ...  # type: ignore[override]

    _struct_name = "dc_adamw_options"
    _counts_on_host = False
    _zero_allowed = ("beta1", "beta2", "eps")

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        return int(lib.dc_adamw_create(linalg, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_adamw_set_group(self._handle, group, options))


class SGD(Optimizer):
    """Options: momentum, dampening, weight_decay, nesterov, maximize, check_finite; see dc_sgd_options."""

    if TYPE_CHECKING:  # declares the options by name

        def __init__(self, lr: float = 1e-3, handle: Optional[Handle] = None,
                     **options: Unpack[SGDOptions]) -> None: ...

        def set_group(self, group: int, **options: Unpack[SGDOptions]) -> None: ...  # type: ignore[override]

    _struct_name = "dc_sgd_options"
    _counts_on_host = False

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        return int(lib.dc_sgd_create(linalg, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_sgd_set_group(self._handle, group, options))
