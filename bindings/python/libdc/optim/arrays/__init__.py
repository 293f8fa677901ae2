"""Optimizers on arrays of any library, whole or in parts: chapter 14 of dc_api.h. For PyTorch see libdc.optim."""

from .elementwise import SGD, AdamW
from .handle import FlatTensors, Optimizer, OptimizerStats
from .kfac import KFAC
from .muon import Muon
from .shampoo import SOAP, Blockwise, Shampoo

__all__ = ["KFAC", "AdamW", "Blockwise", "FlatTensors", "Muon", "Optimizer", "OptimizerStats", "SGD", "SOAP", "Shampoo"]
