/* Roots of a matrix that changed little since its eigenvectors Q were computed. B = Q^T A Q has a regularised diagonal
 * D and a small rest E. To first order in E, f(B) is f(D) plus E times the divided differences of f, entry by entry
 * (Daletskii and Krein). For f = x^(-1/p) and y = D^(1/p) they are
 *   f[i, j] = -1 / (y_i y_j (y_i^(p-1) + y_i^(p-2) y_j + … + y_j^(p-1))).
 * That has no cancellation, so close eigenvalues, where eigenvectors turn, do no harm. To first order the sum is G G^T
 * with G lower triangular. G[i, i]^2 = f(D_i), and G[i, j] = (f[i, j] E[i, j]) / G[j, j]. So the root is (Q G) (Q G)^T,
 * positive definite, for half the work of Q f(B) Q^T. */
#include <math.h>

#include "linalg/eigh/eigh.h"

enum { ITERATIONS = 3 };

/* Reproducible pseudorandom numbers in [-1, 1). */
static double probe_value(int64_t i) {
  uint64_t x = ((uint64_t)i + 1) * UINT64_C(0x9E3779B97F4A7C15);
  x = (x ^ (x >> 31)) * UINT64_C(0xD6E8FEB86659FD93);
  return (double)(int64_t)((x ^ (x >> 32)) & 0xffffffff) / 2147483648.0 - 1;
}

void dc__warm_start_probes(void *v, int32_t dtype, int64_t n) {
  for (int64_t i = 0; i < n * DC__PROBES; i++) {
    dc__store_element(v, dtype == DC_FLOAT64, i, probe_value(i));
  }
}

double dc__orthonormal_tolerance(int32_t dtype) {
  return dtype == DC_FLOAT64 ? 1e-9 : 1e-3;
}

static double column_norm(const void *v, bool wide, int64_t n, int64_t column) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) {
    double x = dc__load_element(v, wide, i * DC__PROBES + column);
    sum += x * x;
  }
  return sqrt(sum);
}

/* Checks that Q^T (Q v) = v for random v, up to rounding. In practice every basis that is not orthonormal fails. */
static bool is_orthonormal(const dc__spectral_job *job, const dc__spectral_task *t, const void *q, void *v, void *qv,
                           void *back, void *scratch) {
  int64_t n = job->n;
  bool wide = t->dtype == DC_FLOAT64;
  double limit = dc__orthonormal_tolerance(t->dtype);
  dc__warm_start_probes(v, t->dtype, n);
  dc__spectral_gemm(job, t->dtype, false, q, v, DC__PROBES, qv, scratch);
  dc__spectral_gemm(job, t->dtype, true, q, qv, DC__PROBES, back, scratch);
  for (int64_t i = 0; i < n * DC__PROBES; i++) {
    if (!(fabs(dc__load_element(back, wide, i) - dc__load_element(v, wide, i)) <= limit)) {
      return false;
    }
  }
  return true;
}

/* Estimates |E|_2 of a symmetric matrix: the largest growth of a column of v in a step of power iteration. */
static double power_iteration_norm(const dc__spectral_job *job, const dc__spectral_task *t, const void *e, void *v,
                                   void *ev, void *scratch) {
  int64_t n = job->n;
  bool wide = t->dtype == DC_FLOAT64;
  double max_norm = 0;
  for (int32_t iteration = 0; iteration < ITERATIONS; iteration++) {
    for (int64_t column = 0; column < DC__PROBES; column++) {
      double norm = column_norm(v, wide, n, column);
      max_norm = iteration > 0 ? fmax(max_norm, norm) : 0;
      for (int64_t i = column; i < n * DC__PROBES; i += DC__PROBES) {
        dc__store_element(v, wide, i, norm > 0 ? dc__load_element(v, wide, i) / norm : 0);
      }
    }
    dc__spectral_gemm(job, t->dtype, false, e, v, DC__PROBES, ev, scratch);
    void *swap = v;
    v = ev;
    ev = swap;
  }
  for (int64_t column = 0; column < DC__PROBES; column++) {
    max_norm = fmax(max_norm, column_norm(v, wide, n, column));
  }
  return max_norm;
}

/* Sets values to b's regularised diagonal and e to D^-1/2 E D^-1/2, both triangles. b has its lower triangle only.
 * Returns false if an eigenvalue is not allowed. */
static bool split_diagonal(const dc__spectral_job *job, dc__spectral_task *t, const void *b, void *e) {
  int64_t n = job->n;
  dc__pow2_scale scale = dc__pow2_scale_of(t->exponent);
  bool wide = t->dtype == DC_FLOAT64;
  for (int64_t i = 0; i < n; i++) {
    t->values[i] = dc__pow2_scaled(dc__load_element(b, wide, i * n + i), scale);
  }
  if (!dc__regularise_eigenvalues(job,
                                  t)) { /* an approximate eigenvalue may be negative although the matrix's are not */
    t->status = DC_OK;
    return false;
  }
  double *inverse = t->values + n;
  for (int64_t i = 0; i < n; i++) {
    inverse[i] = 1 / sqrt(t->values[i]);
  }
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < i; j++) {
      dc__store_element(e, wide, i * n + j,
                        dc__pow2_scaled(dc__load_element(b, wide, i * n + j), scale) * inverse[i] * inverse[j]);
    }
    dc__store_element(e, wide, i * n + i, 0);
  }
  dc__mirror_lower(e, t->dtype, n);
  return true;
}

/* Computes in g a lower triangular G with G G^T = f(B) to first order. `rows` is scratch of 2 n elements. */
static void first_order_factor(const dc__spectral_job *job, const dc__spectral_task *t, const void *b, int32_t g_dtype,
                               void *g, double *rows) {
  int64_t n = job->n;
  dc__pow2_scale scale = dc__pow2_scale_of(t->exponent);
  bool wide = t->dtype == DC_FLOAT64;
  bool g_wide = g_dtype == DC_FLOAT64;
  int32_t p = job->r->root;
  double *restrict y = t->values + n;
  double *restrict sum = rows;
  double *restrict power = rows + n;
  for (int64_t i = 0; i < n; i++) {
    y[i] = pow(t->values[i], 1 / (double)p);
  }
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < i; j++) {
      sum[j] = power[j] = 1;
    }
    for (int32_t k = 1; k < p; k++) { /* Horner in y_i, with the powers of y_j */
      for (int64_t j = 0; j < i; j++) {
        power[j] *= y[j];
        sum[j] = sum[j] * y[i] + power[j];
      }
    }
    for (int64_t j = 0; j < i; j++) { /* the quotient over G[j, j] */
      double quotient = -dc__pow2_scaled(dc__load_element(b, wide, i * n + j), scale) / (y[i] * sqrt(y[j]) * sum[j]);
      dc__store_element(g, g_wide, i * n + j, quotient);
    }
    dc__store_element(g, g_wide, i * n + i, 1 / sqrt(y[i]));
    for (int64_t j = i + 1; j < n; j++) {
      dc__store_element(g, g_wide, i * n + j, 0);
    }
  }
}

static void cast_to_float(const double *from, float *to, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    to[i] = (float)from[i];
  }
}

/* float32 is enough for the remaining work if the allowed error hides its rounding. The root's entries span fewer
 * powers of ten than the matrix's. */
int32_t dc__warm_start_result_dtype(const dc__spectral_request *r, int32_t dtype) {
  bool enough = r->out.dtype == DC_FLOAT32 && r->options.tolerance >= (double)r->a.rows * dc__epsilon(DC_FLOAT32);
  return enough ? DC_FLOAT32 : dtype;
}

/* Computes the lower triangle of (Q G) (Q G)^T in p. b has B at first, and is as large as p. */
static void warm_start_result(const dc__spectral_job *job, dc__spectral_task *t, const void *q, void *p, void *b,
                              double *rows, void *scratch) {
  int64_t n = job->n;
  int32_t dtype = dc__warm_start_result_dtype(job->r, t->dtype);
  first_order_factor(job, t, b, dtype, p, rows);
  if (dtype != t->dtype) {
    float *narrowed = (float *)b + n * n; /* the second half of its memory */
    cast_to_float(q, narrowed, n * n);
    q = narrowed;
    t->dtype = dtype;
  }
  dc__spectral_trmm(job, dtype, q, p, b, scratch);
  dc__spectral_gemmt(job, dtype, false, true, b, b, p, scratch);
}

bool dc__root_warm_start(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch) {
  int64_t n = job->n;
  size_t item = dc_dtype_size(t->dtype);
  const void *q = (const char *)job->r->basis.data + (size_t)(index * n * n) * item;
  char *p = t->work;
  char *b = p + (size_t)(n * n) * item;
  char *v = b + (size_t)(n * n) * item;
  char *ev = v + (size_t)(n * DC__PROBES) * item;
  if (!is_orthonormal(job, t, q, v, ev, ev + (size_t)(n * DC__PROBES) * item, scratch)) {
    return false;
  }
  dc__spectral_gemm(job, t->dtype, false, t->s, q, n, p, scratch);
  dc__spectral_gemmt(job, t->dtype, true, false, q, p, b, scratch);
  if (!split_diagonal(job, t, b, p)) {
    return false;
  }
  double change = power_iteration_norm(job, t, p, v, ev, scratch);
  t->change = change * change;
  if (!(t->change <= job->r->options.tolerance)) {
    return false;
  }
  int32_t dtype = t->dtype;
  warm_start_result(job, t, q, p, b, (double *)(void *)((char *)t->work + 2 * (size_t)(n * n) * sizeof(double)),
                    scratch);
  bool stored = dc__symmetric_store(job, index, t, p);
  t->dtype = dtype;
  t->path = stored ? DC_PATH_WARM : t->path;
  return stored;
}
