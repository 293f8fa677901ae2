"""How a planned model is trained."""

from __future__ import annotations

import dataclasses
from typing import Optional

from .._lib import lib
from ..arguments import choice
from ..types import DType
from .checks import whole

DTYPES = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}
MAX_RANKS = 1024  # the library's own limit


@dataclasses.dataclass(frozen=True)
class Options:
    """How the model is trained. dtype: the type of kept weights. grad_dtype: that of kept gradients. param_dtype: the
    type in which weights are gathered and used; None: dtype. reduce_dtype: the type in which gradients are averaged;
    None: that in which weights are used. All as in libdc.torch.shard()."""

    ranks: int = 1
    stage: int = 3
    micro_batch: int = 1
    accumulate: int = 1
    dtype: str = "bfloat16"
    bucket: int = 1 << 24
    prefetch: int = 1
    recompute: bool = False
    heap: bool = True
    replicas: int = 1
    offload: bool = False
    optimizer: bool = True
    grad_dtype: str = "float32"
    param_dtype: Optional[str] = None
    reduce_dtype: Optional[str] = None

    def __post_init__(self) -> None:
        for name in ("dtype", "grad_dtype", "param_dtype", "reduce_dtype"):
            if getattr(self, name) is not None or name in ("dtype", "grad_dtype"):
                choice(name, getattr(self, name), DTYPES)
        for name, least, most in (("ranks", 1, MAX_RANKS), ("stage", 0, 3), ("micro_batch", 1, 1 << 20),
                                  ("accumulate", 1, 1 << 10), ("bucket", 1, 1 << 40), ("prefetch", 0, 64),
                                  ("replicas", 1, MAX_RANKS)):
            whole(name, getattr(self, name), least, most)
        for name in ("recompute", "heap", "offload", "optimizer"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} = {getattr(self, name)!r}, must be True or False")
        if self.ranks % self.replicas:
            raise ValueError(f"replicas = {self.replicas}, must divide ranks = {self.ranks}")
        if self.offload and self.stage == 0:
            raise ValueError("offload = True, must be False in stage 0")

    @property
    def shards(self) -> int:
        """The number of ranks among which parameters are split."""
        return self.ranks // self.replicas

    @property
    def used_dtype(self) -> str:
        """The type of gathered weights, of computation, and of gradients as autograd returns them."""
        return self.param_dtype or self.dtype

    @property
    def element(self) -> int:
        """Bytes of an element of the kept weights."""
        return size_of(self.dtype)


def size_of(dtype: str) -> int:
    return int(lib.dc_dtype_size(DTYPES[dtype]))
