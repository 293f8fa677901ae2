/* Launches with grids that several families share. Kernels loop over elements beyond the largest grid. */
#ifndef DC_KERNELS_CUDA_LAUNCH_H
#define DC_KERNELS_CUDA_LAUNCH_H

#include "device/device.h"

enum { DC__CUDA_WARP = 32 };

/* A thread for each of `count` elements, in at most max_blocks blocks; 0 elements: no launch. */
void dc__cuda_launch_elements(dc_stream *stream, int32_t kernel, int64_t count, int64_t max_blocks, const void *args,
                              size_t bytes);
/* A thread for each of `count` elements of each array of a batch, which is the grid's second axis. */
void dc__cuda_launch_batch(dc_stream *stream, int32_t kernel, int64_t count, int32_t batch, const void *args,
                           size_t bytes);
/* A block for each row of each matrix of a batch, with as many threads as a row can use. */
void dc__cuda_launch_rows(dc_stream *stream, int32_t kernel, int64_t rows, int64_t cols, int64_t batch,
                          const void *args, size_t bytes);
/* `count` blocks of one warp each. */
void dc__cuda_launch_warps(dc_stream *stream, int32_t kernel, int64_t count, const void *args, size_t bytes);

/* A block for each row, with a thread for every 8 columns. */
void dc__cuda_launch_row_pieces(dc_stream *stream, int32_t kernel, int64_t rows, int64_t columns, const void *args,
                                size_t bytes);
int64_t dc__cuda_row_warps(int64_t columns); /* warps of such a block */

/* Returns count, but at most `max`. */
static inline uint32_t dc__cuda_at_most(int64_t count, int64_t max) {
  return (uint32_t)(count < max ? count : max);
}

/* Returns the number of blocks of DC__CUDA_THREADS threads with `each` elements per thread, at most max_blocks. */
uint32_t dc__cuda_blocks_for(int64_t count, int64_t each, int64_t max_blocks);

#endif
