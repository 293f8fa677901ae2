"""Muon on plain models and on those of libdc.torch.shard()."""

from __future__ import annotations

from typing import Any, Dict, Optional

from libdc import optimizers
from libdc.types import DType

from .shampoo import Blocked, number

_POLYNOMIALS = {"express": 0, "muon": 1}
_ADJUSTS = {"original": 0, "match_rms_adamw": 1, "none": 2}
_PRECISIONS = {"float32": int(DType.FLOAT32), "bfloat16": int(DType.BFLOAT16)}


class Muon(Blocked):
    """Muon (Jordan et al. 2024), for the matrices of a network's hidden layers; embeddings, the last layer, biases and
    gains are AdamW's. A parameter of more than two dimensions is a matrix [d0, rest]. num_splits: so many matrices lie
    one below the other in each parameter of the group, such as 3 in a fused query, key and value. precision is
    that of the products, "bfloat16", as torch.optim.Muon has it, or "float32"; polynomial="muon" is torch.optim.Muon's;
    see dc_muon_options for the rest."""

    _kind = optimizers.Muon

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
                 nesterov: bool = True, *, eps: float = 1e-7, ns_steps: int = 5, adjust_lr_fn: Optional[str] = None,
                 polynomial: str = "express", precision: str = "bfloat16", num_splits: int = 1) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, eps=eps,
                                      ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, polynomial=polynomial,
                                      precision=precision, num_splits=num_splits))

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        options = {name: group[name] for name in ("weight_decay", "momentum", "nesterov", "eps", "num_splits")}
        return {**options, "steps": group["ns_steps"],
                "polynomial": number(self._name(), _POLYNOMIALS, "polynomial", group["polynomial"]),
                "precision": number(self._name(), _PRECISIONS, "precision", group["precision"]),
                "adjust": number(self._name(), _ADJUSTS, "adjust_lr_fn", group["adjust_lr_fn"] or "original")}
