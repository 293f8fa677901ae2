"""Symmetric matrices: eigenvectors, powers, inverse roots."""

from __future__ import annotations

import enum
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .._lib import ffi, lib
from ..errors import check
from ..types import DType, Status
from .handle import Array, Handle, raw, target

_SYMMETRY = {"check": 0, "mean": 1, "lower": 2, "upper": 3}
_NEGATIVE = {"refuse": 0, "clamp": 1, "floor": 2}


class SpectralPath(enum.IntEnum):
    """How a result came about; see enum dc_spectral_path."""

    NONE = 0
    FRESH = 1
    RETRIED = 2
    PLAIN = 3
    WARM = 4


class SpectralInfo(NamedTuple):
    """What is known of one matrix of a batch; see dc_spectral_info."""

    status: int
    path: SpectralPath
    smallest: float
    largest: float
    epsilon: float
    asymmetry: float
    change: float

    @property
    def ok(self) -> bool:
        return bool(self.status == Status.OK)


class _Infos:
    """The matrices' reports, and what a call's status becomes."""

    def __init__(self, a: Array) -> None:
        self.count = a.shape[0] if len(a.shape) == 3 else 1
        self.c = ffi.new("dc_spectral_info[]", max(1, self.count))
        self.size = ffi.sizeof("dc_spectral_info")

    def read(self) -> List[SpectralInfo]:
        return [SpectralInfo(i.status, SpectralPath(i.path), i.smallest, i.largest, i.epsilon, i.asymmetry, i.change)
                for i in (self.c[n] for n in range(self.count))]

    def settle(self, status: int, info: Optional[List[SpectralInfo]]) -> None:
        """Raises unless a list was given for the reports, and the failure is in them."""
        reports = self.read()
        if info is not None:
            info[:] = reports
        if info is None or not any(not report.ok for report in reports):
            check(status)


def _choice(name: str, value: str, allowed: Dict[str, int]) -> int:
    if value not in allowed:
        raise ValueError(f"{name} = {value!r}, must be one of {', '.join(map(repr, allowed))}")
    return allowed[value]


def _options(*, symmetry: str, precision: Any, negative: str = "refuse", **numbers: float) -> Any:
    options = ffi.new("dc_spectral_options *")
    options.struct_size = ffi.sizeof("dc_spectral_options")
    options.symmetry = _choice("symmetry", symmetry, _SYMMETRY)
    options.negative = _choice("negative", negative, _NEGATIVE)
    options.precision = DType.of(precision)
    for name, value in numbers.items():
        setattr(options, name, value)
    return options


def eigh(a: Any, *, descending: bool = False, symmetry: str = "check", precision: Any = None, vectors: bool = True,
         info: Optional[List[SpectralInfo]] = None, handle: Optional[Handle] = None) -> Tuple[Any, Any]:
    """(values, vectors) of symmetric matrices [n, n] or [b, n, n]; column j of vectors belongs to value j. vectors is
    None if they are not wanted. info: a list for the reports; then a matrix that fails is in it, and not raised."""
    given = Array(a)
    options = _options(symmetry=symmetry, precision=precision, descending=int(descending))
    values = target(None, a, given.shape[:-1], given.dtype)
    basis = target(None, a, given.shape, given.dtype) if vectors else None
    infos = _Infos(given)
    status = lib.dc_eigh(raw(handle), given.c, options, values.c, basis.c if basis else ffi.NULL, infos.c, infos.size)
    infos.settle(status, info)
    return values.array, basis.array if basis else None


def matrix_power(a: Any, power: float, *, eps_abs: float = 0, eps_rel: float = 0, rank_rtol: float = 0,
                 negative: str = "refuse", symmetry: str = "check", precision: Any = None, out: Any = None,
                 info: Optional[List[SpectralInfo]] = None, handle: Optional[Handle] = None) -> Any:
    """(A + epsilon I) to any real power, for symmetric positive semidefinite A."""
    given = Array(a)
    options = _options(symmetry=symmetry, precision=precision, negative=negative, eps_abs=eps_abs, eps_rel=eps_rel,
                       rank_rtol=rank_rtol)
    result, infos = target(out, a, given.shape, given.dtype), _Infos(given)
    status = lib.dc_matrix_power(raw(handle), given.c, power, options, result.c, infos.c, infos.size)
    infos.settle(status, info)
    return result.array


def inverse_root(a: Any, root: int, *, eps_abs: float = 0, eps_rel: float = 0, rank_rtol: float = 0,
                 negative: str = "refuse", symmetry: str = "check", precision: Any = None, basis: Any = None,
                 tolerance: float = 0, out: Any = None, info: Optional[List[SpectralInfo]] = None,
                 handle: Optional[Handle] = None) -> Any:
    """(A + epsilon I)^(-1/root). basis: an array that a decomposition leaves its eigenvectors in; with tolerance > 0
    it is used again as long as the matrix has changed little."""
    given, kept = Array(a), None if basis is None else Array(basis, writable=True)
    options = _options(symmetry=symmetry, precision=precision, negative=negative, eps_abs=eps_abs, eps_rel=eps_rel,
                       rank_rtol=rank_rtol, tolerance=tolerance)
    result, infos = target(out, a, given.shape, given.dtype), _Infos(given)
    status = lib.dc_matrix_inverse_root(raw(handle), given.c, root, options, kept.c if kept else ffi.NULL, result.c,
                                        infos.c, infos.size)
    infos.settle(status, info)
    return result.array
