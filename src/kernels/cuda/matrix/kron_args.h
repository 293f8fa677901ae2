/* The arguments of the kernels for Kronecker products (kron.cu), as the host and the device see them. */
#ifndef DC_KERNELS_CUDA_KRON_ARGS_H
#define DC_KERNELS_CUDA_KRON_ARGS_H

#include "kernels/cuda/matrix/matrix_args.h"

/* to = a kron b. */
typedef struct dc__cuda_kron_args {
  dc__cuda_matrices a, b, to;
} dc__cuda_kron_args;

/* x[i][j] /= a[i] b[j] + damping, x dense [count, rows, cols]. *refused becomes 1 if a divisor is not positive; refused
 * may be NULL. */
typedef struct dc__cuda_damp_args {
  void *x;
  const void *a, *b; /* [count, rows], [count, cols] */
  int64_t count, rows, cols;
  double damping;
  uint64_t *refused;
  int32_t wide;
} dc__cuda_damp_args;

#endif
