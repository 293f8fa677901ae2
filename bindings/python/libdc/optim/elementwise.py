"""AdamW and SGD, with the names and arguments of torch.optim's."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from libdc.arguments import flag
from torch import Tensor

from . import arrays
from .native import NativeOptimizer, betas_of
from .param_shard import ParamShard


class Elementwise(NativeOptimizer):
    """An optimizer that runs on the CPU, or on one CUDA device."""

    _devices = ("cpu", "cuda")

    def _is_remade(self, groups: List[Dict[str, Any]]) -> bool:
        return True

    def _flags(self, group: Dict[str, Any], *names: str) -> Dict[str, bool]:
        return {name: flag(f"{self._name()}: {name}", group[name]) for name in names}


class AdamW(Elementwise):
    """torch.optim.AdamW in one pass over memory, on all of PyTorch's threads; an element's result does not depend on
    its position, so all ZeRO stages give equal bits. 16-bit weights have a float32 copy in the state ("master").
    check_finite: a step with a gradient that is not finite changes nothing. On the CPU it raises libdc.Error. On a CUDA
    device, where a step waits for nothing and may be captured into a graph, `skipped_steps` counts it."""

    _native_class = arrays.AdamW

    def __init__(self, params: Any, lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
                 check_finite: bool = False) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
                                      maximize=maximize, check_finite=check_finite))

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        return {**betas_of(group), "eps": float(group["eps"]), "weight_decay": float(group["weight_decay"]),
                **self._flags(group, "amsgrad", "maximize", "check_finite")}


class SGD(Elementwise):
    """torch.optim.SGD, computed as AdamW is."""

    _native_class = arrays.SGD
    _optional_state = ("master", "momentum_buffer")

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False,
                 check_finite: bool = False) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                                      nesterov=nesterov, maximize=maximize, check_finite=check_finite))

    def _from_torch_state(self, state: Dict[str, Any], part: ParamShard, group: Dict[str, Any],
                  views: Dict[str, Tensor]) -> Dict[str, Any]:
        """PyTorch's SGD does not count steps. In the library the first step sets the momentum, so its presence means
        step 1."""
        has_momentum = "momentum_buffer" in state
        if "momentum_buffer" in views and not has_momentum:
            return {**state, "step": 0}
        return {"step": int(has_momentum), **state}

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        flags = self._flags(group, "nesterov", "maximize", "check_finite")
        if flags["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        return {"momentum": float(group["momentum"]), "dampening": group["dampening"],
                "weight_decay": float(group["weight_decay"]), **flags}
