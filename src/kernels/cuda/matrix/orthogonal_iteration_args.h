/* The arguments of the kernels for orthogonal iteration (orthogonal_iteration.cu), as the host and the device see them.
 */
#ifndef DC_KERNELS_CUDA_ORTHOGONAL_ITERATION_ARGS_H
#define DC_KERNELS_CUDA_ORTHOGONAL_ITERATION_ARGS_H

#include "kernels/cuda/matrix/matrix_args.h"

/* A step of orthogonal iteration (linalg/eigh/orthogonal_iteration_cuda.c), all [count, n, n] dense with a vector a
 * row: the order of the vectors q, the largest first, by `values`, their products with their images p; the images in
 * that order, to `sorted`; and what QR has made of those into the columns of the matrices at `to`, where all of it was
 * done and is finite. */
typedef struct dc__cuda_basis_args {
  const float *q, *p;
  float *sorted;
  double *values; /* [count, n] */
  const dc__cuda_matrix_stats *reports;
  void *const *to;        /* of the device, as the next: where each matrix begins, */
  int64_t *const *orders; /* and each order [n]: that of the images, or 0, 1, ... where the matrix stays as it was */
  int32_t *found;         /* [count, 2]: not 0 until QR says so */
  int32_t *failed;        /* [count]: 1 where it stays */
  int64_t n;
  int32_t count;
} dc__cuda_basis_args;

#endif
