"""How a planned model is trained."""

from __future__ import annotations

import dataclasses

from .._lib import lib
from ..arguments import choice
from ..types import DType
from .checks import whole

DTYPES = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}
MAX_RANKS = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """How the model is trained."""

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

    def __post_init__(self) -> None:
        choice("dtype", self.dtype, DTYPES)
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
        """Ranks among which parameters are split."""
        return self.ranks // self.replicas

    @property
    def element(self) -> int:
        return int(lib.dc_dtype_size(DTYPES[self.dtype]))
