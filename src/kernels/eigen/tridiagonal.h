/* The parts of a symmetric matrix's reduction to tridiagonal form that are not matrix products, and functions of the
 * tridiagonal matrix, all in float64. One source (tridiagonal_tmpl.h) is compiled for every instruction set; the order
 * of sums differs between them. */
#ifndef DC_KERNELS_TRIDIAGONAL_H
#define DC_KERNELS_TRIDIAGONAL_H

#include "base/base.h"

/* y = A x. A [n, n] is given by its lower triangle, with rows `ld` apart. The blocks of DC__TRIDIAGONAL_BLOCK rows
 * along the diagonal must be filled in above it as well. */
enum { DC__TRIDIAGONAL_BLOCK = 8 };
void dc__tridiagonal_symv(double *y, const double *a, int64_t ld, const double *x, int64_t n);
/* sums[k] = row k times x, for `count` rows of n elements. */
void dc__tridiagonal_gemv(double *sums, const double *rows, int64_t ld, int64_t count, const double *x, int64_t n);
/* y += sum over k of factors[k] times row k. */
void dc__tridiagonal_gemv_t(double *y, const double *rows, int64_t ld, int64_t count, const double *factors, int64_t n);

/* The smallest and the largest eigenvalue of the tridiagonal matrix T, to the last digits of the larger one. T has the
 * diagonal d [n] and off[i] between i - 1 and i; off[0] is not used. */
void dc__tridiagonal_eigenvalue_bounds(const double *d, const double *off, int64_t n, double *min, double *max);

/* The lower triangle of f [n, n] = sum over k of weights[k] (T + shifts[k] I)^-1. T is positive definite, and shifts
 * are at least 0. Above the diagonal, the blocks of DC__TRIDIAGONAL_BLOCK columns along it may become zero, and the
 * rest is not touched. scratch has DC__TRIDIAGONAL_SCRATCH(n) elements. */
enum { DC__TRIDIAGONAL_SHIFTS = 64 };
#define DC__TRIDIAGONAL_SCRATCH(n) (DC__TRIDIAGONAL_SHIFTS * (2 * (n) + DC__TRIDIAGONAL_BLOCK) + (n))
void dc__tridiagonal_shifted_inverses(double *f, const double *d, const double *off, int64_t n,
                                      const double shifts[DC__TRIDIAGONAL_SHIFTS],
                                      const double weights[DC__TRIDIAGONAL_SHIFTS], double *scratch);

#endif
