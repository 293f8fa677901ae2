/* Eigendecomposition of one matrix, or its root without one: by its tridiagonal form and LAPACK, or where that fails,
 * or there is none, by the plain solver. */
#include <math.h>

#include "linalg/spectral.h"

static bool plain(int64_t n, dc__task *t) {
  t->path = DC_PATH_PLAIN;
  bool done = dc__eigen_plain(n, t->s, t->values, t->work);
  for (int64_t i = 0; i < n; i++) {
    done = done && isfinite(t->values[i]);
  }
  return done;
}

/* Reads the matrix in float64: another type was wanted, or s is spoilt. */
static bool again(const dc__job *job, int64_t index, dc__task *t) {
  t->dtype = DC_FLOAT64;
  return dc__symmetric_load(job, index, t);
}

bool dc__decompose(const dc__job *job, int64_t index, dc__task *t, int32_t root, int32_t dtype, void *scratch) {
  if (t->dtype != DC_FLOAT64 && !again(job, index, t)) {
    return false;
  }
  if (job->l->blas != NULL && dc__tridiagonal_solve(job, t, root, dtype, scratch)) {
    return true;
  }
  t->solved = (job->l->blas == NULL || again(job, index, t)) && plain(job->n, t);
  if (!t->solved) {
    t->status = DC_E_NOT_CONVERGED;
  }
  return t->solved;
}
