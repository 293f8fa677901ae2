/* Work other than products for gradients per sample, in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/threads.h"

enum { MAX_BLOCKS = 1 << 16 };

void dc__cuda_statistics(dc_stream *stream, const dc__cuda_statistics_args *args) {
  dc__cuda_launch_elements(stream, DC__KERNEL_STATISTICS, args->width > 0 ? args->rows * DC__CUDA_WARP : 0, MAX_BLOCKS,
                           args, sizeof *args);
}

void dc__cuda_columns(dc_stream *stream, const dc__cuda_columns_args *args) {
  const int64_t count = args->samples * args->columns;
  dc__cuda_launch_elements(stream, args->by_rows ? DC__KERNEL_CHANNELS : DC__KERNEL_COLUMNS,
                           args->by_rows ? count * DC__CUDA_WARP : count, MAX_BLOCKS, args, sizeof *args);
}

void dc__cuda_dots(dc_stream *stream, const dc__cuda_dots_args *args) {
  dc__cuda_launch_elements(stream, DC__KERNEL_DOTS, args->columns > 0 ? args->rows * DC__CUDA_WARP : 0, MAX_BLOCKS,
                           args, sizeof *args);
}

void dc__cuda_totals(dc_stream *stream, const dc__cuda_totals_args *args) {
  dc__cuda_launch_elements(stream, DC__KERNEL_TOTALS, args->count * DC__CUDA_WARP, MAX_BLOCKS, args, sizeof *args);
}

void dc__cuda_squares(dc_stream *stream, const dc__cuda_squares_args *args) {
  dc__cuda_launch_elements(stream, DC__KERNEL_SQUARES, args->samples, MAX_BLOCKS, args, sizeof *args);
}

void dc__cuda_weighted_sum(dc_stream *stream, const dc__cuda_weighted_sum_args *args) {
  dc__cuda_launch_elements(stream, DC__KERNEL_WEIGHTED_SUM, args->count, MAX_BLOCKS, args, sizeof *args);
}

void dc__cuda_clip(dc_stream *stream, const dc__cuda_clip_args *args) {
  dc__cuda_launch_elements(stream, DC__KERNEL_CLIP, args->count, MAX_BLOCKS, args, sizeof *args);
}

void dc__cuda_im2col(dc_stream *stream, const dc__cuda_im2col_args *args) {
  enum { MAX_ROW_BLOCKS = 1024 };
  const int64_t rows = args->channels * args->kernel[0] * args->kernel[1] * args->kernel[2];
  const int64_t positions = args->size_out[0] * args->size_out[1] * args->size_out[2];
  if (args->samples > 0 && rows > 0 && positions > 0) {
    const dc__launch rows_of = {
        .kernel = DC__KERNEL_IM2COL,
        .blocks = dc__cuda_at_most((positions + DC__CUDA_THREADS - 1) / DC__CUDA_THREADS, MAX_ROW_BLOCKS),
        .blocks_y = dc__cuda_at_most(rows, DC__CUDA_MAX_GRID_YZ),
        .blocks_z = dc__cuda_at_most(args->samples, DC__CUDA_MAX_GRID_YZ),
        .threads = DC__CUDA_THREADS,
        .args = args,
        .bytes = sizeof *args};
    stream->device->ops->stream_launch(stream, &rows_of);
  }
}
