/* The arguments of the kernels for gradients per sample (per_sample.cu), as the host and the device see them. Arrays
 * have one type of float32 and float64 unless they say double; `wide`: float64. Pointers may be NULL only where
 * stated. */
#ifndef DC_KERNELS_CUDA_PER_SAMPLE_ARGS_H
#define DC_KERNELS_CUDA_PER_SAMPLE_ARGS_H

#include <stdint.h>

#include "kernels/cuda/threads.h"

/* x-hat of a norm's rows is (x - mean) rstd. */
typedef struct dc__cuda_statistics_args {
  const void *x; /* [rows, width] */
  double *mean, *rstd;
  int64_t rows, width;
  double eps;
  int32_t centred; /* 0: the mean is 0 */
  int32_t wide;
} dc__cuda_statistics_args;

/* sums[n][i] of delta over sample n's positions, times x-hat if x is not NULL. */
typedef struct dc__cuda_columns_args {
  const void *delta, *x; /* [samples, positions, columns], or by_rows [samples, columns, positions]; x may be NULL */
  const double *mean, *rstd;
  double *sums;
  int64_t samples, positions, columns;
  int64_t group; /* by_rows: columns that share their statistics; else each position has its own */
  int32_t by_rows, wide;
} dc__cuda_columns_args;

/* sums[row * step] = a . b, rows of dense matrices. */
typedef struct dc__cuda_dots_args {
  const void *a, *b;
  double *sums;
  int64_t rows, columns, step;
  int32_t wide;
} dc__cuda_dots_args;

/* to[i / group * step + i % group] += factor times the sum of sums[i][..]. */
typedef struct dc__cuda_totals_args {
  const double *sums; /* [count, rows] */
  double *to;
  int64_t count, rows, group, step;
  double factor;
} dc__cuda_totals_args;

/* squares[n] = the sum of parts[n][..], at least 0, plus the old value with `accumulate`. */
typedef struct dc__cuda_squares_args {
  const double *parts; /* [samples, width] */
  void *squares;
  int64_t samples, width;
  int32_t accumulate, wide;
} dc__cuda_squares_args;

/* out[i] = the sum of factors[n] columns[n][i], plus the old value with `accumulate`. A sample with factor 0 is
 * skipped. */
typedef struct dc__cuda_weighted_sum_args {
  const double *columns; /* [samples, count] */
  const void *factors;   /* NULL: all 1 */
  void *out;
  int64_t samples, count;
  int32_t accumulate, wide;
} dc__cuda_weighted_sum_args;

/* factors[i] = min(1, max_norm / (sqrt(squares[i]) + 1e-6)), 0 if that is not finite. */
typedef struct dc__cuda_clip_args {
  const void *squares;
  void *factors;
  int64_t count;
  double max_norm;
  int32_t wide;
} dc__cuda_clip_args;

/* A convolution's patches, a row for each channel and place in the kernel, a column for each output position: to[n *
 * step + r * pitch + p]. A sample with factor 0 gets zeros. */
typedef struct dc__cuda_im2col_args {
  const void *from; /* [samples, channels, size] */
  void *to;
  const void *factors; /* [samples]; NULL: all 1 */
  int64_t samples, channels, step, pitch;
  int64_t size[3], size_out[3], kernel[3], stride[3], padding[3], dilation[3];
  int32_t scaled; /* 1: times its factor */
  int32_t wide;   /* -1: 16-bit elements, copied unchanged, without factors */
} dc__cuda_im2col_args;

#endif
