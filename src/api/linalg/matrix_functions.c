/* Chapter 13: symmetric matrices, and those with orthonormal rows. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "api/linalg/linalg_api.h"

/* Sizes of the structs in the version that introduced them; frozen from then on. */
enum {
  SPECTRAL_OPTIONS_SIZE_0_1 = 56,
  SPECTRAL_INFO_SIZE_0_1 = 48,
  ITERATION_OPTIONS_SIZE_0_1 = 48,
  ITERATION_INFO_SIZE_0_1 = 40,
  MOST_ROOT = 64
};

_Static_assert(sizeof(void *) != 8 || sizeof(dc_spectral_options) >= SPECTRAL_OPTIONS_SIZE_0_1, "0.1");
_Static_assert(sizeof(dc_spectral_info) >= SPECTRAL_INFO_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_iteration_options) >= ITERATION_OPTIONS_SIZE_0_1, "0.1");
_Static_assert(sizeof(dc_iteration_info) >= ITERATION_INFO_SIZE_0_1, "0.1");

void dc_spectral_options_init(dc_spectral_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

void dc_iteration_options_init(dc_iteration_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

static dc_status bad_number(const char *fn, const char *field, double value, const char *allowed) {
  return dc__fail(DC_E_INVALID, "%s: options.%s = %g, must be %s", fn, field, value, allowed);
}

static dc_status check_number(const char *fn, const char *field, double value) {
  return value >= 0 && !isinf(value) ? DC_OK : bad_number(fn, field, value, "finite and >= 0");
}

static dc_status check_reading(const char *fn, int32_t symmetry, int32_t precision) {
  if (symmetry < 0 || symmetry > DC_SYMMETRY_UPPER) {
    return bad_number(fn, "symmetry", symmetry, "one of enum dc_symmetry");
  }
  if (precision != DC_DTYPE_NONE && precision != DC_FLOAT32 && precision != DC_FLOAT64) {
    return bad_number(fn, "precision", precision, "DC_DTYPE_NONE, DC_FLOAT32 or DC_FLOAT64");
  }
  return DC_OK;
}

static dc_status spectral_check_options(const char *fn, const dc_spectral_options *o) {
  DC__TRY(check_number(fn, "eps_abs", o->eps_abs));
  DC__TRY(check_number(fn, "eps_rel", o->eps_rel));
  if (!((o->rank_rtol >= 0 && o->rank_rtol < 1) || o->rank_rtol == -1)) {
    return bad_number(fn, "rank_rtol", o->rank_rtol, "0 to 1, or -1");
  }
  DC__TRY(check_number(fn, "tolerance", o->tolerance));
  if (o->rank_rtol != 0 && (o->eps_abs != 0 || o->eps_rel != 0)) {
    return dc__fail(DC_E_INVALID,
                    "%s: options.rank_rtol = %g needs eps_abs = eps_rel = 0: a pseudo-inverse has no "
                    "epsilon",
                    fn, o->rank_rtol);
  }
  DC__TRY(check_reading(fn, o->symmetry, o->precision));
  if (o->negative < 0 || o->negative > DC_NEGATIVE_FLOOR) {
    return bad_number(fn, "negative", o->negative, "one of enum dc_negative");
  }
  if (o->negative == DC_NEGATIVE_FLOOR && (o->eps_rel != 0 || o->rank_rtol != 0)) {
    return dc__fail(DC_E_INVALID, "%s: options.negative = DC_NEGATIVE_FLOOR needs eps_rel = rank_rtol = 0", fn);
  }
  if (o->descending != 0 && o->descending != 1) {
    return bad_number(fn, "descending", o->descending, "0 or 1");
  }
  return DC_OK;
}

/* Reads the matrices, and checks the size of the reports. */
static dc_status read_matrices(const char *fn, const dc_linalg *l, const dc_tensor *a, void *info, size_t info_size,
                               size_t least, dc__spectral_request *r) {
  r->fn = fn;
  r->info = info;
  r->info_size = info_size;
  DC__TRY(dc__read_matrix(l, fn, "a", a, DC__MAT_ANY, &r->a));
  DC__TRY(dc__mat_check_real(fn, "a", r->a.dtype));
  if (r->a.rows != r->a.cols) {
    return dc__fail(DC_E_SHAPE, "%s: a is %" PRId64 " by %" PRId64 ", must be square", fn, r->a.rows, r->a.cols);
  }
  if (info != NULL && (info_size < least || info_size > 65536)) {
    return dc__fail(DC_E_INVALID, "%s: info_size = %zu, must be %zu to 65536 (sizeof of info's type)", fn, info_size,
                    least);
  }
  return DC_OK;
}

/* An output beside the matrices. */
static dc_status read_out(const char *fn, const dc_linalg *l, const dc_tensor *out, dc__spectral_request *r) {
  DC__TRY(dc__read_output(l, fn, "out", out, r->a.dtype, &r->a, &r->out));
  return dc__check_apart(l, fn, "out", &r->out, "a", &r->a);
}

static dc_status spectral_read_request(const char *fn, const dc_linalg *l, const dc_tensor *a,
                                       const dc_spectral_options *options, dc_spectral_info *info, size_t info_size,
                                       dc__spectral_request *r) {
  memset(r, 0, sizeof *r);
  r->options.struct_size = sizeof r->options;
  DC__TRY(dc__read_options(fn, "options", &r->options, sizeof r->options, options, SPECTRAL_OPTIONS_SIZE_0_1));
  DC__TRY(spectral_check_options(fn, &r->options));
  return read_matrices(fn, l, a, info, info_size, SPECTRAL_INFO_SIZE_0_1, r);
}

static dc_status matrix_eigh(const char *fn, dc_linalg *l, const dc_tensor *a, const dc_spectral_options *options,
                             dc_tensor *values, dc_tensor *vectors, dc_spectral_info *info, size_t info_size) {
  dc__spectral_request r;
  DC__TRY(spectral_read_request(fn, l, a, options, info, info_size, &r));
  r.op = DC__SPECTRAL_EIGH;
  const int64_t shape[2] = {r.a.batch, r.a.rows};
  DC__TRY(dc__read_vector(l, fn, "values", values, r.a.dtype, r.a.batched ? shape : shape + 1, r.a.batched ? 2 : 1,
                          &r.values));
  const dc__mat row = dc__elements(r.values, r.a.dtype, r.a.batch * r.a.rows);
  DC__TRY(dc__check_apart(l, fn, "values", &row, "a", &r.a));
  if (vectors != NULL) {
    DC__TRY(dc__read_output(l, fn, "vectors", vectors, r.a.dtype, &r.a, &r.out));
    DC__TRY(dc__check_apart(l, fn, "vectors", &r.out, "a", &r.a));
    DC__TRY(dc__check_apart(l, fn, "vectors", &r.out, "values", &row));
    r.vectors = true;
  }
  return dc__spectral_run(l, &r);
}

dc_status dc_eigh(dc_linalg *linalg, const dc_tensor *a, const dc_spectral_options *options, dc_tensor *values,
                  dc_tensor *vectors, dc_spectral_info *info, size_t info_size) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, matrix_eigh(__func__, linalg, a, options, values, vectors, info, info_size));
}

static dc_status matrix_power(const char *fn, dc_linalg *l, const dc_tensor *a, double exponent,
                              const dc_spectral_options *options, dc_tensor *out, dc_spectral_info *info,
                              size_t info_size) {
  dc__spectral_request r;
  DC__TRY(spectral_read_request(fn, l, a, options, info, info_size, &r));
  if (!isfinite(exponent)) {
    return dc__fail(DC_E_INVALID, "%s: power = %g, must be finite", fn, exponent);
  }
  r.op = DC__SPECTRAL_POWER;
  r.power = exponent;
  DC__TRY(read_out(fn, l, out, &r));
  return dc__spectral_run(l, &r);
}

dc_status dc_matrix_power(dc_linalg *linalg, const dc_tensor *a, double power_, const dc_spectral_options *options,
                          dc_tensor *out, dc_spectral_info *info, size_t info_size) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, matrix_power(__func__, linalg, a, power_, options, out, info, info_size));
}

static dc_status read_basis(const char *fn, const dc_linalg *l, const dc_tensor *basis, dc__spectral_request *r) {
  DC__TRY(dc__read_matrix(l, fn, "basis", basis, DC__MAT_OUT, &r->basis));
  DC__TRY(dc__mat_check_real(fn, "basis", r->basis.dtype));
  int32_t precision = r->options.precision;
  if (precision != DC_DTYPE_NONE && precision != r->basis.dtype) {
    return dc__fail(DC_E_DTYPE, "%s: basis is %s, must be of options.precision, %s", fn, dc_dtype_name(r->basis.dtype),
                    dc_dtype_name(precision));
  }
  return dc__read_output(l, fn, "basis", basis, r->basis.dtype, &r->a, &r->basis);
}

static dc_status check_root(const char *fn, int32_t root) {
  return root >= 1 && root <= MOST_ROOT
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: root = %" PRId32 ", must be 1 to %d", fn, root, (int)MOST_ROOT);
}

static dc_status matrix_inverse_root(const char *fn, dc_linalg *l, const dc_tensor *a, int32_t root,
                                     const dc_spectral_options *options, dc_tensor *basis, dc_tensor *out,
                                     dc_spectral_info *info, size_t info_size) {
  dc__spectral_request r;
  DC__TRY(spectral_read_request(fn, l, a, options, info, info_size, &r));
  DC__TRY(check_root(fn, root));
  r.op = DC__SPECTRAL_ROOT;
  r.root = root;
  r.power = -1 / (double)root;
  if (basis != NULL) {
    DC__TRY(read_basis(fn, l, basis, &r));
  }
  if (r.options.tolerance > 0 &&
      (basis == NULL || r.options.rank_rtol != 0 || r.options.negative == DC_NEGATIVE_FLOOR)) {
    return dc__fail(DC_E_INVALID,
                    "%s: options.tolerance = %g needs a basis, and neither rank_rtol nor DC_NEGATIVE_FLOOR", fn,
                    r.options.tolerance);
  }
  DC__TRY(read_out(fn, l, out, &r));
  if (basis != NULL) {
    DC__TRY(dc__check_apart(l, fn, "basis", &r.basis, "a", &r.a));
    DC__TRY(dc__check_apart(l, fn, "out", &r.out, "basis", &r.basis));
  }
  return dc__spectral_run(l, &r);
}

dc_status dc_matrix_inverse_root(dc_linalg *linalg, const dc_tensor *a, int32_t root,
                                 const dc_spectral_options *options, dc_tensor *basis, dc_tensor *out,
                                 dc_spectral_info *info, size_t info_size) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, matrix_inverse_root(__func__, linalg, a, root, options, basis, out, info, info_size));
}

static dc_status matrix_inverse_root_newton(const char *fn, dc_linalg *l, const dc_tensor *a, int32_t root,
                                            const dc_iteration_options *options, dc_tensor *out,
                                            dc_iteration_info *info, size_t info_size) {
  enum { MOST_ITERATIONS = 100 };
  dc__spectral_request r = {.op = DC__SPECTRAL_NEWTON, .root = root, .power = -1 / (double)root};
  dc_iteration_options o = DC_ITERATION_OPTIONS_INIT;
  DC__TRY(dc__read_options(fn, "options", &o, sizeof o, options, ITERATION_OPTIONS_SIZE_0_1));
  DC__TRY(check_number(fn, "eps_abs", o.eps_abs));
  DC__TRY(check_number(fn, "eps_rel", o.eps_rel));
  DC__TRY(check_number(fn, "residual", o.residual));
  DC__TRY(check_reading(fn, o.symmetry, o.precision));
  if (o.iterations < 0 || o.reserved0 != 0) {
    return o.iterations < 0 ? bad_number(fn, "iterations", o.iterations, ">= 0")
                            : bad_number(fn, "reserved0", o.reserved0, "0");
  }
  if (o.eps_abs == 0 && o.eps_rel == 0) {
    return dc__fail(DC_E_INVALID, "%s: options.eps_abs = options.eps_rel = 0, one must be > 0", fn);
  }
  DC__TRY(check_root(fn, root));
  DC__TRY(read_matrices(fn, l, a, info, info_size, ITERATION_INFO_SIZE_0_1, &r));
  DC__TRY(read_out(fn, l, out, &r));
  r.options.eps_abs = o.eps_abs;
  r.options.eps_rel = o.eps_rel;
  r.options.symmetry = o.symmetry;
  r.options.precision = o.precision;
  r.max_iterations = o.iterations > 0 ? o.iterations : MOST_ITERATIONS;
  r.max_residual = o.residual;
  return dc__spectral_run(l, &r);
}

dc_status dc_matrix_inverse_root_newton(dc_linalg *linalg, const dc_tensor *a, int32_t root,
                                        const dc_iteration_options *options, dc_tensor *out, dc_iteration_info *info,
                                        size_t info_size) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, matrix_inverse_root_newton(__func__, linalg, a, root, options, out, info, info_size));
}

static dc_status matrix_orthogonalize(const char *fn, dc_linalg *l, const dc_tensor *a, int32_t polynomial,
                                      int32_t steps, dc_tensor *out) {
  enum { MOST_STEPS = 64, EXPRESS_STEPS = 8, MUON_STEPS = 5 };
  dc__mat from, to;
  bool express = polynomial == DC_ORTHOGONAL_EXPRESS;
  DC__TRY(dc__read_matrix(l, fn, "a", a, DC__MAT_ANY, &from));
  DC__TRY(dc__mat_check_real(fn, "a", from.dtype));
  if (!express && polynomial != DC_ORTHOGONAL_MUON) {
    return dc__fail(DC_E_INVALID, "%s: polynomial = %" PRId32 ", must be one of enum dc_orthogonal", fn, polynomial);
  }
  if (steps < 0 || steps > MOST_STEPS) {
    return dc__fail(DC_E_INVALID, "%s: steps = %" PRId32 ", must be 0 to %d", fn, steps, (int)MOST_STEPS);
  }
  DC__TRY(dc__read_output(l, fn, "out", out, from.dtype, &from, &to));
  DC__TRY(dc__check_apart(l, fn, "out", &to, "a", &from));
  return dc__orthogonalize(l, fn, &from, express, steps > 0 ? steps : express ? EXPRESS_STEPS : MUON_STEPS, &to);
}

dc_status dc_orthogonalize(dc_linalg *linalg, const dc_tensor *a, int32_t polynomial, int32_t steps, dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, matrix_orthogonalize(__func__, linalg, a, polynomial, steps, out));
}
