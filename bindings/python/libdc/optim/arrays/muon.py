"""Muon, momentum made orthogonal."""

from __future__ import annotations

from typing import Any

from ..._lib import lib
from .shampoo import Blockwise


class Muon(Blockwise):
    """Options: momentum, eps, weight_decay, num_splits, polynomial, steps, precision, adjust, nesterov; see
    dc_muon_options. comm: the ranks that have parts of the parameters; each of them then makes the same calls."""

    _struct_name = "dc_muon_options"
    _zero_allowed = ("momentum", "nesterov")
    _positive_only = ("eps", "num_splits", "steps")

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        self._counts_on_host = self._comm is not None
        return int(lib.dc_muon_create(linalg, self._comm, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_muon_set_group(self._handle, group, options))
