/* Embeddings' gradients per sample in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/threads.h"

enum { MAX_BLOCKS = 1 << 16 };

void dc__cuda_sample_weights(dc_stream *stream, const dc__cuda_sample_weights_args *args) {
  dc__cuda_launch_elements(stream, DC__KERNEL_SAMPLE_WEIGHTS, args->indices.samples * DC__CUDA_WARP, MAX_BLOCKS, args,
                           sizeof *args);
}

/* Each block scans all positions of its table, so there are no more blocks than fill a device. */
void dc__cuda_scatter(dc_stream *stream, const dc__cuda_scatter_args *args) {
  enum { ENOUGH = 1024, MAX_PARTS = 256 };
  const dc__cuda_indices *indices = &args->indices;
  const int64_t tables = args->per_sample ? indices->samples : 1;
  const int64_t parts = indices->rows < MAX_PARTS ? indices->rows : MAX_PARTS;
  if (indices->samples > 0 && indices->positions > 0 && indices->columns > 0) {
    const uint32_t across = (uint32_t)((indices->columns + DC__CUDA_THREADS - 1) / DC__CUDA_THREADS);
    const dc__launch tables_of = {.kernel = DC__KERNEL_SCATTER,
                                  .blocks = across,
                                  .blocks_y = dc__cuda_at_most(parts, ENOUGH / across / tables + 1),
                                  .blocks_z = dc__cuda_at_most(tables, DC__CUDA_MAX_GRID_YZ),
                                  .threads = DC__CUDA_THREADS,
                                  .args = args,
                                  .bytes = sizeof *args};
    stream->device->ops->stream_launch(stream, &tables_of);
  }
}

/* Launches a block per sample. */
void dc__cuda_rows_squared(dc_stream *stream, const dc__cuda_rows_squared_args *args) {
  dc__cuda_launch_elements(stream, DC__KERNEL_ROWS_SQUARED, args->indices.samples * DC__CUDA_THREADS, MAX_BLOCKS, args,
                           sizeof *args);
}
