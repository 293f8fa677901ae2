"""The options of each optimizer, for type checkers: the fields of its struct in dc_api.h. Options that are not given
have the library's defaults."""

from __future__ import annotations

from typing import Optional, TypedDict


class AdamWOptions(TypedDict, total=False):
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    check_finite: bool


class SGDOptions(TypedDict, total=False):
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    check_finite: bool


class MuonOptions(TypedDict, total=False):
    momentum: float
    eps: float
    weight_decay: float
    num_splits: int
    polynomial: int
    steps: int
    precision: int
    adjust: int
    nesterov: int


class ShampooOptions(TypedDict, total=False):
    beta1: float
    beta2: float
    eps_abs: float
    eps_rel: float
    tolerance: float
    graft_beta2: float
    graft_eps: float
    weight_decay: float
    momentum: float
    max_block: int
    merge_below: int
    precondition_frequency: int
    start_preconditioning_step: int
    root: int
    graft: int
    decay: int
    nesterov: bool
    tolerated_failures: int


class SOAPOptions(TypedDict, total=False):
    beta1: float
    beta2: float
    shampoo_beta: float
    eps: float
    weight_decay: float
    max_block: int
    merge_below: int
    max_precond_dim: int
    precondition_frequency: int
    tolerated_failures: int


class KFACOptions(TypedDict, total=False):
    decay: float
    damping: float
    kl_clip: Optional[float]
    momentum: float
    weight_decay: float
    factor_frequency: int
    refresh_frequency: int
    inverse: str
    nesterov: bool
    tolerated_failures: int
