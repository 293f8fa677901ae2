"""Shampoo and SOAP on plain models and on those of libdc.torch.shard()."""

from __future__ import annotations

import re
from typing import Any, Dict, Optional, Tuple, Type

import torch
from libdc import Comm
from libdc.arguments import choice

from ..torch.sharding.parameter import entry_of
from . import arrays
from .native import NativeOptimizer, betas_of

_GRAFTS = {"adam": 0, "none": 1, "sgd": 2, "adagrad": 3, "rmsprop": 4}
_DECAYS = {"decoupled": 0, "l2": 1}


def _comm_of(param: torch.Tensor) -> Optional[Comm]:
    """The ranks over which the parameter's model is sharded."""
    entry = entry_of(param)
    return None if entry is None else entry.group.comm


class Blockwise(NativeOptimizer):
    """An optimizer of blocks, on the CPU or on one CUDA device. On a sharded model the blocks are distributed over the
    ranks, and each rank has the state of its own blocks; every rank must make each step. A gradient that is not finite,
    or is 2^50 or larger, raises libdc.Error on every rank, and changes nothing."""

    _native_class: Type[arrays.Blockwise]
    _comm: Optional[Comm]
    _owned_state = re.compile(r"\w+\.\d")  # kind.block, or kind.block.dimension
    _devices = ("cpu", "cuda")

    def _init_state_piece(self, name: str, piece: torch.Tensor) -> None:
        if name.startswith(("root.", "vectors.")):
            piece.fill_diagonal_(1)

    def _create_native(self, options: Dict[str, Any]) -> arrays.Optimizer:
        found = [_comm_of(param) for group in self.param_groups for param in group["params"]]
        comms = {id(comm): comm for comm in found if comm is not None}
        if len(comms) > 1:
            raise ValueError(f"{self._name()}: the parameters belong to models that were sharded each on its own; "
                             "make an optimizer for each")
        self._comm = next(iter(comms.values()), None)
        return self._native_class(comm=self._comm, handle=self._handle(), **options)

    def _check_param(self, param: torch.Tensor, index: int) -> None:
        super()._check_param(param, index)
        comm = _comm_of(param)
        if self._native is not None and comm is not None and comm is not self._comm:
            raise ValueError(f"{self._name()}: parameter {index} is of a sharded model that the optimizer was not made "
                             "for: give the constructor one of its parameters, or make an optimizer for each model")


class Shampoo(Blockwise):
    """Shampoo with blocks, grafting and amortised roots; see dc_shampoo_options for the arguments. A zero means zero,
    not a default: merge_below=0 merges nothing, betas[0]=0 uses the gradient unfiltered. betas: decay rates of the
    gradient's filter and of the factors; betas[1]=1.0 sums the factors."""

    _native_class = arrays.Shampoo

    def __init__(self, params: Any, lr: float = 1e-2, betas: Tuple[float, float] = (0.9, 1.0), eps_abs: float = 1e-12,
                 eps_rel: float = 1e-6, weight_decay: float = 0.0, *, precondition_frequency: int = 1,
                 start_preconditioning_step: int = 0, max_block: int = 1024, merge_below: Optional[int] = None,
                 root: int = 0, tolerance: float = 0.0, graft: str = "adam", graft_beta2: float = 0.999,
                 graft_eps: float = 1e-8, momentum: float = 0.0, nesterov: bool = False, decay: str = "decoupled",
                 tolerated_failures: int = 3) -> None:
        arguments = {**locals()}
        super().__init__(params, {name: value for name, value in arguments.items()
                                  if name not in ("self", "params", "__class__")})

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        merge = group["merge_below"]
        options = {name: group[name] for name in (
            "eps_abs", "eps_rel", "weight_decay", "precondition_frequency", "start_preconditioning_step", "max_block",
            "root", "tolerance", "graft_beta2", "graft_eps", "momentum", "nesterov", "tolerated_failures")}
        return {**options, **betas_of(group, closed=True),
                "merge_below": group["max_block"] if merge is None else merge,
                "graft": choice("Shampoo: graft", group["graft"], _GRAFTS),
                "decay": choice("Shampoo: decay", group["decay"], _DECAYS)}


class SOAP(Blockwise):
    """SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's factors. The first step changes no weight. A zero
    means zero, not a default: max_precond_dim=0 leaves plain Adam, betas[0]=0 uses the gradient unfiltered.
    shampoo_beta: decay rate of the factors, None for betas[1]; max_block: longest side of a block, 0 for whole
    parameters; merge_below=0 merges no dimensions."""

    _native_class = arrays.SOAP

    def __init__(self, params: Any, lr: float = 3e-3, betas: Tuple[float, float] = (0.95, 0.95),
                 shampoo_beta: Optional[float] = None, eps: float = 1e-8, weight_decay: float = 1e-2, *,
                 precondition_frequency: int = 10, max_precond_dim: int = 10000, max_block: int = 0,
                 merge_below: int = 0, tolerated_failures: int = 3) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, shampoo_beta=shampoo_beta, eps=eps, weight_decay=weight_decay,
                                      precondition_frequency=precondition_frequency, max_precond_dim=max_precond_dim,
                                      max_block=max_block, merge_below=merge_below,
                                      tolerated_failures=tolerated_failures))

    def _options(self, group: Dict[str, Any]) -> Dict[str, Any]:
        options = {name: group[name] for name in ("eps", "weight_decay", "precondition_frequency", "max_precond_dim",
                                                  "max_block", "merge_below", "tolerated_failures")}
        betas = betas_of(group)
        beta = betas["beta2"] if group["shampoo_beta"] is None else group["shampoo_beta"]
        return {**options, **betas, "shampoo_beta": beta}
