/* K-FAC's work beside products in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/launch.h"
#include "kernels/cuda/list.h"

enum { THREADS = DC__CUDA_CURVATURE_THREADS, WARP = 32, LONGEST = 65535 };

static void launch(dc_stream *stream, int32_t kernel, int64_t blocks, uint32_t threads, const void *args,
                   size_t bytes) {
  enum { MOST = 1 << 16 }; /* who gets more goes on to the next */
  if (blocks > 0) {
    const dc__launch one = {.kernel = kernel,
                            .blocks = (uint32_t)(blocks < MOST ? blocks : MOST),
                            .threads = threads,
                            .args = args,
                            .bytes = bytes};
    stream->device->ops->stream_launch(stream, &one);
  }
}

/* Blocks in which each of `count` has a thread. */
static int64_t blocks_for(int64_t count) {
  return (count + THREADS - 1) / THREADS;
}

void dc__cuda_scan(dc_stream *stream, const dc__cuda_scan_args *args) {
  enum { TOGETHER = 4, MOST = 1024 }; /* as many as fill a device */
  const int64_t blocks = blocks_for((args->count + TOGETHER - 1) / TOGETHER);
  launch(stream, DC__KERNEL_SCAN, blocks < MOST ? blocks : MOST, THREADS, args, sizeof *args);
}

void dc__cuda_ones(dc_stream *stream, const dc__cuda_ones_args *args) {
  launch(stream, DC__KERNEL_ONES, blocks_for(args->count), THREADS, args, sizeof *args);
}

void dc__cuda_pack(dc_stream *stream, const dc__cuda_triangles_args *args) {
  const int64_t threads = (args->n + WARP - 1) / WARP * WARP;
  launch(stream, DC__KERNEL_PACK, args->groups * args->n, (uint32_t)(threads < THREADS ? threads : THREADS), args,
         sizeof *args);
}

void dc__cuda_average(dc_stream *stream, const dc__cuda_triangles_args *args) {
  const uint32_t tiles = (uint32_t)((args->n + DC__CUDA_CURVATURE_TILE - 1) / DC__CUDA_CURVATURE_TILE);
  const dc__launch tiles_of = {.kernel = DC__KERNEL_AVERAGE,
                               .blocks = tiles,
                               .blocks_y = tiles,
                               .blocks_z = (uint32_t)(args->groups < LONGEST ? args->groups : LONGEST),
                               .threads = DC__CUDA_CURVATURE_TILE_THREADS,
                               .args = args,
                               .bytes = sizeof *args};
  stream->device->ops->stream_launch(stream, &tiles_of);
}

void dc__cuda_rectify(dc_stream *stream, const dc__cuda_rectify_args *args) {
  launch(stream, DC__KERNEL_RECTIFY, blocks_for(args->count), THREADS, args, sizeof *args);
}

void dc__cuda_shift(dc_stream *stream, const dc__cuda_shift_args *args) {
  launch(stream, DC__KERNEL_SHIFT, args->groups, WARP, args, sizeof *args);
}

void dc__cuda_direct(dc_stream *stream, const dc__cuda_direct_args *args) {
  launch(stream, DC__KERNEL_DIRECT, blocks_for(args->rows * WARP), THREADS, args, sizeof *args);
}
