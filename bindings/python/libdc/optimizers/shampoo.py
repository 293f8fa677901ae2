"""Shampoo, preconditioned by the roots of what gradients have been, and SOAP, Adam in the basis of their
eigenvectors."""

from __future__ import annotations

from typing import Any, Optional

from .._lib import lib
from ..arguments import one_of
from ..comm import Comm
from ..linalg.handle import Handle
from .handle import Optimizer


class Blocked(Optimizer):
    """comm: the ranks that have parts of the parameters; each of them then makes the same calls."""

    def __init__(self, lr: float = 1e-3, comm: Optional[Comm] = None, handle: Optional[Handle] = None,
                 **options: Any) -> None:
        self._comm = one_of("comm", comm, Comm)
        super().__init__(lr, handle, **options)


class Shampoo(Blocked):
    """Options: beta1, beta2, eps_abs, eps_rel, tolerance, graft_beta2, graft_eps, weight_decay, momentum, max_block,
    merge_below, precondition_frequency, start_preconditioning_step, root, graft, decay, nesterov, tolerated_failures;
    see dc_shampoo_options. comm: the ranks that have parts of the parameters; each of them then makes the same
    calls."""

    _options = "dc_shampoo_options"
    _none = ("beta1", "eps_abs", "eps_rel", "merge_below", "tolerated_failures")
    _above = ("beta2", "graft_beta2", "graft_eps", "max_block", "precondition_frequency")

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        return int(lib.dc_shampoo_create(linalg, self._comm, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_shampoo_set_group(self._handle, group, options))


class SOAP(Blocked):
    """Options: beta1, beta2, shampoo_beta, eps, weight_decay, max_block, merge_below, max_precond_dim,
    precondition_frequency, tolerated_failures; see dc_soap_options. comm as in Shampoo."""

    _options = "dc_soap_options"
    _none = ("beta1", "beta2", "shampoo_beta", "eps", "max_precond_dim", "tolerated_failures")
    _above = ("precondition_frequency",)

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        return int(lib.dc_soap_create(linalg, self._comm, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_soap_set_group(self._handle, group, options))
