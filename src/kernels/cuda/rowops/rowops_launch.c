/* The layer's rows in stream order, on devices that have kernels of their own. */
#include <string.h>

#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

/* Allows as many blocks as a grid can have, since the second step of a sum does not loop over columns. */
static void rowops_launch(dc_stream *stream, int32_t kernel, int64_t blocks, int64_t blocks_y, int64_t threads,
                          const void *args, size_t bytes) {
  stream->device->ops->stream_launch(stream, &(dc__launch){.kernel = kernel,
                                                           .blocks = dc__cuda_at_most(blocks, INT32_MAX),
                                                           .blocks_y = (uint32_t)blocks_y,
                                                           .threads = (uint32_t)threads,
                                                           .args = args,
                                                           .bytes = bytes});
}

void dc__cuda_residual(dc_stream *stream, const dc__cuda_residual_args *args) {
  dc__cuda_launch_row_pieces(stream, DC__KERNEL_RESIDUAL, args->rows, args->columns, args, sizeof *args);
}

void dc__cuda_layernorm(dc_stream *stream, const dc__cuda_layernorm_args *args) {
  dc__cuda_launch_row_pieces(stream, DC__KERNEL_LAYERNORM, args->rows, args->columns, args, sizeof *args);
}

/* Launches the second step of `count` sums. */
static void launch_parts(dc_stream *stream, const dc__cuda_sums *sums, int64_t count) {
  rowops_launch(stream, DC__KERNEL_SUM_PARTS, (sums->columns + 31) / 32, count, DC__CUDA_PART_THREADS, sums,
                sizeof *sums);
}

/* Returns the number of blocks of layer norm's backward, few enough to run at the same time. The number, and so the
 * order of the sums, is the same on every device. */
static int64_t backward_blocks(int64_t rows, int64_t columns) {
  const int64_t max = DC__CUDA_MIN_SMS * (DC__CUDA_BACKWARD_WARPS / dc__cuda_row_warps(columns));
  return rows < max ? rows : max;
}

void dc__cuda_layernorm_backward(dc_stream *stream, const dc__cuda_layernorm_backward_args *args) {
  dc__cuda_layernorm_backward_args a = *args;
  a.sums.chunks = backward_blocks(a.rows, a.columns);
  a.sums.columns = a.columns;
  dc__cuda_launch_row_pieces(stream, DC__KERNEL_LAYERNORM_BACKWARD, a.sums.chunks, a.columns, &a, sizeof a);
  if (a.sums.parts != NULL) {
    launch_parts(stream, &a.sums, 2);
  }
}

void dc__cuda_dropout_rows(dc_stream *stream, const dc__cuda_dropout_args *args) {
  dc__cuda_launch_row_pieces(stream, DC__KERNEL_DROPOUT, args->rows, args->columns, args, sizeof *args);
}

static int64_t column_sum_chunks(int64_t rows) {
  return (rows + DC__CUDA_CHUNK - 1) / DC__CUDA_CHUNK;
}

int64_t dc__cuda_sum_parts(int64_t rows, int64_t normal, int64_t widest) {
  const int64_t back = 2 * normal * backward_blocks(rows, normal);
  const int64_t plain = widest * column_sum_chunks(rows);
  return (back > plain ? back : plain) * (int64_t)sizeof(float);
}

void dc__cuda_column_sums(dc_stream *stream, const dc__cuda_sum_args *args) {
  enum { WIDE = 8 * DC__CUDA_SUM_THREADS };
  dc__cuda_sum_args a = *args;
  a.sums.chunks = column_sum_chunks(a.rows);
  a.sums.columns = a.columns;
  rowops_launch(stream, DC__KERNEL_SUM_CHUNKS, a.sums.chunks, (a.columns + WIDE - 1) / WIDE, DC__CUDA_SUM_THREADS, &a,
                sizeof a);
  launch_parts(stream, &a.sums, 1);
}

void dc__cuda_offsets(dc_stream *stream, int32_t *to, const int32_t *offsets, int64_t count) {
  for (int64_t at = 0; at < count; at += DC__CUDA_OFFSETS) {
    dc__cuda_offsets_args args = {.to = to + at};
    args.count = (int32_t)(count - at < DC__CUDA_OFFSETS ? count - at : DC__CUDA_OFFSETS);
    memcpy(args.values, offsets + at, (size_t)args.count * sizeof *offsets);
    rowops_launch(stream, DC__KERNEL_OFFSETS, 1, 1, DC__CUDA_OFFSETS, &args, sizeof args);
  }
}
