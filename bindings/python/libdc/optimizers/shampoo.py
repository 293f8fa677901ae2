"""Shampoo: preconditioned by the roots of what gradients have been."""

from __future__ import annotations

from typing import Any, Optional

from .._lib import ffi, lib
from ..comm import Comm
from ..linalg.handle import Handle
from .handle import Optimizer


class Shampoo(Optimizer):
    """Options: beta1, beta2, eps_abs, eps_rel, tolerance, graft_beta2, graft_eps, weight_decay, momentum, max_block,
    merge_below, precondition_frequency, start_preconditioning_step, root, graft, decay, nesterov, tolerated_failures;
    see dc_shampoo_options. comm: the ranks that have parts of the parameters; each of them then makes the same calls."""

    _options = "dc_shampoo_options"
    _none = ("beta1", "eps_abs", "eps_rel", "tolerance", "merge_below", "tolerated_failures")

    def __init__(self, lr: float = 1e-3, comm: Optional[Comm] = None, handle: Optional[Handle] = None,
                 **options: Any) -> None:
        self._comm = comm
        super().__init__(lr, handle, **options)

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        comm = ffi.NULL if self._comm is None else self._comm._handle
        return int(lib.dc_shampoo_create(linalg, comm, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_shampoo_set_group(self._handle, group, options))
