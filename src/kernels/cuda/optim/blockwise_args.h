/* The arguments of the kernels for blocks of parameters (blockwise.cu), as the host and the device see them. */
#ifndef DC_KERNELS_CUDA_BLOCKWISE_ARGS_H
#define DC_KERNELS_CUDA_BLOCKWISE_ARGS_H

#include "kernels/cuda/matrix/matrix_args.h"
#include "kernels/cuda/threads.h"
#include "kernels/optim/update_math.h"

enum { DC__CUDA_BOX_DIMS = 32 };

/* A dense block and elements [first, first + length) of its parameter. The block is copied from all of the parameter
 * or, with `unpack`, its part within these elements to there. */
typedef struct dc__cuda_box_copy_args {
  float *block, *part;
  int64_t count; /* of the block */
  int64_t first, length;
  int64_t begin;                                              /* of the block, in the parameter */
  int64_t size[DC__CUDA_BOX_DIMS], stride[DC__CUDA_BOX_DIMS]; /* of the block; strides in the parameter */
  int32_t dims, unpack;
} dc__cuda_box_copy_args;

/* Gathers `batch` blocks into a stack, each `stride` elements after the one before; with `unpack` back. */
typedef struct dc__cuda_stack_args {
  float *blocks[DC__CUDA_BATCH_SLICE];
  float *stack;
  int64_t count, stride;
  int32_t batch, unpack;
} dc__cuda_stack_args;

/* Blocks of Shampoo, each `stride` elements after the one before. graft_update: squares, exp_avg, and the filtered
 * gradient in data. graft_direction: to = the graft's direction for data. graft_finish: data times the ratio of two
 * lengths, whose squares are norms of reports, and momentum. */
typedef struct dc__cuda_graft_args {
  float *data;
  float *exp_avg, *squares, *momentum;  /* NULL: none */
  float *to;                            /* graft_direction: may be data */
  const dc__cuda_matrix_stats *lengths; /* graft_finish: [2, batch], wanted and of data; NULL: no scaling */
  const uint64_t *found;                /* graft_finish: does nothing unless *found is 0; may be NULL */
  int64_t count, stride;
  int32_t batch;
  dc__graft_factors factors;
} dc__cuda_graft_args;

/* to = x with its parts along a dimension of n, `inner` elements each, reordered: part j is part order[j] of x.
 * `batch` blocks, each `stride` elements after the one before, have an order each. */
typedef struct dc__cuda_permute_args {
  const float *x;
  float *to;
  const int64_t *orders[DC__CUDA_BATCH_SLICE];
  int64_t n, inner, count, stride;
  int32_t batch;
} dc__cuda_permute_args;

#endif
