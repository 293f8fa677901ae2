/* The arguments of K-FAC's kernels (kfac.cu), as the host and the device see them. */
#ifndef DC_KERNELS_CUDA_KFAC_ARGS_H
#define DC_KERNELS_CUDA_KFAC_ARGS_H

#include <stdint.h>

enum { DC__CUDA_KFAC_THREADS = 256, DC__CUDA_KFAC_TILE = 32, DC__CUDA_KFAC_TILE_THREADS = 128 };

/* *found becomes at least the bits of the largest absolute value, as float32; numbers that are not finite have the
 * largest bits. Elements are float32, float16 or bfloat16. */
typedef struct dc__cuda_max_abs_args {
  const void *data;
  int64_t count;
  uint64_t *found;
  int32_t dtype;
} dc__cuda_max_abs_args;

/* Fills with ones of one of these types. */
typedef struct dc__cuda_fill_ones_args {
  void *to;
  int64_t count;
  int32_t dtype;
} dc__cuda_fill_ones_args;

/* The upper triangles of [groups, n, n], and packed as float64. Pack: from sum, with `corner` for each triangle's last
 * element unless it is negative. Average: decay mean + (1 - decay) packed / count, to the lower triangles of sum. */
typedef struct dc__cuda_triangles_args {
  float *sum;
  const float *mean;
  double *packed;
  int64_t groups, n;
  double corner;
  double decay, count;
} dc__cuda_triangles_args;

/* Negative values become 0. */
typedef struct dc__cuda_clamp_min_zero_args {
  float *values;
  int64_t count;
} dc__cuda_clamp_min_zero_args;

/* Each group's eigenvalues of both factors, plus the damping's square root times, and over, the root of the ratio of
 * their means. */
typedef struct dc__cuda_damp_eigenvalues_args {
  const float *values_a, *values_g; /* [groups, a], [groups, g] */
  float *to_a, *to_g;
  int64_t groups, a, g;
  double damping;
} dc__cuda_damp_eigenvalues_args;

/* Copies rows of x to weight, and an extra last element to bias; sums[row] is the product of the new and the old
 * row. */
typedef struct dc__cuda_store_direction_args {
  const float *x; /* [rows, columns] */
  float *weight;  /* [rows, in]; NULL: not stored */
  float *bias;    /* [rows]; NULL: not stored */
  double *sums;
  int64_t rows, columns, in;
} dc__cuda_store_direction_args;

#endif
