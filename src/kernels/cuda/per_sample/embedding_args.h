/* The arguments of the kernels for embeddings' gradients per sample (embedding.cu), as the host and the device see
 * them. `wide`: float64, else float32. Pointers may be NULL only where stated. */
#ifndef DC_KERNELS_CUDA_EMBEDDING_ARGS_H
#define DC_KERNELS_CUDA_EMBEDDING_ARGS_H

#include <stdint.h>

#include "kernels/cuda/threads.h"

/* Positions with indices, and the rows of delta to add by index. */
typedef struct dc__cuda_indices {
  const void *ids;              /* [samples, positions] of int64, or int32 */
  const void *delta;            /* [samples, positions, columns], or of bags [samples, columns] */
  const double *sample_weights; /* [samples]: a row's weight; 0: the sample is skipped */
  int64_t samples, positions, rows, columns;
  int64_t padding; /* the index that does not count; -1: all count */
  int32_t wide_ids, bag, wide;
} dc__cuda_indices;

/* sample_weights[n] = factors[n], divided by the number of positions that count if the bag is a mean. */
typedef struct dc__cuda_sample_weights_args {
  dc__cuda_indices indices;
  const void *factors; /* NULL: all 1 */
  double *sample_weights;
  int32_t mean;
} dc__cuda_sample_weights_args;

/* table[id] += sample_weights[n] delta's row, in the order of positions; with `per_sample` every sample has a table of
 * its own. */
typedef struct dc__cuda_scatter_args {
  dc__cuda_indices indices;
  void *table;
  int32_t per_sample;
} dc__cuda_scatter_args;

/* parts[n] = the sum of squares of sample n's table, without the table. */
typedef struct dc__cuda_rows_squared_args {
  dc__cuda_indices indices;
  int64_t *sorted; /* [samples, positions]: positions in the order of their indices */
  double *parts;
} dc__cuda_rows_squared_args;

#endif
