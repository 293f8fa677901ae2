/* The arguments of the kernels for sums over the layer's rows (column_sums.cu), as the host and the device see them.
 * Pointers may be NULL only where stated. */
#ifndef DC_KERNELS_CUDA_COLUMN_SUMS_ARGS_H
#define DC_KERNELS_CUDA_COLUMN_SUMS_ARGS_H

#include <stdint.h>

enum {
  DC__CUDA_SUM_THREADS = 128,
  DC__CUDA_PART_THREADS = 512,
  DC__CUDA_CHUNK = 32 /* rows of a chunk */
};

/* Sums over rows come in two steps, without atomics. The sums of the chunks, in an order that depends on the number of
 * rows alone, are `parts`, [2 or 1, chunks, columns]. Their sums, in order, go to `to`. */
typedef struct dc__cuda_sums {
  float *parts; /* NULL: no sums */
  int64_t chunks, columns;
  void *to[2]; /* may be NULL */
  int32_t dtype, accumulate;
} dc__cuda_sums;

/* Sums over rows of x, by chunks of DC__CUDA_CHUNK, into sums.to[0]. */
typedef struct dc__cuda_sum_args {
  const void *x;
  int64_t rows, columns;
  int32_t dtype;
  dc__cuda_sums sums;
} dc__cuda_sum_args;

#endif
