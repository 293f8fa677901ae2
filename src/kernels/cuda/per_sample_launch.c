/* What gradients per sample do beside products in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"

enum { THREADS = DC__CUDA_PER_SAMPLE_THREADS, WARP = 32 };

static uint32_t at_most(int64_t count, int64_t max) {
  return (uint32_t)(count < max ? count : max);
}

/* Threads for `count` of something; who gets more goes on to the next. */
static void per_sample_launch(dc_stream *stream, int32_t kernel, int64_t count, const void *args, size_t bytes) {
  enum { MAX_BLOCKS = 1 << 16 };
  if (count > 0) {
    const dc__launch one = {.kernel = kernel,
                            .blocks = at_most((count + THREADS - 1) / THREADS, MAX_BLOCKS),
                            .threads = THREADS,
                            .args = args,
                            .bytes = bytes};
    stream->device->ops->stream_launch(stream, &one);
  }
}

void dc__cuda_statistics(dc_stream *stream, const dc__cuda_statistics_args *args) {
  per_sample_launch(stream, DC__KERNEL_STATISTICS, args->width > 0 ? args->rows * WARP : 0, args, sizeof *args);
}

void dc__cuda_columns(dc_stream *stream, const dc__cuda_columns_args *args) {
  const int64_t count = args->samples * args->columns;
  per_sample_launch(stream, args->by_rows ? DC__KERNEL_CHANNELS : DC__KERNEL_COLUMNS,
                    args->by_rows ? count * WARP : count, args, sizeof *args);
}

void dc__cuda_dots(dc_stream *stream, const dc__cuda_dots_args *args) {
  per_sample_launch(stream, DC__KERNEL_DOTS, args->columns > 0 ? args->rows * WARP : 0, args, sizeof *args);
}

void dc__cuda_totals(dc_stream *stream, const dc__cuda_totals_args *args) {
  per_sample_launch(stream, DC__KERNEL_TOTALS, args->count * WARP, args, sizeof *args);
}

void dc__cuda_squares(dc_stream *stream, const dc__cuda_squares_args *args) {
  per_sample_launch(stream, DC__KERNEL_SQUARES, args->samples, args, sizeof *args);
}

void dc__cuda_weighted_sum(dc_stream *stream, const dc__cuda_weighted_sum_args *args) {
  per_sample_launch(stream, DC__KERNEL_WEIGHTED_SUM, args->count, args, sizeof *args);
}

void dc__cuda_clip(dc_stream *stream, const dc__cuda_clip_args *args) {
  per_sample_launch(stream, DC__KERNEL_CLIP, args->count, args, sizeof *args);
}

/* ---- grids of several axes, of which the second and the third have at most 65535 ---- */

enum { MAX_GRID_YZ = 65535 };

void dc__cuda_im2col(dc_stream *stream, const dc__cuda_im2col_args *args) {
  enum { MAX_BLOCKS = 1024 }; /* blocks for a row */
  const int64_t rows = args->channels * args->kernel[0] * args->kernel[1] * args->kernel[2];
  const int64_t positions = args->size_out[0] * args->size_out[1] * args->size_out[2];
  if (args->samples > 0 && rows > 0 && positions > 0) {
    const dc__launch rows_of = {.kernel = DC__KERNEL_IM2COL,
                                .blocks = at_most((positions + THREADS - 1) / THREADS, MAX_BLOCKS),
                                .blocks_y = at_most(rows, MAX_GRID_YZ),
                                .blocks_z = at_most(args->samples, MAX_GRID_YZ),
                                .threads = THREADS,
                                .args = args,
                                .bytes = sizeof *args};
    stream->device->ops->stream_launch(stream, &rows_of);
  }
}

void dc__cuda_sample_weights(dc_stream *stream, const dc__cuda_sample_weights_args *args) {
  per_sample_launch(stream, DC__KERNEL_SAMPLE_WEIGHTS, args->of.samples * WARP, args, sizeof *args);
}

/* Each block looks through all places of its table, so there are no more than fill a device. */
void dc__cuda_scatter(dc_stream *stream, const dc__cuda_scatter_args *args) {
  enum { ENOUGH = 1024, MAX_BLOCKS = 256 };
  const dc__cuda_indices *of = &args->of;
  const int64_t tables = args->each ? of->samples : 1;
  const int64_t parts = of->rows < MAX_BLOCKS ? of->rows : MAX_BLOCKS;
  if (of->samples > 0 && of->positions > 0 && of->columns > 0) {
    const uint32_t across = (uint32_t)((of->columns + THREADS - 1) / THREADS);
    const dc__launch tables_of = {.kernel = DC__KERNEL_SCATTER,
                                  .blocks = across,
                                  .blocks_y = at_most(parts, ENOUGH / across / tables + 1),
                                  .blocks_z = at_most(tables, MAX_GRID_YZ),
                                  .threads = THREADS,
                                  .args = args,
                                  .bytes = sizeof *args};
    stream->device->ops->stream_launch(stream, &tables_of);
  }
}

/* A block a sample. */
void dc__cuda_rows_squared(dc_stream *stream, const dc__cuda_rows_squared_args *args) {
  per_sample_launch(stream, DC__KERNEL_ROWS_SQUARED, args->of.samples * THREADS, args, sizeof *args);
}
