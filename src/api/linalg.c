/* Chapter 13: handles, and symmetric matrices. */
#include "api/linalg.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Sizes of the structs in the version that introduced them; frozen from then on. */
enum { LINALG_OPTIONS_SIZE_0_1 = 16, SPECTRAL_OPTIONS_SIZE_0_1 = 56, SPECTRAL_INFO_SIZE_0_1 = 48 };

_Static_assert(sizeof(void *) != 8 || sizeof(dc_linalg_options) >= LINALG_OPTIONS_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_spectral_options) >= SPECTRAL_OPTIONS_SIZE_0_1, "0.1");
_Static_assert(sizeof(dc_spectral_info) >= SPECTRAL_INFO_SIZE_0_1, "0.1");

void dc_linalg_options_init(dc_linalg_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

void dc_spectral_options_init(dc_spectral_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

/* ---- handles ---- */

dc_status dc_linalg_create(dc_device *device, const dc_linalg_options *options, dc_linalg **linalg) {
  if (linalg == NULL) {
    return dc__fail(DC_E_INVALID, "%s: linalg is NULL", __func__);
  }
  *linalg = NULL;
  if (device == NULL) {
    return dc__fail(DC_E_INVALID, "%s: device is NULL", __func__);
  }
  DC__TRY(dc__owner_check(__func__, "device", &device->owner));
  dc_linalg_options read = DC_LINALG_OPTIONS_INIT;
  DC__TRY(dc__read_options(__func__, "options", &read, sizeof read, options, LINALG_OPTIONS_SIZE_0_1));
  if (read.plain != 0 && read.plain != 1) {
    return dc__fail(DC_E_INVALID, "%s: options.plain = %" PRId32 ", must be 0 or 1", __func__, read.plain);
  }
  dc_status status = dc__linalg_create(device, &read, linalg);
  return status == DC_OK ? DC_OK : dc__fail(status, "%s: %s", __func__, dc_last_error());
}

void dc_linalg_destroy(dc_linalg *linalg) {
  if (linalg != NULL && !dc__owner_is_other(&linalg->device->owner)) {
    dc__linalg_destroy(linalg);
  }
}

const char *dc_linalg_solver(const dc_linalg *linalg) {
  return linalg == NULL ? "" : linalg->solver;
}

static dc_status begin_query(const char *fn, dc_linalg *l) {
  if (l->query) {
    return dc__fail(DC_E_STATE, "%s: a query has begun and not ended", fn);
  }
  l->query = true;
  l->most = 0;
  return DC_OK;
}

dc_status dc_linalg_begin_query(dc_linalg *linalg) {
  DC__WITH_LINALG(linalg, begin_query(__func__, linalg));
}

static dc_status end_query(const char *fn, dc_linalg *l, size_t *bytes) {
  if (bytes == NULL) {
    return dc__fail(DC_E_INVALID, "%s: bytes is NULL", fn);
  }
  if (!l->query) {
    return dc__fail(DC_E_STATE, "%s: no query has begun", fn);
  }
  l->query = false;
  *bytes = l->most;
  return DC_OK;
}

dc_status dc_linalg_end_query(dc_linalg *linalg, size_t *bytes) {
  DC__WITH_LINALG(linalg, end_query(__func__, linalg, bytes));
}

static dc_status set_workspace(const char *fn, dc_linalg *l, void *memory, size_t bytes) {
  if ((memory == NULL) != (bytes == 0) || (uintptr_t)memory % 64 != 0) {
    return dc__fail(DC_E_INVALID, "%s: memory = %p of %zu bytes, must be 64-byte aligned and not empty, or NULL of 0",
                    fn, memory, bytes);
  }
  l->lent = memory;
  l->lent_bytes = bytes;
  return DC_OK;
}

dc_status dc_linalg_set_workspace(dc_linalg *linalg, void *memory, size_t bytes) {
  DC__WITH_LINALG(linalg, set_workspace(__func__, linalg, memory, bytes));
}

/* ---- what all entry points of the chapter check ---- */

dc_status dc__check_length(const char *fn, const char *arg, const char *what, int64_t length, int64_t wanted) {
  return length == wanted
             ? DC_OK
             : dc__fail(DC_E_SHAPE, "%s: %s has %" PRId64 " %s, must have %" PRId64, fn, arg, length, what, wanted);
}

dc_status dc__check_matrix(const char *fn, const char *arg, const dc__mat *mat, int64_t batch, int64_t rows,
                           int64_t cols) {
  DC__TRY(dc__check_length(fn, arg, "rows", mat->rows, rows));
  DC__TRY(dc__check_length(fn, arg, "columns", mat->cols, cols));
  if (batch < 0) {
    return mat->batched ? dc__fail(DC_E_SHAPE, "%s: %s has 3 dimensions, must have 2", fn, arg) : DC_OK;
  }
  return dc__check_length(fn, arg, "matrices", mat->batch, batch);
}

dc_status dc__read_output(const char *fn, const char *arg, const dc_tensor *tensor, int32_t dtype, const dc__mat *like,
                          dc__mat *out) {
  DC__TRY(dc__mat_read(fn, arg, tensor, DC__MAT_OUT, out));
  DC__TRY(dc__mat_same_type(fn, arg, out->dtype, "a", dtype));
  if (out->batched != like->batched) {
    return dc__fail(DC_E_SHAPE, "%s: %s has %d dimensions, must have %d", fn, arg, out->batched ? 3 : 2,
                    like->batched ? 3 : 2);
  }
  return dc__check_matrix(fn, arg, out, like->batch, like->rows, like->cols);
}

/* ---- symmetric matrices ---- */

static dc_status bad_number(const char *fn, const char *field, double value, const char *allowed) {
  return dc__fail(DC_E_INVALID, "%s: options.%s = %g, must be %s", fn, field, value, allowed);
}

static dc_status check_options(const char *fn, const dc_spectral_options *o) {
  if (!(o->eps_abs >= 0) || isinf(o->eps_abs)) {
    return bad_number(fn, "eps_abs", o->eps_abs, "finite and >= 0");
  }
  if (!(o->eps_rel >= 0) || isinf(o->eps_rel)) {
    return bad_number(fn, "eps_rel", o->eps_rel, "finite and >= 0");
  }
  if (!((o->rank_rtol >= 0 && o->rank_rtol < 1) || o->rank_rtol == -1)) {
    return bad_number(fn, "rank_rtol", o->rank_rtol, "0 to 1, or -1");
  }
  if (!(o->tolerance >= 0) || isinf(o->tolerance)) {
    return bad_number(fn, "tolerance", o->tolerance, "finite and >= 0");
  }
  if (o->rank_rtol != 0 && (o->eps_abs != 0 || o->eps_rel != 0)) {
    return dc__fail(DC_E_INVALID,
                    "%s: options.rank_rtol = %g needs eps_abs = eps_rel = 0: a pseudo-inverse has no "
                    "epsilon",
                    fn, o->rank_rtol);
  }
  if (o->symmetry < 0 || o->symmetry > DC_SYMMETRY_UPPER) {
    return bad_number(fn, "symmetry", o->symmetry, "one of enum dc_symmetry");
  }
  if (o->negative < 0 || o->negative > DC_NEGATIVE_FLOOR) {
    return bad_number(fn, "negative", o->negative, "one of enum dc_negative");
  }
  if (o->negative == DC_NEGATIVE_FLOOR && (o->eps_rel != 0 || o->rank_rtol != 0)) {
    return dc__fail(DC_E_INVALID, "%s: options.negative = DC_NEGATIVE_FLOOR needs eps_rel = rank_rtol = 0", fn);
  }
  if (o->precision != DC_DTYPE_NONE && o->precision != DC_FLOAT32 && o->precision != DC_FLOAT64) {
    return bad_number(fn, "precision", o->precision, "DC_DTYPE_NONE, DC_FLOAT32 or DC_FLOAT64");
  }
  if (o->descending != 0 && o->descending != 1) {
    return bad_number(fn, "descending", o->descending, "0 or 1");
  }
  return DC_OK;
}

static dc_status begin(const char *fn, const dc_tensor *a, const dc_spectral_options *options, dc_spectral_info *info,
                       size_t info_size, dc__spectral *r) {
  memset(r, 0, sizeof *r);
  r->fn = fn;
  r->info = info;
  r->info_size = info_size;
  r->options.struct_size = sizeof r->options;
  DC__TRY(dc__read_options(fn, "options", &r->options, sizeof r->options, options, SPECTRAL_OPTIONS_SIZE_0_1));
  DC__TRY(check_options(fn, &r->options));
  DC__TRY(dc__mat_read(fn, "a", a, DC__MAT_ANY, &r->a));
  DC__TRY(dc__mat_real(fn, "a", r->a.dtype));
  if (r->a.rows != r->a.cols) {
    return dc__fail(DC_E_SHAPE, "%s: a is %" PRId64 " by %" PRId64 ", must be square", fn, r->a.rows, r->a.cols);
  }
  if (info != NULL && (info_size < SPECTRAL_INFO_SIZE_0_1 || info_size > 65536)) {
    return dc__fail(DC_E_INVALID, "%s: info_size = %zu, must be %d to 65536 (sizeof(dc_spectral_info))", fn, info_size,
                    (int)SPECTRAL_INFO_SIZE_0_1);
  }
  return DC_OK;
}

static dc_status eigh(const char *fn, dc_linalg *l, const dc_tensor *a, const dc_spectral_options *options,
                      dc_tensor *values, dc_tensor *vectors, dc_spectral_info *info, size_t info_size) {
  dc__spectral r;
  dc_tensor read;
  DC__TRY(begin(fn, a, options, info, info_size, &r));
  r.op = DC__SPECTRAL_EIGH;
  const int64_t shape[2] = {r.a.batch, r.a.rows};
  DC__TRY(
      dc__mat_read_as(fn, "values", values, r.a.dtype, r.a.batched ? shape : shape + 1, r.a.batched ? 2 : 1, &read));
  r.values = read.data;
  if (vectors != NULL) {
    DC__TRY(dc__read_output(fn, "vectors", vectors, r.a.dtype, &r.a, &r.out));
    r.vectors = true;
  }
  return dc__spectral_run(l, &r);
}

dc_status dc_eigh(dc_linalg *linalg, const dc_tensor *a, const dc_spectral_options *options, dc_tensor *values,
                  dc_tensor *vectors, dc_spectral_info *info, size_t info_size) {
  DC__WITH_LINALG(linalg, eigh(__func__, linalg, a, options, values, vectors, info, info_size));
}

static dc_status power(const char *fn, dc_linalg *l, const dc_tensor *a, double exponent,
                       const dc_spectral_options *options, dc_tensor *out, dc_spectral_info *info, size_t info_size) {
  dc__spectral r;
  DC__TRY(begin(fn, a, options, info, info_size, &r));
  if (!isfinite(exponent)) {
    return dc__fail(DC_E_INVALID, "%s: power = %g, must be finite", fn, exponent);
  }
  r.op = DC__SPECTRAL_POWER;
  r.power = exponent;
  DC__TRY(dc__read_output(fn, "out", out, r.a.dtype, &r.a, &r.out));
  return dc__spectral_run(l, &r);
}

dc_status dc_matrix_power(dc_linalg *linalg, const dc_tensor *a, double power_, const dc_spectral_options *options,
                          dc_tensor *out, dc_spectral_info *info, size_t info_size) {
  DC__WITH_LINALG(linalg, power(__func__, linalg, a, power_, options, out, info, info_size));
}

static dc_status read_basis(const char *fn, const dc_tensor *basis, dc__spectral *r) {
  DC__TRY(dc__mat_read(fn, "basis", basis, DC__MAT_OUT, &r->basis));
  DC__TRY(dc__mat_real(fn, "basis", r->basis.dtype));
  int32_t precision = r->options.precision;
  if (precision != DC_DTYPE_NONE && precision != r->basis.dtype) {
    return dc__fail(DC_E_DTYPE, "%s: basis is %s, must be of options.precision, %s", fn, dc_dtype_name(r->basis.dtype),
                    dc_dtype_name(precision));
  }
  return dc__read_output(fn, "basis", basis, r->basis.dtype, &r->a, &r->basis);
}

static dc_status inverse_root(const char *fn, dc_linalg *l, const dc_tensor *a, int32_t root,
                              const dc_spectral_options *options, dc_tensor *basis, dc_tensor *out,
                              dc_spectral_info *info, size_t info_size) {
  enum { MOST_ROOT = 64 };
  dc__spectral r;
  DC__TRY(begin(fn, a, options, info, info_size, &r));
  if (root < 1 || root > MOST_ROOT) {
    return dc__fail(DC_E_INVALID, "%s: root = %" PRId32 ", must be 1 to %d", fn, root, (int)MOST_ROOT);
  }
  r.op = DC__SPECTRAL_ROOT;
  r.root = root;
  r.power = -1 / (double)root;
  if (basis != NULL) {
    DC__TRY(read_basis(fn, basis, &r));
  }
  if (r.options.tolerance > 0 &&
      (basis == NULL || r.options.rank_rtol != 0 || r.options.negative == DC_NEGATIVE_FLOOR)) {
    return dc__fail(DC_E_INVALID,
                    "%s: options.tolerance = %g needs a basis, and neither rank_rtol nor DC_NEGATIVE_FLOOR", fn,
                    r.options.tolerance);
  }
  DC__TRY(dc__read_output(fn, "out", out, r.a.dtype, &r.a, &r.out));
  return dc__spectral_run(l, &r);
}

dc_status dc_matrix_inverse_root(dc_linalg *linalg, const dc_tensor *a, int32_t root,
                                 const dc_spectral_options *options, dc_tensor *basis, dc_tensor *out,
                                 dc_spectral_info *info, size_t info_size) {
  DC__WITH_LINALG(linalg, inverse_root(__func__, linalg, a, root, options, basis, out, info, info_size));
}
