/* The arguments of K-FAC's kernels (kfac.cu), as the host and the device see them. */
#ifndef DC_KERNELS_CUDA_KFAC_ARGS_H
#define DC_KERNELS_CUDA_KFAC_ARGS_H

#include <stdint.h>

enum { DC__CUDA_KFAC_THREADS = 256, DC__CUDA_KFAC_TILE = 32, DC__CUDA_KFAC_TILE_THREADS = 128 };

/* *found becomes at least the bits of the largest absolute value, as float32: those of what is not finite are larger
 * than all others. Of float32, float16 or bfloat16. */
typedef struct dc__cuda_max_abs_args {
  const void *data;
  int64_t count;
  uint64_t *found;
  int32_t dtype;
} dc__cuda_max_abs_args;

/* Ones of such a type. */
typedef struct dc__cuda_fill_ones_args {
  void *to;
  int64_t count;
  int32_t dtype;
} dc__cuda_fill_ones_args;

/* The upper triangles of [groups, n, n], and the same as float64 without what is below: PACK: of sum, with `corner` for
 * each triangle's last element unless that is negative; AVERAGE: decay mean + (1 - decay) packed / count, to the lower
 * triangles of sum. */
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

/* The factors' eigenvalues plus a square root of the damping each, shared out by their means, of each group. */
typedef struct dc__cuda_damp_eigenvalues_args {
  const float *values_a, *values_g; /* [groups, a], [groups, g] */
  float *to_a, *to_g;
  int64_t groups, a, g;
  double damping;
} dc__cuda_damp_eigenvalues_args;

/* Rows of x to those of weight, and their last element to bias where they have one more; sums[row] is the product of
 * what came and what was there. */
typedef struct dc__cuda_store_direction_args {
  const float *x; /* [rows, columns] */
  float *weight;  /* [rows, in]; NULL: stays away */
  float *bias;    /* [rows]; NULL: stays away */
  double *sums;
  int64_t rows, columns, in;
} dc__cuda_store_direction_args;

#endif
