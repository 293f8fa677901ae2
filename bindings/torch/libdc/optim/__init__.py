"""libdc's optimizers as torch.optim.Optimizer: on plain models and on those of libdc.torch.shard(). See
docs/optimizers.md."""

from .elementwise import SGD, AdamW
from .shampoo import Shampoo

__all__ = ["AdamW", "SGD", "Shampoo"]
