/* What the matrix operators do beside products in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"

enum { WARP = 32 };

/* Blocks for rows, which go on to further rows beyond that, with as many threads as a row can use. */
static void matrix_launch(dc_stream *stream, int32_t kernel, int64_t rows, int64_t cols, int64_t count,
                          const void *args, size_t bytes) {
  enum { MAX_BLOCKS = 1 << 16 };
  const int64_t threads = (cols + WARP - 1) / WARP * WARP;
  const dc__launch rows_of = {
      .kernel = kernel,
      .blocks = (uint32_t)(rows < MAX_BLOCKS ? rows : MAX_BLOCKS),
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
  matrix_launch(stream, DC__KERNEL_MEASURE, args->from.rows, args->from.cols, args->from.count, args, sizeof *args);
}

void dc__cuda_load(dc_stream *stream, const dc__cuda_load_args *args) {
  matrix_launch(stream, DC__KERNEL_LOAD, args->to.rows, args->to.cols, args->to.count, args, sizeof *args);
}

void dc__cuda_load_uniform(dc_stream *stream, dc__cuda_matrices from, dc__cuda_matrices to, uint32_t mask,
                           double factor) {
  dc__cuda_load_args args = {.from = from, .to = to, .mask = mask};
  for (int32_t i = 0; i < to.count; i++) {
    args.factor[i] = factor;
  }
  dc__cuda_load(stream, &args);
}

void dc__cuda_matrix_norm(dc_stream *stream, const dc__cuda_matrix_norm_args *args) {
  enum { WARPS = 4 }; /* of a block, a row each */
  matrix_launch(stream, DC__KERNEL_ROW_SUMS, (args->from.rows + WARPS - 1) / WARPS, WARPS * WARP, args->from.count,
                args, sizeof *args);
  launch_warps(stream, DC__KERNEL_MATRIX_NORM, args->from.count, args, sizeof *args);
}

void dc__cuda_affine(dc_stream *stream, const dc__cuda_affine_args *args) {
  matrix_launch(stream, DC__KERNEL_AFFINE, args->rows, args->cols, args->count, args, sizeof *args);
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

void dc__cuda_newton_check_convergence(dc_stream *stream, const dc__cuda_newton_args *args) {
  dc__cuda_newton_distance(stream, args);
  launch_warps(stream, DC__KERNEL_NEWTON_CHECK, 1, args, sizeof *args);
  matrix_launch(stream, DC__KERNEL_NEWTON_RESTORE, args->n, args->n, args->count, args, sizeof *args);
}

void dc__cuda_scale(dc_stream *stream, const dc__cuda_scale_args *args) {
  matrix_launch(stream, DC__KERNEL_SCALE, args->rows, args->cols, args->count, args, sizeof *args);
}

void dc__cuda_warm_start_residual(dc_stream *stream, const dc__cuda_warm_start_args *args) {
  matrix_launch(stream, DC__KERNEL_WARM_START_RESIDUAL, args->n, args->n, args->count, args, sizeof *args);
}

void dc__cuda_warm_start_root(dc_stream *stream, const dc__cuda_warm_start_args *args) {
  matrix_launch(stream, DC__KERNEL_WARM_START_ROOT, args->n, args->n, args->count, args, sizeof *args);
}

void dc__cuda_basis_begin(dc_stream *stream, const dc__cuda_basis_args *args) {
  enum { WARPS = 4, THREADS = DC__CUDA_MATRIX_THREADS };
  const int64_t n = args->n;
  matrix_launch(stream, DC__KERNEL_BASIS_VALUES, (n + WARPS - 1) / WARPS, WARPS * WARP, args->count, args,
                sizeof *args);
  matrix_launch(stream, DC__KERNEL_BASIS_ORDER, (n + THREADS - 1) / THREADS, THREADS, args->count, args, sizeof *args);
  matrix_launch(stream, DC__KERNEL_BASIS_SORT, n, n, args->count, args, sizeof *args);
}

void dc__cuda_basis_store(dc_stream *stream, const dc__cuda_basis_args *args) {
  matrix_launch(stream, DC__KERNEL_BASIS_STORE, args->n, args->n, args->count, args, sizeof *args);
}

void dc__cuda_kron(dc_stream *stream, const dc__cuda_kron_args *args) {
  matrix_launch(stream, DC__KERNEL_KRON, args->to.rows, args->to.cols, 1, args, sizeof *args);
}

void dc__cuda_damp(dc_stream *stream, const dc__cuda_damp_args *args) {
  matrix_launch(stream, DC__KERNEL_DAMP, args->count * args->rows, args->cols, 1, args, sizeof *args);
}

/* ---- the nearest Kronecker product ---- */

/* Blocks for `count` threads, and as many times that as there are chunks. */
static void launch_nearest(dc_stream *stream, int32_t kernel, int64_t count, int32_t chunks,
                           const dc__cuda_nearest_args *args) {
  const int64_t blocks = (count + DC__CUDA_MATRIX_THREADS - 1) / DC__CUDA_MATRIX_THREADS;
  const int64_t threads = (count + WARP - 1) / WARP * WARP;
  const dc__launch one = {.kernel = kernel,
                          .blocks = (uint32_t)(blocks < DC__CUDA_NEAREST_BLOCKS ? blocks : DC__CUDA_NEAREST_BLOCKS),
                          .blocks_y = (uint32_t)chunks,
                          .threads = threads < DC__CUDA_MATRIX_THREADS ? (uint32_t)threads : DC__CUDA_MATRIX_THREADS,
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
  launch_nearest(stream, DC__KERNEL_NEAREST_OUTER, outer * WARP, args->chunks[1], &now);
  launch_nearest(stream, DC__KERNEL_NEAREST_REDUCE, outer, 1, &now);
  launch_nearest(stream, DC__KERNEL_NEAREST_NORMALISE, outer, 1, &now);
  launch_warps(stream, DC__KERNEL_NEAREST_CHECK, 1, &now, sizeof now);
}

void dc__cuda_nearest_residual(dc_stream *stream, const dc__cuda_nearest_args *args) {
  launch_nearest(stream, DC__KERNEL_NEAREST_RESIDUAL, args->x.rows * WARP, 1, args);
}
