"""Symmetric matrices: eigenvectors, powers, inverse roots; matrices with orthonormal rows or columns."""

from __future__ import annotations

import enum
from typing import Any, List, NamedTuple, Optional, Tuple

from .._lib import ffi, lib, new_struct
from ..arguments import assign, c_double, c_int, choice, flag
from ..errors import check
from ..types import DType, Status
from .handle import Array, Handle, handle_ptr, output_array

_SYMMETRY = {"check": 0, "mean": 1, "lower": 2, "upper": 3}
_NEGATIVE = {"refuse": 0, "clamp": 1, "floor": 2}
_POLYNOMIALS = {"express": 0, "muon": 1}


class SpectralPath(enum.IntEnum):
    """How a result was computed; see enum dc_spectral_path."""

    NONE = 0
    FRESH = 1
    RETRIED = 2
    PLAIN = 3
    WARM = 4


class SpectralInfo(NamedTuple):
    """The report on one matrix of a batch; see dc_spectral_info."""

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


class IterationInfo(NamedTuple):
    """The report on one matrix's iteration; see dc_iteration_info."""

    status: int
    iterations: int
    residual: float
    bound: float
    epsilon: float
    asymmetry: float

    @property
    def ok(self) -> bool:
        return bool(self.status == Status.OK)


class _InfoArray:
    """The matrices' reports, and whether a call's status raises."""

    def __init__(self, a: Array, kind: Any = SpectralInfo) -> None:
        self.count = a.shape[0] if len(a.shape) == 3 else 1
        self.kind, name = kind, "dc_spectral_info" if kind is SpectralInfo else "dc_iteration_info"
        self.c = ffi.new(f"{name}[]", max(1, self.count))
        self.size = ffi.sizeof(name)

    def read(self) -> List[Any]:
        reports = [self.kind(*(getattr(self.c[n], name) for name in self.kind._fields)) for n in range(self.count)]
        return [r._replace(path=SpectralPath(r.path)) if self.kind is SpectralInfo else r for r in reports]

    def raise_for_status(self, status: int, info: Optional[List[Any]]) -> None:
        """Raises the status as an Error, unless the caller gave a list for the reports and a report has the failure."""
        reports = self.read()
        if info is not None:
            info[:] = reports
        if info is None or not any(not report.ok for report in reports):
            check(status)


def _options(*, symmetry: str, precision: Any, negative: str = "refuse", **numbers: float) -> Any:
    options = new_struct("dc_spectral_options")
    options.symmetry = choice("symmetry", symmetry, _SYMMETRY)
    options.negative = choice("negative", negative, _NEGATIVE)
    options.precision = DType.of(precision)
    for name, value in numbers.items():
        assign(options, name, value, name)
    return options


def eigh(a: Any, *, descending: bool = False, symmetry: str = "check", precision: Any = None, vectors: bool = True,
         info: Optional[List[SpectralInfo]] = None, handle: Optional[Handle] = None) -> Tuple[Any, Any]:
    """(values, vectors) of symmetric matrices [n, n] or [b, n, n]; column j of vectors belongs to value j. vectors is
    None if not wanted. info: a list for the reports. With it, a matrix that fails does not raise: its report says so,
    and its result is NaN (zeros in a libdc.Tensor on a CUDA device). This holds for the functions below that have info,
    if no out is given."""
    given = Array(a, "a", handle)
    options = _options(symmetry=symmetry, precision=precision, descending=int(flag("descending", descending)))
    values = output_array(None, a, given.shape[:-1], given.dtype, handle, with_nan=info is not None)
    wanted = flag("vectors", vectors)
    q = output_array(None, a, given.shape, given.dtype, handle, with_nan=info is not None) if wanted else None
    infos = _InfoArray(given)
    status = lib.dc_eigh(handle_ptr(handle), given.c, options, values.c, q.c if q else ffi.NULL, infos.c, infos.size)
    infos.raise_for_status(status, info)
    return values.array, q.array if q else None


def matrix_power(a: Any, power: float, *, eps_abs: float = 0, eps_rel: float = 0, rank_rtol: float = 0,
                 negative: str = "refuse", symmetry: str = "check", precision: Any = None, out: Any = None,
                 info: Optional[List[SpectralInfo]] = None, handle: Optional[Handle] = None) -> Any:
    """(A + epsilon I)^power for any real power and symmetric positive semidefinite A."""
    given = Array(a, "a", handle)
    options = _options(symmetry=symmetry, precision=precision, negative=negative, eps_abs=eps_abs, eps_rel=eps_rel,
                       rank_rtol=rank_rtol)
    result = output_array(out, a, given.shape, given.dtype, handle, with_nan=info is not None)
    infos = _InfoArray(given)
    status = lib.dc_matrix_power(handle_ptr(handle), given.c, c_double("power", power), options, result.c, infos.c,
                                 infos.size)
    infos.raise_for_status(status, info)
    return result.array


def inverse_root(a: Any, root: int, *, eps_abs: float = 0, eps_rel: float = 0, rank_rtol: float = 0,
                 negative: str = "refuse", symmetry: str = "check", precision: Any = None, basis: Any = None,
                 tolerance: float = 0, out: Any = None, info: Optional[List[SpectralInfo]] = None,
                 handle: Optional[Handle] = None) -> Any:
    """(A + epsilon I)^(-1/root). basis: an array in which a decomposition stores its eigenvectors. With tolerance > 0
    later calls reuse them while the matrix has changed little."""
    given, kept = Array(a, "a", handle), None if basis is None else Array(basis, "basis", handle, True)
    options = _options(symmetry=symmetry, precision=precision, negative=negative, eps_abs=eps_abs, eps_rel=eps_rel,
                       rank_rtol=rank_rtol, tolerance=tolerance)
    result = output_array(out, a, given.shape, given.dtype, handle, with_nan=info is not None)
    infos = _InfoArray(given)
    status = lib.dc_matrix_inverse_root(handle_ptr(handle), given.c, c_int("root", root), options,
                                        kept.c if kept else ffi.NULL, result.c, infos.c, infos.size)
    infos.raise_for_status(status, info)
    return result.array


def inverse_root_newton(a: Any, root: int, *, eps_abs: float = 0, eps_rel: float = 0, residual: float = 0,
                        iterations: int = 0, symmetry: str = "check", precision: Any = None, out: Any = None,
                        info: Optional[List[IterationInfo]] = None, handle: Optional[Handle] = None) -> Any:
    """(A + epsilon I)^(-1/root) by matrix products alone. info: a list for the reports. With it, a matrix that does not
    converge does not raise: its report says so, and its result is the best iterate."""
    given = Array(a, "a", handle)
    options = new_struct("dc_iteration_options")
    for name, value in dict(eps_abs=eps_abs, eps_rel=eps_rel, residual=residual, iterations=iterations).items():
        assign(options, name, value, name)
    options.symmetry, options.precision = choice("symmetry", symmetry, _SYMMETRY), DType.of(precision)
    result = output_array(out, a, given.shape, given.dtype, handle, with_nan=info is not None)
    infos = _InfoArray(given, IterationInfo)
    status = lib.dc_matrix_inverse_root_newton(handle_ptr(handle), given.c, c_int("root", root), options, result.c,
                                               infos.c, infos.size)
    infos.raise_for_status(status, info)
    return result.array


def orthogonalize(a: Any, *, polynomial: str = "express", steps: int = 0, out: Any = None,
                  handle: Optional[Handle] = None) -> Any:
    """The nearest matrix with orthonormal rows or columns. polynomial: "express" (Polar Express) or "muon"; steps: 0 =
    the polynomial's default."""
    given = Array(a, "a", handle)
    result = output_array(out, a, given.shape, given.dtype, handle)
    c_polynomial = choice("polynomial", polynomial, _POLYNOMIALS)
    check(lib.dc_orthogonalize(handle_ptr(handle), given.c, c_polynomial, c_int("steps", steps), result.c))
    return result.array
