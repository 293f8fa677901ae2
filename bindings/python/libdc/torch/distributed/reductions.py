"""PyTorch's reductions. libdc computes sums and means; for others the values are gathered and combined in rank
order."""

from __future__ import annotations

import functools
import zlib
from typing import Any, Callable, Dict, List, Optional, Tuple

import libdc
import torch
import torch.distributed as dist

from .tensors import SUMMABLE

_Op = dist.ReduceOp.RedOpType


def _fold(op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: functools.reduce(op, rows.unbind(0))


# Functions that combine the ranks' rows of values to one row. A bool is a bit: its sum and maximum are "or".
_COMBINE: Dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    _Op.SUM: lambda rows: rows.any(0) if rows.dtype is torch.bool else rows.sum(0, dtype=rows.dtype),
    _Op.PRODUCT: lambda rows: rows.all(0) if rows.dtype is torch.bool else rows.prod(0, dtype=rows.dtype),
    _Op.MIN: lambda rows: rows.amin(0),
    _Op.MAX: lambda rows: rows.amax(0),
    _Op.BAND: _fold(torch.bitwise_and),
    _Op.BOR: _fold(torch.bitwise_or),
    _Op.BXOR: _fold(torch.bitwise_xor),
}
_BITWISE = (_Op.BAND, _Op.BOR, _Op.BXOR)
_SCALED = (_Op.AVG, _Op.PREMUL_SUM)
_SIGNATURE_BYTES = 128
_DETAILS_BYTES = 48


class Reduction:
    """A reduction of tensors of one type."""

    def __init__(self, name: str, op: Any, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.op = getattr(op, "op", op)
        self.factor: Optional[Any] = None
        if self.op == _Op.PREMUL_SUM:
            self.factor = op.__getstate__()[1]
        inexact = dtype.is_floating_point or dtype.is_complex
        if self.op in _BITWISE and inexact or self.op in _SCALED and not inexact:
            raise ValueError(f"{name}: {_name(self.op)} of {dtype}: must be of "
                             f"{'whole numbers or bool' if inexact else 'floating-point numbers'}")
        if dtype.is_complex and self.op not in (_Op.SUM, *_SCALED):
            raise ValueError(f"{name}: {_name(self.op)} of {dtype}: complex numbers have SUM, AVG and PREMUL_SUM only")
        if not (self.op in _COMBINE or self.op in _SCALED):
            raise ValueError(f"{name}: op = {op}, must be SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM")
        # whether libdc sums itself, in float32 for 16-bit types
        self.native = (self.op == _Op.SUM or self.op in _SCALED) and (dtype.is_complex or dtype in SUMMABLE)
        if self.op in _SCALED and not self.native:
            raise ValueError(f"{name}: {_name(self.op)} of {dtype}: must be of float16, bfloat16, float32, float64 or "
                             "complex numbers")
        self.native_op = libdc.ReduceOp.MEAN if self.op == _Op.AVG else libdc.ReduceOp.SUM
        if not self.native:
            self._check_computable()

    def _check_computable(self) -> None:
        """Refuses what PyTorch cannot compute on a CPU, before any rank has sent something."""
        try:
            self.combine(torch.empty(2, 1, dtype=self.dtype, device="cpu"))
        except (NotImplementedError, RuntimeError):
            raise ValueError(f"{self.name}: {_name(self.op)} of {self.dtype}: PyTorch has none on CPUs, must be of "
                             "another type: convert the tensor, as to int64 or float32") from None

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return _COMBINE[self.op](rows)

    def signature(self, numel: int, details: str) -> torch.Tensor:
        """The call as text, for compare()."""
        if len(details) > _DETAILS_BYTES:
            details = f" of checksum {zlib.crc32(details.encode()):08x}"
        return _as_bytes(f"{self.name} ({numel} elements{details}, {str(self.dtype)[6:]}, {_name(self.op).lower()})")

    @classmethod
    def of(cls, name: str, op: Any, dtype: torch.dtype) -> "Reduction":
        """A reduction, cached except if it has a factor, since its checks cost more than a small call."""
        kind = getattr(op, "op", op)
        return cls(name, op, dtype) if kind == _Op.PREMUL_SUM else _known(name, kind, dtype)

    @staticmethod
    def check_sparse(op: Any) -> None:
        if getattr(op, "op", op) != _Op.SUM:
            raise ValueError(f"all_reduce: op = {_name(getattr(op, 'op', op))} of a sparse tensor, must be SUM")

    @staticmethod
    def compare(signatures: torch.Tensor) -> None:
        """Raises if the ranks' calls differ. A gather of their values alone would not detect another reduction or
        type."""
        calls = [text_of(row) for row in signatures]
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise RuntimeError(f"rank {rank} called {call} where rank 0 called {calls[0]}")


@functools.lru_cache(maxsize=None)
def _known(name: str, op: Any, dtype: torch.dtype) -> Reduction:
    return Reduction(name, op, dtype)


def _name(op: Any) -> str:
    return str(op).rsplit(".", 1)[-1].split(":", 1)[0]


def _as_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode().ljust(_SIGNATURE_BYTES)), dtype=torch.uint8)


def text_of(signature: torch.Tensor) -> str:
    return bytes(signature.tolist()).decode().rstrip()


def sparse_signature(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor's reduction as text, for compare()."""
    return _as_bytes(f"all_reduce (sparse {list(tensor.shape)}, {tensor.sparse_dim()} sparse dimensions, "
                     f"{str(tensor.dtype)[6:]})")


def sum_sparse(parts: List[Tuple[torch.Tensor, torch.Tensor]], shape: torch.Size) -> torch.Tensor:
    """The sum of sparse tensors, from the ranks' indices and values."""
    indices, values = zip(*parts)
    return torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), shape, check_invariants=False).coalesce()
