/* Chapter 13: Kronecker products, and products of matrices. */
#include <inttypes.h>
#include <math.h>

#include "api/linalg/linalg_api.h"

enum { MATRIX_SOURCE_SIZE_0_1 = 32 };

_Static_assert(sizeof(void *) != 8 || sizeof(dc_matrix_source) >= MATRIX_SOURCE_SIZE_0_1, "0.1");

void dc_matrix_source_init(dc_matrix_source *source, size_t struct_size) {
  dc__init_sized(source, struct_size, sizeof *source);
}

/* Reads a float32 or float64 input, which must be of `dtype` unless that is DC_DTYPE_NONE. */
static dc_status read_real(const char *fn, const dc_linalg *l, const char *arg, const dc_tensor *tensor, int32_t layout,
                           int32_t dtype, dc__mat *mat) {
  DC__TRY(dc__read_matrix(l, fn, arg, tensor, layout, mat));
  DC__TRY(dc__mat_check_real(fn, arg, mat->dtype));
  return dtype == DC_DTYPE_NONE ? DC_OK : dc__mat_check_dtype(fn, arg, mat->dtype, "a", dtype);
}

static dc_status no_batch(const char *fn, const char *arg, const dc__mat *mat) {
  return dc__check_matrix(fn, arg, mat, -1, mat->rows, mat->cols);
}

/* ---- Kronecker products ---- */

/* Whether c is a times b, without overflow. */
static bool is_product(int64_t c, int64_t a, int64_t b) {
  int64_t product;
  return !__builtin_mul_overflow(a, b, &product) && product == c;
}

static dc_status check_product(const char *fn, const char *arg, const dc__mat *x, const dc__mat *a, const dc__mat *b) {
  DC__TRY(no_batch(fn, "a", a));
  DC__TRY(no_batch(fn, "b", b));
  DC__TRY(no_batch(fn, arg, x));
  return is_product(x->rows, a->rows, b->rows) && is_product(x->cols, a->cols, b->cols)
             ? DC_OK
             : dc__fail(DC_E_SHAPE,
                        "%s: %s is %" PRId64 " by %" PRId64 ", must be %" PRId64 " * %" PRId64 " by %" PRId64
                        " * %" PRId64,
                        fn, arg, x->rows, x->cols, a->rows, b->rows, a->cols, b->cols);
}

static dc_status matrix_kron(const char *fn, dc_linalg *l, const dc_tensor *a, const dc_tensor *b, dc_tensor *out) {
  dc__mat ma, mb, mo;
  DC__TRY(read_real(fn, l, "a", a, DC__MAT_ANY, DC_DTYPE_NONE, &ma));
  DC__TRY(read_real(fn, l, "b", b, DC__MAT_ANY, ma.dtype, &mb));
  DC__TRY(read_real(fn, l, "out", out, DC__MAT_OUT, ma.dtype, &mo));
  DC__TRY(check_product(fn, "out", &mo, &ma, &mb));
  DC__TRY(dc__check_apart(l, fn, "out", &mo, "a", &ma));
  DC__TRY(dc__check_apart(l, fn, "out", &mo, "b", &mb));
  return dc__kron(l, &ma, &mb, &mo);
}

dc_status dc_kron(dc_linalg *linalg, const dc_tensor *a, const dc_tensor *b, dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, matrix_kron(__func__, linalg, a, b, out));
}

/* out may be x itself. */
static dc_status check_apart_or_same(const dc_linalg *l, const char *fn, const dc__mat *out, const char *arg,
                                     const dc__mat *in) {
  const bool same = out->data == in->data && out->rows == in->rows && out->cols == in->cols;
  return same && (out->batch == 1 || out->batch_stride == in->batch_stride)
             ? DC_OK
             : dc__check_apart(l, fn, "out", out, arg, in);
}

static dc_status matrix_kron_apply(const char *fn, dc_linalg *l, const dc_tensor *a, const dc_tensor *b,
                                   const dc_tensor *x, dc_tensor *out) {
  dc__mat ma, mb, mx, mo;
  DC__TRY(read_real(fn, l, "a", a, DC__MAT_GEMM, DC_DTYPE_NONE, &ma));
  DC__TRY(read_real(fn, l, "b", b, DC__MAT_GEMM, ma.dtype, &mb));
  DC__TRY(read_real(fn, l, "x", x, DC__MAT_GEMM, ma.dtype, &mx));
  DC__TRY(no_batch(fn, "a", &ma));
  DC__TRY(no_batch(fn, "b", &mb));
  DC__TRY(dc__check_matrix(fn, "x", &mx, mx.batch, ma.cols, mb.cols));
  dc__mat like = mx;
  like.rows = ma.rows;
  like.cols = mb.rows;
  DC__TRY(dc__read_output(l, fn, "out", out, ma.dtype, &like, &mo));
  DC__TRY(dc__check_apart(l, fn, "out", &mo, "a", &ma));
  DC__TRY(dc__check_apart(l, fn, "out", &mo, "b", &mb));
  DC__TRY(check_apart_or_same(l, fn, &mo, "x", &mx));
  return dc__kron_apply(l, fn, &ma, &mb, &mx, &mo);
}

dc_status dc_kron_apply(dc_linalg *linalg, const dc_tensor *a, const dc_tensor *b, const dc_tensor *x, dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, matrix_kron_apply(__func__, linalg, a, b, x, out));
}

static dc_status matrix_kron_solve(const char *fn, dc_linalg *l, const dc_tensor *a_vectors, const dc_tensor *a_values,
                                   const dc_tensor *b_vectors, const dc_tensor *b_values, double damping,
                                   const dc_tensor *x, dc_tensor *out) {
  dc__mat qa, qb, mx, mo;
  void *va, *vb;
  if (!(damping >= 0) || isinf(damping)) {
    return dc__fail(DC_E_INVALID, "%s: damping = %g, must be finite and >= 0", fn, damping);
  }
  DC__TRY(read_real(fn, l, "x", x, DC__MAT_GEMM, DC_DTYPE_NONE, &mx));
  DC__TRY(no_batch(fn, "x", &mx));
  DC__TRY(read_real(fn, l, "a_vectors", a_vectors, DC__MAT_GEMM, mx.dtype, &qa));
  DC__TRY(read_real(fn, l, "b_vectors", b_vectors, DC__MAT_GEMM, mx.dtype, &qb));
  DC__TRY(dc__check_matrix(fn, "a_vectors", &qa, -1, mx.rows, mx.rows));
  DC__TRY(dc__check_matrix(fn, "b_vectors", &qb, -1, mx.cols, mx.cols));
  DC__TRY(dc__read_vector(l, fn, "a_values", a_values, mx.dtype, &mx.rows, 1, &va));
  DC__TRY(dc__read_vector(l, fn, "b_values", b_values, mx.dtype, &mx.cols, 1, &vb));
  DC__TRY(dc__read_output(l, fn, "out", out, mx.dtype, &mx, &mo));
  DC__TRY(dc__check_apart(l, fn, "out", &mo, "a_vectors", &qa));
  DC__TRY(dc__check_apart(l, fn, "out", &mo, "b_vectors", &qb));
  const dc__mat a_row = dc__elements(va, mx.dtype, mx.rows), b_row = dc__elements(vb, mx.dtype, mx.cols);
  DC__TRY(dc__check_apart(l, fn, "out", &mo, "a_values", &a_row));
  DC__TRY(dc__check_apart(l, fn, "out", &mo, "b_values", &b_row));
  DC__TRY(check_apart_or_same(l, fn, &mo, "x", &mx));
  const dc__kron_inverse inverse = {
      .a_vectors = &qa, .b_vectors = &qb, .a_values = va, .b_values = vb, .damping = damping};
  return dc__kron_solve(l, fn, &inverse, &mx, &mo);
}

dc_status dc_kron_solve(dc_linalg *linalg, const dc_tensor *a_vectors, const dc_tensor *a_values,
                        const dc_tensor *b_vectors, const dc_tensor *b_values, double damping, const dc_tensor *x,
                        dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(
      linalg, matrix_kron_solve(__func__, linalg, a_vectors, a_values, b_vectors, b_values, damping, x, out));
}

static dc_status matrix_kron_nearest(const char *fn, dc_linalg *l, const dc_tensor *x, dc_tensor *a, dc_tensor *b,
                                     double *residual) {
  dc__mat mx, ma, mb;
  DC__TRY(read_real(fn, l, "x", x, DC__MAT_ANY, DC_DTYPE_NONE, &mx));
  DC__TRY(read_real(fn, l, "a", a, DC__MAT_OUT, DC_DTYPE_NONE, &ma));
  DC__TRY(read_real(fn, l, "b", b, DC__MAT_OUT, ma.dtype, &mb));
  DC__TRY(dc__mat_check_dtype(fn, "x", mx.dtype, "a", ma.dtype));
  DC__TRY(check_product(fn, "x", &mx, &ma, &mb));
  DC__TRY(dc__check_apart(l, fn, "a", &ma, "x", &mx));
  DC__TRY(dc__check_apart(l, fn, "b", &mb, "x", &mx));
  DC__TRY(dc__check_apart(l, fn, "a", &ma, "b", &mb));
  return dc__kron_nearest(l, fn, &mx, &ma, &mb, residual);
}

dc_status dc_kron_nearest(dc_linalg *linalg, const dc_tensor *x, dc_tensor *a, dc_tensor *b, double *residual) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, matrix_kron_nearest(__func__, linalg, x, a, b, residual));
}

/* ---- products ---- */

static dc_status check_factors(const char *fn, const dc__mat *a, const dc__mat *b, const dc__mat *out) {
  if (!dc__dtype_is_float(a->dtype)) {
    return dc__fail(DC_E_DTYPE, "%s: a is %s, must be a floating-point type", fn, dc_dtype_name(a->dtype));
  }
  DC__TRY(dc__mat_check_dtype(fn, "b", b->dtype, "a", a->dtype));
  DC__TRY(dc__check_length(fn, "b", "rows", b->rows, a->cols));
  return dc__check_matrix(fn, "out", out, out->batch, a->rows, b->cols);
}

static dc_status check_batch(const char *fn, const char *arg, const dc__mat *mat, int64_t batch) {
  return mat->batched ? dc__check_length(fn, arg, "matrices", mat->batch, batch) : DC_OK;
}

static dc_status matrix_batch_matmul(const char *fn, dc_linalg *l, const dc_tensor *a, const dc_tensor *b, double alpha,
                                     double beta, dc_tensor *out) {
  dc__mat ma, mb, mo;
  DC__TRY(dc__read_matrix(l, fn, "a", a, DC__MAT_GEMM, &ma));
  DC__TRY(dc__read_matrix(l, fn, "b", b, DC__MAT_GEMM, &mb));
  DC__TRY(dc__read_matrix(l, fn, "out", out, DC__MAT_OUT, &mo));
  DC__TRY(check_factors(fn, &ma, &mb, &mo));
  DC__TRY(check_batch(fn, "a", &ma, mo.batch));
  DC__TRY(check_batch(fn, "b", &mb, mo.batch));
  if (mo.dtype != ma.dtype && (mo.dtype != DC_FLOAT32 || ma.dtype == DC_FLOAT64)) {
    return dc__fail(DC_E_DTYPE, "%s: out is %s, must be %s as a, or float32 for 16-bit types", fn,
                    dc_dtype_name(mo.dtype), dc_dtype_name(ma.dtype));
  }
  if (!isfinite(alpha) || !isfinite(beta)) {
    return dc__fail(DC_E_INVALID, "%s: alpha = %g and beta = %g, must be finite", fn, alpha, beta);
  }
  DC__TRY(dc__check_apart(l, fn, "out", &mo, "a", &ma));
  DC__TRY(dc__check_apart(l, fn, "out", &mo, "b", &mb));
  return dc__batch_matmul(l, fn, &ma, &mb, alpha, beta, &mo);
}

dc_status dc_batch_matmul(dc_linalg *linalg, const dc_tensor *a, const dc_tensor *b, double alpha, double beta,
                          dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, matrix_batch_matmul(__func__, linalg, a, b, alpha, beta, out));
}

/* Data and file exclude each other, so that missing data or a forgotten descriptor is never taken for a file. */
static dc_status check_source(const char *fn, const char *arg, const dc_matrix_source *s, const dc_tensor *t) {
  if (s->in_file != 0 && s->in_file != 1) {
    return dc__fail(DC_E_INVALID, "%s: %s.in_file = %" PRId32 ", must be 0 or 1", fn, arg, s->in_file);
  }
  if (s->in_file == 0 && (s->fd != 0 || s->offset != 0)) {
    return dc__fail(DC_E_INVALID, "%s: %s.%s = %" PRId64 ", must be 0 unless in_file is 1", fn, arg,
                    s->fd != 0 ? "fd" : "offset", s->fd != 0 ? s->fd : s->offset);
  }
  if (s->in_file == 1 && t->data != NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s.tensor has data, must have none where in_file is 1", fn, arg);
  }
  return s->in_file == 1 && t->strides != NULL
             ? dc__fail(DC_E_SHAPE, "%s: %s is in a file, and must have no strides", fn, arg)
             : DC_OK;
}

static dc_status read_source(const dc_linalg *l, const char *fn, const char *arg, const dc_matrix_source *source,
                             int32_t layout, dc__matrix_source *read) {
  dc_matrix_source s = DC_MATRIX_SOURCE_INIT;
  dc_tensor t = DC_TENSOR_INIT;
  if (source == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL", fn, arg);
  }
  DC__TRY(dc__read_options(fn, arg, &s, sizeof s, source, MATRIX_SOURCE_SIZE_0_1));
  if (s.tensor == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s.tensor is NULL", fn, arg);
  }
  DC__TRY(dc__read_options(fn, arg, &t, sizeof t, s.tensor, DC__TENSOR_SIZE_0_1));
  DC__TRY(check_source(fn, arg, &s, &t));
  const bool file = s.in_file == 1;
  t.data = file ? &t : t.data; /* a placeholder, which dc__mat_read() does not access */
  DC__TRY(dc__mat_read(fn, arg, &t, layout, &read->mat));
  DC__TRY(no_batch(fn, arg, &read->mat));
  if (!file) {
    DC__TRY(dc__linalg_check_alignment(l, fn, arg, t.data, t.dtype));
  }
  read->mat.data = file ? NULL : t.data;
  read->in_file = file;
  read->fd = s.fd;
  read->offset = s.offset;
  return DC_OK;
}

static dc_status matmul_bounded(const char *fn, dc_linalg *l, const dc_matrix_source *a, const dc_matrix_source *b,
                                dc_matrix_source *out, int64_t budget_bytes, int64_t *needed) {
  dc__matrix_source sa, sb, so;
  if (budget_bytes < 1) {
    return dc__fail(DC_E_INVALID, "%s: budget_bytes = %" PRId64 ", must be >= 1", fn, budget_bytes);
  }
  DC__TRY(read_source(l, fn, "a", a, DC__MAT_GEMM, &sa));
  DC__TRY(read_source(l, fn, "b", b, DC__MAT_GEMM, &sb));
  DC__TRY(read_source(l, fn, "out", out, DC__MAT_OUT, &so));
  DC__TRY(check_factors(fn, &sa.mat, &sb.mat, &so.mat));
  int32_t wanted = sa.mat.dtype == DC_FLOAT64 ? DC_FLOAT64 : DC_FLOAT32;
  if (so.mat.dtype != wanted) {
    return dc__fail(DC_E_DTYPE, "%s: out is %s, must be %s", fn, dc_dtype_name(so.mat.dtype), dc_dtype_name(wanted));
  }
  if (!so.in_file) {
    DC__TRY(sa.in_file ? DC_OK : dc__check_apart(l, fn, "out", &so.mat, "a", &sa.mat));
    DC__TRY(sb.in_file ? DC_OK : dc__check_apart(l, fn, "out", &so.mat, "b", &sb.mat));
  }
  return dc__matmul_bounded(l, fn, &sa, &sb, &so, budget_bytes, needed);
}

dc_status dc_matmul_bounded(dc_linalg *linalg, const dc_matrix_source *a, const dc_matrix_source *b,
                            dc_matrix_source *out, int64_t budget_bytes, int64_t *needed) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, matmul_bounded(__func__, linalg, a, b, out, budget_bytes, needed));
}
