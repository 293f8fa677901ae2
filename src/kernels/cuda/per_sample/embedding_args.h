/* The arguments of the kernels for embeddings' gradients per sample (embedding.cu), as the host and the device see
 * them. `wide`: float64, else float32. Pointers that may be NULL are said. */
#ifndef DC_KERNELS_CUDA_EMBEDDING_ARGS_H
#define DC_KERNELS_CUDA_EMBEDDING_ARGS_H

#include <stdint.h>

#include "kernels/cuda/threads.h"

/* Places of indices, and rows of delta to be added up by them. */
typedef struct dc__cuda_indices {
  const void *ids;      /* [samples, positions] of int64, or int32 */
  const void *delta;    /* [samples, positions, columns], or of bags [samples, columns] */
  const double *shares; /* [samples]: what a row counts; 0: nothing at all */
  int64_t samples, positions, rows, columns;
  int64_t padding; /* the row that does not count; -1: all do */
  int32_t long_ids, bag, wide;
} dc__cuda_indices;

/* shares[n] = factors[n], over the number of places that count if it is a mean. */
typedef struct dc__cuda_sample_weights_args {
  dc__cuda_indices of;
  const void *factors; /* NULL: all 1 */
  double *shares;
  int32_t mean;
} dc__cuda_sample_weights_args;

/* table[id] += shares[n] delta's row, in the order of places; `each` sample has a table of its own. */
typedef struct dc__cuda_scatter_args {
  dc__cuda_indices of;
  void *table;
  int32_t each;
} dc__cuda_scatter_args;

/* parts[n] = the squares of the rows that sample n's table would have, without the table. */
typedef struct dc__cuda_rows_squared_args {
  dc__cuda_indices of;
  int64_t *places; /* [samples, positions], for sorting */
  double *parts;
} dc__cuda_rows_squared_args;

#endif
