"""Shampoo, which preconditions by inverse roots of accumulated gradient factors, and SOAP, Adam in those factors'
eigenbasis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ..._lib import lib
from ...arguments import handle_arg
from ...comm import Comm
from ...linalg.handle import Handle
from .handle import Optimizer
from .options import ShampooOptions, SOAPOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Blockwise(Optimizer):
    """comm: the ranks that have parts of the parameters; each of them then makes the same calls."""

    def __init__(self, lr: float = 1e-3, comm: Optional[Comm] = None, handle: Optional[Handle] = None,
                 **options: Any) -> None:
        self._comm = handle_arg("comm", comm, Comm)
        super().__init__(lr, handle, **options)


class Shampoo(Blockwise):
    """Options: beta1, beta2, eps_abs, eps_rel, tolerance, graft_beta2, graft_eps, weight_decay, momentum, max_block,
    merge_below, precondition_frequency, start_preconditioning_step, root, graft, decay, nesterov, tolerated_failures;
    see dc_shampoo_options. comm: the ranks that have parts of the parameters; each of them then makes the same
    calls."""

    if TYPE_CHECKING:  # declares the options by name

        def __init__(self, lr: float = 1e-3, comm: Optional[Comm] = None, handle: Optional[Handle] = None,
                     **options: Unpack[ShampooOptions]) -> None: ...

        def set_group(self, group: int, **options: Unpack[ShampooOptions]) -> None: ...  # type: ignore[override]

    _struct_name = "dc_shampoo_options"
    _zero_allowed = ("beta1", "eps_abs", "eps_rel", "merge_below", "tolerated_failures")
    _positive_only = ("beta2", "graft_beta2", "graft_eps", "max_block", "precondition_frequency")

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        return int(lib.dc_shampoo_create(linalg, self._comm, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_shampoo_set_group(self._handle, group, options))


class SOAP(Blockwise):
    """Options: beta1, beta2, shampoo_beta, eps, weight_decay, max_block, merge_below, max_precond_dim,
    precondition_frequency, tolerated_failures; see dc_soap_options. comm as in Shampoo."""

    if TYPE_CHECKING:  # declares the options by name

        def __init__(self, lr: float = 1e-3, comm: Optional[Comm] = None, handle: Optional[Handle] = None,
                     **options: Unpack[SOAPOptions]) -> None: ...

        def set_group(self, group: int, **options: Unpack[SOAPOptions]) -> None: ...  # type: ignore[override]

    _struct_name = "dc_soap_options"
    _zero_allowed = ("beta1", "beta2", "shampoo_beta", "eps", "max_precond_dim", "tolerated_failures")
    _positive_only = ("precondition_frequency",)

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        return int(lib.dc_soap_create(linalg, self._comm, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_soap_set_group(self._handle, group, options))
