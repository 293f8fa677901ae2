"""Muon: momentum, orthogonalised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ..._lib import lib
from ...comm import Comm
from ...linalg.handle import Handle
from .options import MuonOptions
from .shampoo import Blockwise

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Muon(Blockwise):
    """Options: momentum, eps, weight_decay, num_splits, polynomial, steps, precision, adjust, nesterov; see
    dc_muon_options. comm: the ranks that have parts of the parameters; each of them then makes the same calls."""

    if TYPE_CHECKING:  # declares the options by name

        def __init__(self, lr: float = 1e-3, comm: Optional[Comm] = None, handle: Optional[Handle] = None,
                     **options: Unpack[MuonOptions]) -> None: ...

        def set_group(self, group: int, **options: Unpack[MuonOptions]) -> None: ...  # type: ignore[override]

    _struct_name = "dc_muon_options"
    _zero_allowed = ("momentum", "nesterov")
    _positive_only = ("eps", "num_splits", "steps")

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        self._counts_on_host = self._comm is not None
        return int(lib.dc_muon_create(linalg, self._comm, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_muon_set_group(self._handle, group, options))
