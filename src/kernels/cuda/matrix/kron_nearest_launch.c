/* The nearest Kronecker product in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

/* Launches `count` threads for each chunk; chunks are the grid's second axis. */
static void launch_nearest(dc_stream *stream, int32_t kernel, int64_t count, int32_t chunks,
                           const dc__cuda_nearest_args *args) {
  const int64_t blocks = (count + DC__CUDA_MATRIX_THREADS - 1) / DC__CUDA_MATRIX_THREADS;
  const int64_t threads = (count + DC__CUDA_WARP - 1) / DC__CUDA_WARP * DC__CUDA_WARP;
  const dc__launch one = {.kernel = kernel,
                          .blocks = dc__cuda_at_most(blocks, DC__CUDA_NEAREST_BLOCKS),
                          .blocks_y = (uint32_t)chunks,
                          .threads = dc__cuda_at_most(threads, DC__CUDA_MATRIX_THREADS),
                          .args = args,
                          .bytes = sizeof *args};
  stream->device->ops->stream_launch(stream, &one);
}

void dc__cuda_nearest_begin(dc_stream *stream, const dc__cuda_nearest_args *args) {
  launch_nearest(stream, DC__KERNEL_NEAREST_GUESS, args->m * args->n, 1, args);
}

void dc__cuda_nearest_step(dc_stream *stream, const dc__cuda_nearest_args *args) {
  const int64_t inner = args->p * args->q;
  const int64_t outer = args->m * args->n;
  dc__cuda_nearest_args now = *args;
  now.inner = 1;
  launch_nearest(stream, DC__KERNEL_NEAREST_INNER, inner, args->chunks[0], &now);
  launch_nearest(stream, DC__KERNEL_NEAREST_REDUCE, inner, 1, &now);
  launch_nearest(stream, DC__KERNEL_NEAREST_NORMALISE, inner, 1, &now);
  now.inner = 0;
  launch_nearest(stream, DC__KERNEL_NEAREST_OUTER, outer * DC__CUDA_WARP, args->chunks[1], &now);
  launch_nearest(stream, DC__KERNEL_NEAREST_REDUCE, outer, 1, &now);
  launch_nearest(stream, DC__KERNEL_NEAREST_NORMALISE, outer, 1, &now);
  dc__cuda_launch_warps(stream, DC__KERNEL_NEAREST_CHECK, 1, &now, sizeof now);
}

void dc__cuda_nearest_residual(dc_stream *stream, const dc__cuda_nearest_args *args) {
  launch_nearest(stream, DC__KERNEL_NEAREST_RESIDUAL, args->x.rows * DC__CUDA_WARP, 1, args);
}
