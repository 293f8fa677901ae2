/* Matrix powers from eigenvectors and eigenvalues, stored in the caller's memory, and products for them. */
#include <float.h>
#include <math.h>

#include "linalg/eigh/eigh.h"

enum { BLOCK = DC__TRIANGLE_BLOCK, WIDE = 128 }; /* rows and columns of a triangle's blocks */

static dc__threadpool *power_pool(const dc__spectral_job *job) {
  return job->serial ? NULL : job->l->pool;
}

dc__gemm dc__square_gemm(int32_t dtype, int64_t n, const void *a, const void *b, void *c) {
  return dc__gemm_dense(dtype, false, false, n, n, n, a, b, c);
}

void dc__spectral_gemm(const dc__spectral_job *job, int32_t dtype, bool trans_a, const void *a, const void *b,
                       int64_t cols, void *c, void *scratch) {
  dc__gemm g = dc__square_gemm(dtype, job->n, a, b, c);
  g.trans_a = trans_a;
  g.n = g.ldb = g.ldc = cols;
  dc__gemm_on(power_pool(job), &g, scratch);
}

void dc__spectral_trmm(const dc__spectral_job *job, int32_t dtype, const void *a, const void *lower, void *c,
                       void *scratch) {
  int64_t n = job->n;
  for (int64_t j = 0; j < n; j += WIDE) { /* columns j … of c: rows above j of the triangle are zero there */
    dc__gemm g = dc__square_gemm(dtype, n, dc__element_ptr(a, dtype, j), dc__element_ptr(lower, dtype, j * n + j),
                                 dc__element_ptr(c, dtype, j));
    g.n = n - j < WIDE ? n - j : WIDE;
    g.k = n - j;
    dc__gemm_on(power_pool(job), &g, scratch);
  }
}

void dc__gemmt(dc__threadpool *pool, const dc__gemm *whole, void *scratch) {
  for (int64_t i = 0; i < whole->m; i += BLOCK) {
    int64_t rows = whole->m - i < BLOCK ? whole->m - i : BLOCK;
    dc__gemm g = *whole;
    g.m = rows;
    g.n = i + rows;
    g.a = dc__element_ptr(whole->a, whole->dtype, whole->trans_a ? i : i * whole->lda);
    g.c = dc__element_ptr(whole->c, whole->dtype, i * whole->ldc);
    dc__gemm_on(pool, &g, scratch);
  }
}

void dc__spectral_gemmt(const dc__spectral_job *job, int32_t dtype, bool trans_a, bool trans_b, const void *a,
                        const void *b, void *c, void *scratch) {
  dc__gemm g = dc__square_gemm(dtype, job->n, a, b, c);
  g.trans_a = trans_a;
  g.trans_b = trans_b;
  dc__gemmt(power_pool(job), &g, scratch);
}

dc__gemm dc__syrk_gemm(bool trans, int64_t n, int64_t k, const float *a, double alpha, double beta, float *c) {
  dc__gemm g = dc__gemm_dense(DC_FLOAT32, trans, !trans, n, n, k, a, a, c);
  g.alpha = alpha;
  g.beta = beta;
  return g;
}

void dc__syrk(dc__threadpool *pool, void *scratch, bool trans, int64_t n, int64_t k, const float *a, double alpha,
              double beta, float *c) {
  const dc__gemm g = dc__syrk_gemm(trans, n, k, a, alpha, beta, c);
  dc__gemmt(pool, &g, scratch);
  dc__mirror_lower(c, DC_FLOAT32, n);
}

/* Maps one eigenvalue; NaN if it is not allowed. */
static double regularise_one(const dc_spectral_options *o, double value, double rounding, double cut, double epsilon) {
  if (o->negative == DC_NEGATIVE_FLOOR) {
    return fmax(value + epsilon, epsilon);
  }
  if (value < 0) {
    if (-value > rounding && o->negative == DC_NEGATIVE_REFUSE) {
      return NAN;
    }
    value = 0;
  }
  return value <= cut ? -1 : value + epsilon;
}

bool dc__regularise_eigenvalues(const dc__spectral_job *job, dc__spectral_task *t) {
  const dc_spectral_options *o = &job->r->options;
  double unit =
      (double)job->n * dc__epsilon(job->r->a.dtype); /* the input's rounding error, whatever the compute type */
  t->smallest = INFINITY;
  t->largest = -INFINITY;
  for (int64_t i = 0; i < job->n; i++) {
    t->smallest = fmin(t->smallest, t->values[i]);
    t->largest = fmax(t->largest, t->values[i]);
  }
  double max_eig = fmax(t->largest, 0);
  double cut = o->rank_rtol == 0 ? -1 : (o->rank_rtol < 0 ? unit : o->rank_rtol) * max_eig;
  t->epsilon = fmax(o->eps_abs, o->eps_rel * max_eig);
  for (int64_t i = 0; i < job->n; i++) {
    double value = regularise_one(o, t->values[i], 64 * unit * max_eig, cut, t->epsilon);
    if (isnan(value) || (value == 0 && job->r->power < 0)) {
      t->status = DC_E_NOT_POSITIVE;
      return false;
    }
    t->values[i] = value;
  }
  return true;
}

bool dc__eigh_fits(const dc__spectral_job *job, dc__spectral_task *t) {
  const double limit = job->r->a.dtype == DC_FLOAT64 ? DBL_MAX : (double)FLT_MAX;
  t->smallest = t->values[0];
  t->largest = t->values[job->n - 1];
  const bool fits = fmax(fabs(t->smallest), fabs(t->largest)) <= limit;
  t->status = fits ? t->status : DC_E_NOT_FINITE;
  return fits;
}

static bool finish_eigh(const dc__spectral_job *job, int64_t index, dc__spectral_task *t) {
  const dc__spectral_request *r = job->r;
  int64_t n = job->n;
  bool wide = r->a.dtype == DC_FLOAT64;
  bool descending = r->options.descending == 1;
  if (!dc__eigh_fits(job, t)) {
    return false;
  }
  for (int64_t i = 0; i < n && r->values != NULL; i++) {
    dc__store_element(r->values, wide, index * n + i, t->values[descending ? n - 1 - i : i]);
  }
  if (r->vectors) {
    dc__eigenvectors_store(job, index, t, &r->out, descending);
  }
  return true;
}

/* V diag(f) V^T = Y^T Y, where the rows of Y are sqrt(f) times the eigenvectors: it is symmetric, so half the work.
 * Eigenvectors are stored to the basis only if the result fits. */
static bool finish_power(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch) {
  const dc__spectral_request *r = job->r;
  int64_t n = job->n;
  bool wide = t->dtype == DC_FLOAT64;
  void *scaled = dc__element_ptr(t->work, t->dtype, n * n);
  if (!dc__regularise_eigenvalues(job, t)) {
    return false;
  }
  for (int64_t row = 0; row < n; row++) {
    double value = t->values[row];
    double root = value < 0 ? 0 : sqrt(pow(value, r->power));
    for (int64_t i = 0; i < n; i++) {
      dc__store_element(scaled, wide, row * n + i, root * dc__load_element(t->s, wide, row * n + i));
    }
  }
  dc__spectral_gemmt(job, t->dtype, true, false, scaled, scaled, t->work, scratch);
  if (!dc__symmetric_store(job, index, t, t->work)) {
    t->status = DC_E_NOT_FINITE;
    return false;
  }
  if (r->basis.data != NULL) {
    dc__eigenvectors_store(job, index, t, &r->basis, false);
  }
  return true;
}

bool dc__spectral_finish(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch) {
  for (int64_t i = 0; i < job->n; i++) {
    t->values[i] = ldexp(t->values[i], t->exponent);
  }
  return job->r->op == DC__SPECTRAL_EIGH ? finish_eigh(job, index, t) : finish_power(job, index, t, scratch);
}
