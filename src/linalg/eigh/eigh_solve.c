/* Eigendecomposition of one matrix, or its root without one, by tridiagonal form and LAPACK. The reference solver is
 * used if LAPACK is missing or fails. */
#include <math.h>

#include "linalg/eigh/eigh.h"

static bool solve_reference(int64_t n, dc__spectral_task *t) {
  t->path = DC_PATH_PLAIN;
  bool done = dc__eigh_reference(n, t->s, t->values, t->work);
  for (int64_t i = 0; i < n; i++) {
    done = done && isfinite(t->values[i]);
  }
  return done;
}

/* Reloads the matrix in float64, since s has another type or was overwritten. */
static bool reload_float64(const dc__spectral_job *job, int64_t index, dc__spectral_task *t) {
  t->dtype = DC_FLOAT64;
  return dc__symmetric_load(job, index, t);
}

bool dc__eigh_solve(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, int32_t root, int32_t dtype,
                    void *scratch) {
  if (t->dtype != DC_FLOAT64 && !reload_float64(job, index, t)) {
    return false;
  }
  if (job->l->blas != NULL && dc__tridiagonal_solve(job, t, root, dtype, scratch)) {
    return true;
  }
  t->solved = (job->l->blas == NULL || reload_float64(job, index, t)) && solve_reference(job->n, t);
  if (!t->solved) {
    t->status = DC_E_NOT_CONVERGED;
  }
  return t->solved;
}
