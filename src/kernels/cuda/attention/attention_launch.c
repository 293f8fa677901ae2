/* Attention in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"

/* Narrow heads of 16-bit types, whose rows are copied 16 bytes at a time, have taller blocks. */
static bool has_two_row_tiles(const dc__cuda_attention_args *args, int32_t dtype) {
  return dtype != DC_FLOAT32 && args->d <= 64 && args->d % 8 == 0;
}

static int64_t block_rows(const dc__cuda_attention_args *args, int32_t dtype) {
  return DC__CUDA_ATTENTION_ROWS * (has_two_row_tiles(args, dtype) ? DC__CUDA_ATTENTION_ROW_TILES : 1);
}

static void attention_launch(dc_stream *stream, const dc__cuda_attention_args *args, int32_t dtype, int32_t kernel,
                             int64_t parts) {
  const int64_t rows = block_rows(args, dtype);
  const int64_t blocks = args->batch * args->heads * ((args->longest + rows - 1) / rows);
  stream->device->ops->stream_launch(stream, &(dc__launch){.kernel = kernel,
                                                           .blocks = (uint32_t)blocks,
                                                           .blocks_y = (uint32_t)parts,
                                                           .threads = DC__CUDA_ATTENTION_THREADS,
                                                           .args = args,
                                                           .bytes = sizeof *args});
}

/* `first` is the pass's kernel for float32 and narrow heads. The others follow by type, then by width. */
static void launch_pass(dc_stream *stream, const dc__cuda_attention_args *args, int32_t dtype, int32_t first) {
  const int32_t type = dtype == DC_FLOAT32 ? 0 : dtype == DC_FLOAT16 ? 1 : 2;
  const bool narrow = has_two_row_tiles(args, dtype) || (type == 0 && args->d <= 64);
  const int32_t width = narrow ? 0 : args->d <= DC__CUDA_ATTENTION_WIDE ? 1 : 2;
  const int32_t part = type == 0 ? DC__CUDA_ATTENTION_PART_OF_FLOATS : DC__CUDA_ATTENTION_PART_OF_HALVES;
  attention_launch(stream, args, dtype, first + 3 * type + width, width < 2 ? 1 : (args->d + part - 1) / part);
}

void dc__cuda_attention_forward(dc_stream *stream, const dc__cuda_attention_args *args, int32_t dtype) {
  launch_pass(stream, args, dtype, DC__KERNEL_ATTENTION_float32_64);
}

/* If a block has a whole head, one kernel computes all gradients, and reads the device's memory once. */
void dc__cuda_attention_backward(dc_stream *stream, const dc__cuda_attention_args *args, int32_t dtype) {
  if (has_two_row_tiles(args, dtype) && args->longest <= block_rows(args, dtype)) {
    attention_launch(stream, args, dtype,
                     dtype == DC_FLOAT16 ? DC__KERNEL_ATTENTION_DQKV_float16_64 : DC__KERNEL_ATTENTION_DQKV_bfloat16_64,
                     1);
    return;
  }
  launch_pass(stream, args, dtype, DC__KERNEL_ATTENTION_DQ_float32_64); /* also writes delta for the next pass */
  launch_pass(stream, args, dtype, DC__KERNEL_ATTENTION_DK_DV_float32_64);
}
