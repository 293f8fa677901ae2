/* What the matrix operators do beside products in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/launch.h"
#include "kernels/cuda/list.h"

enum { WARP = 32 };

/* Blocks for rows, which go on to further rows beyond that, with as many threads as a row can use. */
static void launch(dc_stream *stream, int32_t kernel, int64_t rows, int64_t cols, int64_t count, const void *args,
                   size_t bytes) {
  enum { MOST = 1 << 16 };
  const int64_t threads = (cols + WARP - 1) / WARP * WARP;
  const dc__launch rows_of = {
      .kernel = kernel,
      .blocks = (uint32_t)(rows < MOST ? rows : MOST),
      .blocks_y = (uint32_t)count,
      .threads = threads < DC__CUDA_MATRIX_THREADS ? (uint32_t)threads : DC__CUDA_MATRIX_THREADS,
      .args = args,
      .bytes = bytes};
  stream->device->ops->stream_launch(stream, &rows_of);
}

/* One block of one warp for each of `count`. */
static void launch_warps(dc_stream *stream, int32_t kernel, int64_t count, const void *args, size_t bytes) {
  const dc__launch warps = {.kernel = kernel, .blocks = (uint32_t)count, .threads = WARP, .args = args, .bytes = bytes};
  stream->device->ops->stream_launch(stream, &warps);
}

void dc__cuda_measure(dc_stream *stream, const dc__cuda_measure_args *args) {
  launch(stream, DC__KERNEL_MEASURE, args->from.rows, args->from.cols, args->from.count, args, sizeof *args);
}

void dc__cuda_load(dc_stream *stream, const dc__cuda_load_args *args) {
  launch(stream, DC__KERNEL_LOAD, args->to.rows, args->to.cols, args->to.count, args, sizeof *args);
}

void dc__cuda_fold(dc_stream *stream, const dc__cuda_fold_args *args) {
  enum { WARPS = 4 }; /* of a block, a row each */
  launch(stream, DC__KERNEL_ROW_SUMS, (args->from.rows + WARPS - 1) / WARPS, WARPS * WARP, args->from.count, args,
         sizeof *args);
  launch_warps(stream, DC__KERNEL_FOLD, args->from.count, args, sizeof *args);
}

void dc__cuda_affine(dc_stream *stream, const dc__cuda_affine_args *args) {
  launch(stream, DC__KERNEL_AFFINE, args->rows, args->cols, args->count, args, sizeof *args);
}

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

void dc__cuda_newton_judge(dc_stream *stream, const dc__cuda_newton_args *args) {
  dc__cuda_newton_distance(stream, args);
  launch_warps(stream, DC__KERNEL_NEWTON_JUDGE, 1, args, sizeof *args);
  launch(stream, DC__KERNEL_NEWTON_KEEP, args->n, args->n, args->count, args, sizeof *args);
}

void dc__cuda_scale(dc_stream *stream, const dc__cuda_scale_args *args) {
  launch(stream, DC__KERNEL_SCALE, args->rows, args->cols, args->count, args, sizeof *args);
}

void dc__cuda_kron(dc_stream *stream, const dc__cuda_kron_args *args) {
  launch(stream, DC__KERNEL_KRON, args->to.rows, args->to.cols, 1, args, sizeof *args);
}

void dc__cuda_damp(dc_stream *stream, const dc__cuda_damp_args *args) {
  launch(stream, DC__KERNEL_DAMP, args->rows, args->cols, 1, args, sizeof *args);
}
