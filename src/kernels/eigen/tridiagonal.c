/* The plain version of tridiagonal.h, and the choice of the version to use. */
#include "kernels/eigen/tridiagonal.h"

#define TRIDIAGONAL dc__tridiagonal_plain
#include "kernels/eigen/tridiagonal_tmpl.h"

static const dc__tridiagonal *active_tridiagonal(void) {
  const dc__tridiagonal *fast = dc__active_kernels()->tridiagonal;
  return fast != NULL ? fast : &dc__tridiagonal_plain;
}

void dc__tridiagonal_symv(double *y, const double *a, int64_t ld, const double *x, int64_t n) {
  active_tridiagonal()->symv(y, a, ld, x, n);
}
void dc__tridiagonal_gemv(double *sums, const double *rows, int64_t ld, int64_t count, const double *x, int64_t n) {
  active_tridiagonal()->gemv(sums, rows, ld, count, x, n);
}
void dc__tridiagonal_gemv_t(double *y, const double *rows, int64_t ld, int64_t count, const double *factors,
                            int64_t n) {
  active_tridiagonal()->gemv_t(y, rows, ld, count, factors, n);
}
void dc__tridiagonal_eigenvalue_bounds(const double *d, const double *off, int64_t n, double *min, double *max) {
  active_tridiagonal()->eigenvalue_bounds(d, off, n, min, max);
}
void dc__tridiagonal_shifted_inverses(double *f, const double *d, const double *off, int64_t n,
                                      const double shifts[DC__TRIDIAGONAL_SHIFTS],
                                      const double weights[DC__TRIDIAGONAL_SHIFTS], double *scratch) {
  active_tridiagonal()->shifted_inverses(f, d, off, n, shifts, weights, scratch);
}
