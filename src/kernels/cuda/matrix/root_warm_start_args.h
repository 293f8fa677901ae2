/* The arguments of the kernels for warm starts of roots (root_warm_start.cu), as the host and the device see them. */
#ifndef DC_KERNELS_CUDA_ROOT_WARM_START_ARGS_H
#define DC_KERNELS_CUDA_ROOT_WARM_START_ARGS_H

#include "kernels/cuda/matrix/matrix_args.h"

/* `from` has the lower triangle of B = Q^T A Q, times 2^exponent; `to` is another array, both [count, n, n] dense. The
 * residual is D^-1/2 E D^-1/2, where E is B without its diagonal and factors [count, n] are D^-1/2. The root is the
 * lower triangular G of linalg/roots/root_warm_start.c, with factors D^(1/root). */
typedef struct dc__cuda_warm_start_args {
  const void *from;
  void *to;
  const double *factors;
  int64_t n;
  int32_t count, wide, to_wide;
  int32_t root;
  double first[DC__CUDA_BATCH_SLICE], second[DC__CUDA_BATCH_SLICE]; /* 2^exponent as a product */
} dc__cuda_warm_start_args;

#endif
