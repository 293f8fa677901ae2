/* The plain version of tridiagonal.h, and the choice of the version to use. */
#include "kernels/eigen/tridiagonal.h"

#define TRIDIAGONAL dc__tridiagonal_plain
#include "kernels/eigen/tridiagonal_tmpl.h"

static const dc__tridiagonal *chosen(void) {
  const dc__tridiagonal *fast = dc__active_kernels()->tridiagonal;
  return fast != NULL ? fast : &dc__tridiagonal_plain;
}

void dc__tridiagonal_times(double *y, const double *a, int64_t ld, const double *x, int64_t n) {
  chosen()->times(y, a, ld, x, n);
}
void dc__tridiagonal_dots(double *sums, const double *rows, int64_t ld, int64_t count, const double *x, int64_t n) {
  chosen()->dots(sums, rows, ld, count, x, n);
}
void dc__tridiagonal_combine(double *y, const double *rows, int64_t ld, int64_t count, const double *factors,
                             int64_t n) {
  chosen()->combine(y, rows, ld, count, factors, n);
}
void dc__tridiagonal_ends(const double *d, const double *off, int64_t n, double *min, double *max) {
  chosen()->ends(d, off, n, min, max);
}
void dc__tridiagonal_inverses(double *f, const double *d, const double *off, int64_t n,
                              const double shifts[DC__TRIDIAGONAL_SHIFTS], const double weights[DC__TRIDIAGONAL_SHIFTS],
                              double *scratch) {
  chosen()->inverses(f, d, off, n, shifts, weights, scratch);
}
