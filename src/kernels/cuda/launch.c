/* Launches with grids that several families share. */
#include "kernels/cuda/launch.h"

#include "kernels/cuda/matrix/matrix_args.h"
#include "kernels/cuda/threads.h"

uint32_t dc__cuda_blocks_for(int64_t count, int64_t each, int64_t max_blocks) {
  return dc__cuda_at_most((count + each * DC__CUDA_THREADS - 1) / (each * DC__CUDA_THREADS), max_blocks);
}

void dc__cuda_launch_elements(dc_stream *stream, int32_t kernel, int64_t count, int64_t max_blocks, const void *args,
                              size_t bytes) {
  if (count > 0) {
    const dc__launch one = {.kernel = kernel,
                            .blocks = dc__cuda_blocks_for(count, 1, max_blocks),
                            .threads = DC__CUDA_THREADS,
                            .args = args,
                            .bytes = bytes};
    stream->device->ops->stream_launch(stream, &one);
  }
}

void dc__cuda_launch_batch(dc_stream *stream, int32_t kernel, int64_t count, int32_t batch, const void *args,
                           size_t bytes) {
  enum { MAX_BLOCKS = 4096 };
  const dc__launch all = {.kernel = kernel,
                          .blocks = dc__cuda_blocks_for(count, 1, MAX_BLOCKS),
                          .blocks_y = (uint32_t)batch,
                          .threads = DC__CUDA_THREADS,
                          .args = args,
                          .bytes = bytes};
  stream->device->ops->stream_launch(stream, &all);
}

void dc__cuda_launch_rows(dc_stream *stream, int32_t kernel, int64_t rows, int64_t cols, int64_t batch,
                          const void *args, size_t bytes) {
  enum { MAX_BLOCKS = 1 << 16 };
  const int64_t threads = (cols + DC__CUDA_WARP - 1) / DC__CUDA_WARP * DC__CUDA_WARP;
  const dc__launch rows_of = {.kernel = kernel,
                              .blocks = dc__cuda_at_most(rows, MAX_BLOCKS),
                              .blocks_y = (uint32_t)batch,
                              .threads = dc__cuda_at_most(threads, DC__CUDA_MATRIX_THREADS),
                              .args = args,
                              .bytes = bytes};
  stream->device->ops->stream_launch(stream, &rows_of);
}

void dc__cuda_launch_warps(dc_stream *stream, int32_t kernel, int64_t count, const void *args, size_t bytes) {
  const dc__launch warps = {
      .kernel = kernel, .blocks = (uint32_t)count, .threads = DC__CUDA_WARP, .args = args, .bytes = bytes};
  stream->device->ops->stream_launch(stream, &warps);
}

int64_t dc__cuda_row_warps(int64_t columns) {
  enum { COLUMNS = 8 * DC__CUDA_WARP };
  return dc__cuda_at_most((columns + COLUMNS - 1) / COLUMNS, DC__CUDA_ROW_THREADS / DC__CUDA_WARP);
}

void dc__cuda_launch_row_pieces(dc_stream *stream, int32_t kernel, int64_t rows, int64_t columns, const void *args,
                                size_t bytes) {
  enum { MAX_BLOCKS = 1 << 20 };
  const dc__launch rows_of = {.kernel = kernel,
                              .blocks = dc__cuda_at_most(rows, MAX_BLOCKS),
                              .blocks_y = 1,
                              .threads = (uint32_t)(DC__CUDA_WARP * dc__cuda_row_warps(columns)),
                              .args = args,
                              .bytes = bytes};
  stream->device->ops->stream_launch(stream, &rows_of);
}
