/* The arguments of the kernels for Newton's iteration (inverse_root_newton.cu), as the host and the device see them. */
#ifndef DC_KERNELS_CUDA_INVERSE_ROOT_NEWTON_ARGS_H
#define DC_KERNELS_CUDA_INVERSE_ROOT_NEWTON_ARGS_H

#include "kernels/cuda/matrix/matrix_args.h"

/* A step of Newton's iteration: the distance of m from I, m's lower triangle mirrored, and the decision on the step. If
 * it is refused, next = x. All dense [count, n, n]. */
typedef struct dc__cuda_newton_args {
  void *m;
  const void *x;
  void *next;
  dc__cuda_matrix_stats *reports;
  int64_t n;
  uint32_t rough; /* a bit a matrix */
  int32_t count, wide;
  int32_t ended; /* 1: include matrices that have ended */
} dc__cuda_newton_args;

#endif
