/* The steps of Newton's iteration in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

void dc__cuda_newton_distance(dc_stream *stream, const dc__cuda_newton_args *args) {
  const uint32_t tiles = (uint32_t)((args->n + DC__CUDA_MATRIX_TILE - 1) / DC__CUDA_MATRIX_TILE);
  const dc__launch distance = {.kernel = DC__KERNEL_NEWTON_DISTANCE,
                               .blocks = tiles,
                               .blocks_y = tiles,
                               .blocks_z = (uint32_t)args->count,
                               .threads = DC__CUDA_TILE_THREADS,
                               .args = args,
                               .bytes = sizeof *args};
  stream->device->ops->stream_launch(stream, &distance);
}

void dc__cuda_newton_check_convergence(dc_stream *stream, const dc__cuda_newton_args *args) {
  dc__cuda_newton_distance(stream, args);
  dc__cuda_launch_warps(stream, DC__KERNEL_NEWTON_CHECK, 1, args, sizeof *args);
  dc__cuda_launch_rows(stream, DC__KERNEL_NEWTON_RESTORE, args->n, args->n, args->count, args, sizeof *args);
}
