/* K-FAC's work other than products, in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

enum { THREADS = DC__CUDA_KFAC_THREADS, WARP = DC__CUDA_WARP };

static void kfac_launch(dc_stream *stream, int32_t kernel, int64_t blocks, uint32_t threads, const void *args,
                        size_t bytes) {
  enum { MAX_BLOCKS = 1 << 16 };
  if (blocks > 0) {
    const dc__launch one = {.kernel = kernel,
                            .blocks = dc__cuda_at_most(blocks, MAX_BLOCKS),
                            .threads = threads,
                            .args = args,
                            .bytes = bytes};
    stream->device->ops->stream_launch(stream, &one);
  }
}

/* Returns the number of blocks for `count` threads. */
static int64_t blocks_for(int64_t count) {
  return (count + THREADS - 1) / THREADS;
}

void dc__cuda_max_abs(dc_stream *stream, const dc__cuda_max_abs_args *args) {
  enum { TOGETHER = 4, MAX_BLOCKS = 1024 }; /* elements per thread; blocks that fill a device */
  const int64_t blocks = blocks_for((args->count + TOGETHER - 1) / TOGETHER);
  kfac_launch(stream, DC__KERNEL_MAX_ABS, blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS, THREADS, args, sizeof *args);
}

void dc__cuda_fill_ones(dc_stream *stream, const dc__cuda_fill_ones_args *args) {
  kfac_launch(stream, DC__KERNEL_FILL_ONES, blocks_for(args->count), THREADS, args, sizeof *args);
}

void dc__cuda_pack_triangles(dc_stream *stream, const dc__cuda_triangles_args *args) {
  const int64_t threads = (args->n + WARP - 1) / WARP * WARP;
  kfac_launch(stream, DC__KERNEL_PACK_TRIANGLES, args->groups * args->n, dc__cuda_at_most(threads, THREADS), args,
              sizeof *args);
}

void dc__cuda_average_triangles(dc_stream *stream, const dc__cuda_triangles_args *args) {
  const uint32_t tiles = (uint32_t)((args->n + DC__CUDA_KFAC_TILE - 1) / DC__CUDA_KFAC_TILE);
  const dc__launch tiles_of = {.kernel = DC__KERNEL_AVERAGE_TRIANGLES,
                               .blocks = tiles,
                               .blocks_y = tiles,
                               .blocks_z = dc__cuda_at_most(args->groups, DC__CUDA_MAX_GRID_YZ),
                               .threads = DC__CUDA_KFAC_TILE_THREADS,
                               .args = args,
                               .bytes = sizeof *args};
  stream->device->ops->stream_launch(stream, &tiles_of);
}

void dc__cuda_clamp_min_zero(dc_stream *stream, const dc__cuda_clamp_min_zero_args *args) {
  kfac_launch(stream, DC__KERNEL_CLAMP_MIN_ZERO, blocks_for(args->count), THREADS, args, sizeof *args);
}

void dc__cuda_damp_eigenvalues(dc_stream *stream, const dc__cuda_damp_eigenvalues_args *args) {
  kfac_launch(stream, DC__KERNEL_DAMP_EIGENVALUES, args->groups, WARP, args, sizeof *args);
}

void dc__cuda_store_direction(dc_stream *stream, const dc__cuda_store_direction_args *args) {
  kfac_launch(stream, DC__KERNEL_STORE_DIRECTION, blocks_for(args->rows * WARP), THREADS, args, sizeof *args);
}
