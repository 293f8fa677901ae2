/* The arguments of the kernels for matrices (matrix.cu), as the host and the device see them. A slice is a few matrices
 * of a batch that go through the operators together; a grid's second axis, or its third, is the matrix. */
#ifndef DC_KERNELS_CUDA_MATRIX_ARGS_H
#define DC_KERNELS_CUDA_MATRIX_ARGS_H

#include "kernels/batch_slice.h"
#include "kernels/eigen/newton_convergence.h"

enum { DC__CUDA_MATRIX_THREADS = 256, DC__CUDA_TILE_THREADS = 128, DC__CUDA_MATRIX_TILE = 32 };

/* A batch of matrices as strides in elements, float32 or float64. */
typedef struct dc__cuda_matrices {
  void *data;
  void *const *pointers; /* of the device: each matrix's address, in place of data and batch_stride; may be NULL */
  int64_t batch_stride, row_stride, col_stride;
  int64_t rows, cols;
  int32_t count, wide; /* wide: float64 */
} dc__cuda_matrices;

/* The device's report on a matrix. Magnitudes are the bits of a double. They have the order of the numbers, with NaN
 * last, so the largest does not depend on the order of threads. */
typedef struct dc__cuda_matrix_stats {
  uint64_t max_abs;      /* the largest entry */
  uint64_t max_combined; /* the largest entry of low times the lower triangle plus high times the upper one */
  uint64_t asymmetry;    /* half the largest difference of two entries that mirror each other */
  uint64_t distance;     /* from I */
  double norm;
  int32_t refused; /* 1: the last step was refused */
  int32_t reserved;
  dc__newton_state newton;
} dc__cuda_matrix_stats;

/* `max_abs` of each matrix. If low + high is not 0, which needs square ones, also `max_combined` and `asymmetry`. */
typedef struct dc__cuda_measure_args {
  dc__cuda_matrices from;
  dc__cuda_matrix_stats *reports;
  double low, high;
} dc__cuda_measure_args;

/* to = from times factor. If low + high is not 0, `to` is symmetric: low times the lower triangle plus high times the
 * upper one of a square `from`. With reports, the factor is the power of two that brings the largest entry near 1:
 * `max_combined` of a symmetric `to`, else `max_abs`. With `unit` it is 1 over the larger of unit and the length, which
 * is the root of `norm`. Only matrices with their bit in `mask` are written. */
typedef struct dc__cuda_load_args {
  dc__cuda_matrices from, to;
  const dc__cuda_matrix_stats *reports; /* NULL: factors */
  double low, high;
  double unit; /* 0: none */
  uint32_t mask;
  double factor[DC__CUDA_BATCH_SLICE];
} dc__cuda_load_args;

/* `norm`: the largest sum of a row's magnitudes, or with `squares` the sum of all squares. sums [count, rows]. */
typedef struct dc__cuda_matrix_norm_args {
  dc__cuda_matrices from;
  double *sums;
  dc__cuda_matrix_stats *reports;
  int32_t squares;
} dc__cuda_matrix_norm_args;

/* to = factor from + shift I, both dense; with reports, to = I where Newton's iteration has ended. */
typedef struct dc__cuda_affine_args {
  const void *from;
  void *to;
  const dc__cuda_matrix_stats *reports;
  int64_t rows, cols;
  int32_t count, wide;
  double factor[DC__CUDA_BATCH_SLICE], shift[DC__CUDA_BATCH_SLICE];
} dc__cuda_affine_args;

/* x[i][j] *= factors[i], x [count, rows, cols] and dense, factors [count, rows]. */
typedef struct dc__cuda_scale_args {
  void *x;
  const double *factors;
  int64_t rows, cols;
  int32_t count, wide;
} dc__cuda_scale_args;

#endif
