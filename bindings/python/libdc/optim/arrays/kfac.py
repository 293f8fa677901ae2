"""K-FAC on arrays: layers name their parameters, and get each batch's inputs and output gradients before a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ..._lib import ffi, lib
from ...arguments import c_double, c_int64, choice, handle_arg
from ...comm import Comm
from ...errors import check
from ...linalg.handle import Array, Handle
from ...linalg.samples import SampleLayer
from .handle import Optimizer
from .options import KFACOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_INVERSES = {"eigen": 0, "factored": 1}
_APPROXIMATIONS = {"expand": 0, "reduce": 1}


class KFAC(Optimizer):
    """Options: decay, damping, kl_clip (0 or None: no clip), momentum, weight_decay, factor_frequency,
    refresh_frequency, inverse ("eigen" or "factored"), nesterov, tolerated_failures; see dc_kfac_options. comm: the
    ranks among which layers are distributed, and which have parts of the parameters."""

    _struct_name = "dc_kfac_options"
    _zero_allowed = ("decay", "kl_clip", "momentum", "tolerated_failures")
    _positive_only = ("damping", "factor_frequency", "refresh_frequency")

    def __init__(self, lr: float = 1e-3, handle: Optional[Handle] = None, *, comm: Any = None,
                 **options: Unpack[KFACOptions]) -> None:
        self.comm = comm
        super().__init__(lr, handle, **options)

    if TYPE_CHECKING:

        def set_group(self, group: int, **options: Unpack[KFACOptions]) -> None: ...  # type: ignore[override]

    def _options_struct(self, options: Any) -> Any:
        known = dict(options)
        known["inverse"] = choice("inverse", known.get("inverse", "eigen"), _INVERSES)
        known["kl_clip"] = 0 if known.get("kl_clip", 1e-3) is None else known.get("kl_clip", 1e-3)
        return super()._options_struct(known)

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        return int(lib.dc_kfac_create(linalg, handle_arg("comm", self.comm, Comm), options, out))

    def _set_group(self, group: int, options: Any) -> int:
        return int(lib.dc_kfac_set_group(self._handle, group, options))

    def add_layer(self, layer: SampleLayer, weight: int, bias: Optional[int] = None,
                  approximation: str = "expand") -> int:
        """Adds a layer of kind "linear" or "conv", with the indices of its parameters. Returns the layer's index."""
        bias_index = -1 if bias is None else c_int64("add_layer: bias", bias)
        if bias is not None and bias_index < 0:
            raise ValueError(f"add_layer: bias = {bias}, must be a parameter's index, or None")
        index, constants = ffi.new("int64_t *"), layer.c()
        number = choice("approximation", approximation, _APPROXIMATIONS)
        check(lib.dc_kfac_add_layer(self._handle, constants, number, c_int64("add_layer: weight", weight),
                                    bias_index, index))
        return int(index[0])

    def accumulate(self, layer: int, x: Any, delta: Any, loss_scale: float) -> None:
        """Adds a batch's inputs and output gradients to the sums from which the next step updates the layer's factors.
        Both are arrays on the handle's device."""
        inputs, deltas = Array(x, "x", self._linalg), Array(delta, "delta", self._linalg)
        check(lib.dc_kfac_accumulate(self._handle, c_int64("accumulate: layer", layer), inputs.c, deltas.c,
                                     c_double("accumulate: loss_scale", loss_scale)))
