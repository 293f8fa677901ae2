/* The arguments of the kernels for the nearest Kronecker product (kron_nearest.cu), as the host and the device see
 * them. */
#ifndef DC_KERNELS_CUDA_KRON_NEAREST_ARGS_H
#define DC_KERNELS_CUDA_KRON_NEAREST_ARGS_H

#include "kernels/cuda/matrix/matrix_args.h"
#include "kernels/eigen/nearest_kron.h"

/* The power iteration for the nearest Kronecker product: x times `first` times `second` as a matrix of blocks. u [m, n]
 * is on the left and v [p, q] on the right; all are float64 but x. A vector is computed in chunks of the blocks' rows,
 * each in `parts` [chunks, elements]. It is then summed into `next`, with its squares by blocks of threads, and
 * normalised. */
enum { DC__CUDA_NEAREST_BLOCKS = 256 };
typedef struct dc__cuda_nearest_result {
  dc__nearest_state state;
  uint64_t change; /* the bits of the largest change of v */
  double trace;    /* of v */
} dc__cuda_nearest_result;
typedef struct dc__cuda_nearest_args {
  dc__cuda_matrices x;
  double first, second;
  int64_t m, n, p, q;
  double *u, *v, *parts, *next, *squares, *traces; /* the last two [DC__CUDA_NEAREST_BLOCKS] */
  double *residual_sums;                           /* [2, m p] */
  dc__cuda_nearest_result *result;
  double tolerance;
  int32_t chunks[2]; /* of v and of u */
  int32_t inner;     /* 1: computes v, 0: u */
} dc__cuda_nearest_args;

#endif
