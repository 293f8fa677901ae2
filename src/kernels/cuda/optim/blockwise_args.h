/* The arguments of the kernels for blocks of parameters (blockwise.cu), as the host and the device see them. */
#ifndef DC_KERNELS_CUDA_BLOCKWISE_ARGS_H
#define DC_KERNELS_CUDA_BLOCKWISE_ARGS_H

#include "kernels/cuda/matrix/matrix_args.h"
#include "kernels/cuda/threads.h"
#include "kernels/optim/update_math.h"

enum { DC__CUDA_BOX_DIMS = 32 };

/* A dense block and elements [first, first + length) of the parameter that it is cut out of: the block from all of it,
 * or with `give` what of the block lies there. */
typedef struct dc__cuda_box_copy_args {
  float *block, *part;
  int64_t count; /* of the block */
  int64_t first, length;
  int64_t begin;                                              /* of the block, in the parameter */
  int64_t size[DC__CUDA_BOX_DIMS], stride[DC__CUDA_BOX_DIMS]; /* of the block, and from one to the next outside of it */
  int32_t dims, give;
} dc__cuda_box_copy_args;

/* `together` blocks, each `stride` elements behind the one before, from where they lie; with `give` back there. */
typedef struct dc__cuda_stack_args {
  float *blocks[DC__CUDA_BATCH_SLICE];
  float *stack;
  int64_t count, stride;
  int32_t together, give;
} dc__cuda_stack_args;

/* Blocks of Shampoo's, each `stride` elements behind the one before. LEARN: squares, exp_avg, and data the filtered
 * gradient; TAKE: to = what the graft makes of data; FINISH: data times the ratio of two lengths, whose squares are
 * folds of reports, and momentum. */
typedef struct dc__cuda_graft_args {
  float *data;
  float *exp_avg, *squares, *momentum;  /* NULL: none */
  float *to;                            /* TAKE: may be data */
  const dc__cuda_matrix_stats *lengths; /* FINISH: [2, together], wanted and of data; NULL: as it is */
  const uint64_t *found;                /* FINISH: nothing happens unless it is 0; NULL: nobody looked */
  int64_t count, stride;
  int32_t together;
  dc__graft_factors factors;
} dc__cuda_graft_args;

/* to = x with its parts along a dimension of n, `inner` elements each, in an order: the j-th from where order[j] was.
 * `together` blocks, each `stride` elements behind the one before, have an order each. */
typedef struct dc__cuda_permute_args {
  const float *x;
  float *to;
  const int64_t *orders[DC__CUDA_BATCH_SLICE];
  int64_t n, inner, count, stride;
  int32_t together;
} dc__cuda_permute_args;

#endif
