"""Muon on plain models and on those of libdc.torch.shard()."""

from __future__ import annotations

from typing import Any, Dict, Optional

from libdc.arguments import choice
from libdc.types import DType
from torch import Tensor

from . import arrays
from .param_shard import ParamShard, on_elements
from .shampoo import Blockwise

_TORCH_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_POLYNOMIALS = {"express": 0, "muon": 1}
_ADJUSTS = {"original": 0, "match_rms_adamw": 1, "none": 2}
_PRECISIONS = {"float32": int(DType.FLOAT32), "bfloat16": int(DType.BFLOAT16)}


class Muon(Blockwise):
    """Muon (Jordan et al. 2024), for the matrices of a network's hidden layers; embeddings, the last layer, biases and
    gains are AdamW's. A parameter of more than two dimensions is a matrix [d0, rest]. num_splits: the number of
    matrices that are stacked by rows in each parameter of the group, such as 3 in a fused query, key and value.
    precision of the products: "bfloat16", as in torch.optim.Muon, or "float32"; polynomial="muon" is
    torch.optim.Muon's; see dc_muon_options for the rest."""

    _native_class = arrays.Muon
    _negative_errors = {"lr": "Learning rate should be >= 0 but is", "momentum": "momentum should be >= 0 but is",
                        "weight_decay": "weight decay should be >= 0 but is"}

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
                 nesterov: bool = True, *, eps: float = 1e-7, ns_steps: int = 5, adjust_lr_fn: Optional[str] = None,
                 polynomial: str = "express", precision: str = "bfloat16", num_splits: int = 1) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, eps=eps,
                                      ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, polynomial=polynomial,
                                      precision=precision, num_splits=num_splits))

    def _from_torch_state(self, state: Dict[str, Any], part: ParamShard, group: Dict[str, Any],
                  views: Dict[str, Tensor]) -> Dict[str, Any]:
        """PyTorch keeps a mean of gradients, where the library keeps their sum, and it does not count steps."""
        if "momentum_buffer" not in state or state["momentum_buffer"].shape != part.param.shape:
            return state
        matrices = (state["momentum_buffer"].flatten(1) / (1 - group["momentum"])).chunk(group["num_splits"])
        pieces = [name for name in views if name.startswith("momentum.")]  # 16-bit weights have a "master", too
        return {"step": 1, **{name: matrices[int(name.split(".")[1])] for name in pieces}}

    @on_elements
    def torch_state_dict(self) -> Dict[str, Any]:
        """A state_dict() that torch.optim.Muon's load_state_dict() takes: copies of whole matrices' momentum, as means.
        Use polynomial="muon" to match it. Models of libdc.torch.shard() have no such state."""
        packed = self.state_dict()
        state = {}
        for group in packed["param_groups"]:
            if group["num_splits"] != 1:
                raise ValueError(f"Muon: num_splits = {group['num_splits']}, must be 1 for torch.optim.Muon")
            group["ns_coefficients"] = _TORCH_COEFFICIENTS
            for index in group["params"]:
                part, pieces = self._parts[index], packed["state"].get(index, {})
                if part.shape != part.param.shape:
                    raise ValueError(f"Muon: parameter {index} is a part of a sharded model's")
                if "momentum.0" in pieces:
                    mean = pieces["momentum.0"] * (1 - group["momentum"])
                    state[index] = {"momentum_buffer": mean.view(part.shape)}
        return {**packed, "state": state}

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        options = {name: group[name] for name in ("weight_decay", "momentum", "nesterov", "eps", "num_splits")}
        return {**options, "steps": group["ns_steps"],
                "polynomial": choice(f"{self._name()}: polynomial", group["polynomial"], _POLYNOMIALS),
                "precision": choice(f"{self._name()}: precision", group["precision"], _PRECISIONS),
                "adjust": choice(f"{self._name()}: adjust_lr_fn", group["adjust_lr_fn"] or "original", _ADJUSTS)}
