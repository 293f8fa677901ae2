/* The arguments of the kernels for orthogonal iteration (orthogonal_iteration.cu), as the host and the device see them.
 */
#ifndef DC_KERNELS_CUDA_ORTHOGONAL_ITERATION_ARGS_H
#define DC_KERNELS_CUDA_ORTHOGONAL_ITERATION_ARGS_H

#include "kernels/cuda/matrix/matrix_args.h"

/* A step of orthogonal iteration (linalg/eigh/orthogonal_iteration_cuda.c), all [count, n, n] dense with a vector a
 * row. `values` are the products of the vectors q with their images p, and order the vectors, the largest first.
 * `sorted` are the images in that order. Then QR's result goes into the columns of the matrices at `to`, if QR
 * succeeded and is finite. */
typedef struct dc__cuda_basis_args {
  const float *q, *p;
  float *sorted;
  double *values; /* [count, n] */
  const dc__cuda_matrix_stats *reports;
  void *const *to;        /* of the device, as the next: each matrix's address */
  int64_t *const *orders; /* each order [n]: that of the images, or 0, 1, ... if the matrix stays unchanged */
  int32_t *found;         /* [count, 2]: not 0 until QR succeeds */
  int32_t *failed;        /* [count]: 1 if the matrix stays unchanged */
  int64_t n;
  int32_t count;
} dc__cuda_basis_args;

#endif
