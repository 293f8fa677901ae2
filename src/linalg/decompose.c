/* Eigendecomposition of one matrix: LAPACK in the computing type, then in float64, then the plain solver. LAPACK's
 * info is not enough: OpenBLAS has been seen to return 0 with values that are not finite. */
#include <math.h>

#include "linalg/spectral.h"

static bool finite_values(const dc__task *t, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    if (!isfinite(t->values[i])) {
      return false;
    }
  }
  return true;
}

/* A row-major symmetric matrix is a column-major one; its eigenvectors come as columns of that, rows of ours. */
static bool lapack(const dc_linalg *l, int64_t n, dc__task *t) {
  int32_t order = (int32_t)n;
  int32_t size = (int32_t)(1 + 6 * n + 2 * n * n);
  int32_t isize = (int32_t)(3 + 5 * n);
  int32_t info = 0;
  if (t->dtype == DC_FLOAT64) {
    l->blas->dsyevd("V", "L", &order, t->s, &order, t->values, t->work, &size, t->iwork, &isize, &info, 1, 1);
  } else {
    float *values = (float *)(t->values + n); /* behind the place of the wide ones */
    l->blas->ssyevd("V", "L", &order, t->s, &order, values, t->work, &size, t->iwork, &isize, &info, 1, 1);
    for (int64_t i = 0; i < n; i++) {
      t->values[i] = (double)values[i];
    }
  }
  return info == 0 && finite_values(t, n);
}

static bool plain(int64_t n, dc__task *t) {
  t->path = DC_PATH_PLAIN;
  return dc__eigen_plain(n, t->s, t->values, t->work) && finite_values(t, n);
}

/* The solver spoilt s: reads the matrix again, for float64. */
static bool again(const dc__job *job, int64_t index, dc__task *t) {
  t->dtype = DC_FLOAT64;
  return dc__symmetric_load(job, index, t);
}

bool dc__decompose(const dc__job *job, int64_t index, dc__task *t) {
  int64_t n = job->n;
  t->path = DC_PATH_FRESH;
  bool done = false;
  if (job->l->blas == NULL) {
    done = (t->dtype == DC_FLOAT64 || again(job, index, t)) && plain(n, t);
  } else {
    done = lapack(job->l, n, t);
    if (!done && t->dtype == DC_FLOAT32) {
      t->path = DC_PATH_RETRIED;
      done = again(job, index, t) && lapack(job->l, n, t);
    }
    if (!done) {
      done = again(job, index, t) && plain(n, t);
    }
  }
  t->solved = done;
  if (!done) {
    t->status = DC_E_NOT_CONVERGED;
  }
  return done;
}
