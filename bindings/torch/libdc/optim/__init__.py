"""libdc's optimizers as torch.optim.Optimizer: on plain models and on those of libdc.torch.shard(). See
docs/optimizers.md."""

from .. import _pytorch  # first
from .elementwise import SGD, AdamW
from .kfac import KFAC, sampled_cross_entropy, sampled_mse_loss
from .muon import Muon
from .shampoo import SOAP, Shampoo

__all__ = ["KFAC", "AdamW", "Muon", "SGD", "SOAP", "Shampoo", "sampled_cross_entropy", "sampled_mse_loss"]
