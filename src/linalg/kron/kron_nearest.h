/* The nearest Kronecker product, internal: shared by the CPU (kron_nearest.c) and CUDA (kron_nearest_cuda.c). */
#ifndef DC_LINALG_KRON_NEAREST_H
#define DC_LINALG_KRON_NEAREST_H

#include <math.h>

#include "linalg/linalg.h"

/* Tolerance for v's change in the last step. */
static inline double dc__nearest_tolerance(int32_t dtype) {
  return 8 * dc__epsilon(dtype);
}

/* x is scaled by 2^-exponent. The exponent is even, so that a and b get the same half of it. */
static inline int dc__nearest_exponent(double max_abs) {
  return max_abs > 0 ? ilogb(max_abs) & ~1 : 0;
}

/* Raises *max_abs to x's largest magnitude. Returns DC_E_NOT_FINITE, with the position in the error text, for a NaN or
 * an infinity. `first` is the index of x's first row. */
dc_status dc__nearest_check_finite(const char *fn, const dc__mat *x, int64_t first, double *max_abs);
dc_status dc__nearest_not_converged(const char *fn); /* DC_E_NOT_CONVERGED */

dc_status dc__kron_nearest_cuda(dc_linalg *l, const char *fn, const dc__mat *x, const dc__mat *a, const dc__mat *b,
                                double *residual);

#endif
