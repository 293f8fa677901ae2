/* A step of orthogonal iteration: from approximate eigenvectors Q of A to better ones, A Q made orthonormal by
 * Householder's QR. Columns are ordered by the diagonal of Q^T A Q, the largest first, so that each is
 * orthogonalised against the dominant ones. Golub and Van Loan, Matrix Computations, section 8.2. In memory the
 * vectors are rows, which LAPACK reads as columns. */
#include <math.h>
#include <string.h>

#include "linalg/eigh/eigh.h"

/* Loads the columns of the caller's basis into q's rows. */
static void iteration_load_basis(const dc__spectral_job *job, int64_t index, const dc__spectral_task *t, void *q) {
  const dc__mat *basis = &job->r->basis;
  bool wide = t->dtype == DC_FLOAT64;
  bool source = basis->dtype == DC_FLOAT64;
  for (int64_t i = 0; i < job->n; i++) {
    for (int64_t j = 0; j < job->n; j++) {
      dc__store_element(q, wide, j * job->n + i,
                        dc__load_element(basis->data, source, dc__mat_offset(basis, index, i, j)));
    }
  }
}

/* Sets values to the diagonal of Q^T A Q and the order to sort by it, the largest first; p = A q. Insertion sort is
 * fast, since they are nearly sorted. Returns false if a value is not finite. */
static bool sort_columns(const dc__spectral_job *job, dc__spectral_task *t, const void *q, const void *p) {
  int64_t n = job->n;
  bool wide = t->dtype == DC_FLOAT64;
  for (int64_t k = 0; k < n; k++) {
    double value = 0;
    for (int64_t i = k * n; i < k * n + n; i++) {
      value += dc__load_element(q, wide, i) * dc__load_element(p, wide, i);
    }
    if (!isfinite(value)) {
      return false;
    }
    int64_t at = k;
    for (; at > 0 && t->values[job->r->order[at - 1]] < value; at--) {
      job->r->order[at] = job->r->order[at - 1];
    }
    job->r->order[at] = k;
    t->values[k] = value;
  }
  return true;
}

static bool qr_lapack(const dc_linalg *l, int64_t n, dc__spectral_task *t) {
  void *tau = t->values + n;
  const int32_t order = (int32_t)n;
  const int32_t size = (int32_t)(n < 32 ? n : 32 * n); /* `work` is larger */
  int32_t info = 0;
  if (t->dtype == DC_FLOAT64) {
    l->blas->dgeqrf(&order, &order, t->s, &order, tau, t->work, &size, &info);
    if (info == 0) {
      l->blas->dorgqr(&order, &order, &order, t->s, &order, tau, t->work, &size, &info);
    }
  } else {
    l->blas->sgeqrf(&order, &order, t->s, &order, tau, t->work, &size, &info);
    if (info == 0) {
      l->blas->sorgqr(&order, &order, &order, t->s, &order, tau, t->work, &size, &info);
    }
  }
  return info == 0;
}

/* y -= tau (v^T y) v */
static void apply_reflector(const double *v, double tau, double *y, int64_t count) {
  double product = 0;
  for (int64_t i = 0; i < count; i++) {
    product += v[i] * y[i];
  }
  for (int64_t i = 0; i < count; i++) {
    y[i] -= tau * product * v[i];
  }
}

/* Replaces `row` by the Householder vector that zeroes all but its first element. Returns the vector's factor, or 0 if
 * they are zero already. */
static double make_reflector(double *row, int64_t count) {
  double norm = 0;
  for (int64_t i = 1; i < count; i++) {
    norm = hypot(norm, row[i]);
  }
  if (norm == 0) {
    return 0;
  }
  double head = row[0] + copysign(hypot(row[0], norm), row[0]);
  for (int64_t i = 1; i < count; i++) {
    row[i] /= head;
  }
  row[0] = 1;
  return 2 / (1 + (norm / head) * (norm / head));
}

/* qr_lapack() without LAPACK, in float64. */
static void qr_reference(int64_t n, double *s, double *tau) {
  for (int64_t k = 0; k < n; k++) {
    double *v = s + k * n + k;
    tau[k] = make_reflector(v, n - k);
    for (int64_t j = k + 1; j < n && tau[k] != 0; j++) {
      apply_reflector(v, tau[k], s + j * n + k, n - k);
    }
  }
  for (int64_t k = n - 1; k >= 0; k--) { /* the product of all reflections, from the last one on */
    double *v = s + k * n + k;
    for (int64_t j = k + 1; j < n; j++) {
      apply_reflector(v, tau[k], s + j * n + k, n - k);
    }
    for (int64_t i = n - 1; i >= k; i--) {
      s[k * n + i] = (i == k) - tau[k] * (tau[k] != 0 ? s[k * n + i] : 0);
    }
    memset(s + k * n, 0, (size_t)k * sizeof *s);
  }
}

static bool all_finite(const dc__spectral_task *t, int64_t count) {
  bool finite = true;
  for (int64_t i = 0; i < count; i++) {
    finite = finite && isfinite(dc__load_element(t->s, t->dtype == DC_FLOAT64, i));
  }
  return finite;
}

void dc__orthogonal_iteration_step(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch) {
  int64_t n = job->n;
  if (job->l->blas == NULL && t->dtype != DC_FLOAT64) {
    t->dtype = DC_FLOAT64;
    (void)dc__symmetric_load(job, index, t); /* it succeeded before, so it does now */
  }
  size_t row = (size_t)n * dc_dtype_size(t->dtype);
  char *q = t->work;
  char *p = q + (size_t)n * row;
  char *s = t->s;
  iteration_load_basis(job, index, t, q);
  dc__spectral_gemm(job, t->dtype, false, q, t->s, n, p, scratch);
  if (!sort_columns(job, t, q, p)) {
    t->status = DC_E_NOT_CONVERGED;
    return;
  }
  for (int64_t k = 0; k < n; k++) {
    memcpy(s + (size_t)k * row, p + (size_t)job->r->order[k] * row, row);
  }
  bool done = job->l->blas == NULL || qr_lapack(job->l, n, t);
  if (job->l->blas == NULL) {
    qr_reference(n, t->s, t->values + n);
  }
  if (!done || !all_finite(t, n * n)) {
    t->status = DC_E_NOT_CONVERGED;
    return;
  }
  t->path = DC_PATH_WARM;
  dc__eigenvectors_store(job, index, t, &job->r->out, false);
}
