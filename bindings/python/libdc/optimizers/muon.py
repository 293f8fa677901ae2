"""Muon, momentum made orthogonal."""

from __future__ import annotations

from typing import Any

from .._lib import lib
from .shampoo import Blocked


class Muon(Blocked):
    """Options: momentum, eps, weight_decay, num_splits, polynomial, steps, precision, adjust, nesterov; see
    dc_muon_options. comm: the ranks that have parts of the parameters; each of them then makes the same calls."""

    _options = "dc_muon_options"
    _none = ("momentum", "nesterov")
    _above = ("eps", "num_splits", "steps")

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        self._host_counts = self._comm is not None
        return int(lib.dc_muon_create(linalg, self._comm, options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_muon_set_group(self._handle, group, options))
