/* Attention in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/args.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/list.h"

/* `first`: the pass for float32 and narrow heads; the others follow by type, then by width. Narrow ones of 16 bits are
 * those whose rows are copied 16 bytes at a time. */
static void launch(dc_stream *stream, const dc__cuda_attention_args *args, int32_t dtype, int32_t first) {
  const int32_t type = dtype == DC_FLOAT32 ? 0 : dtype == DC_FLOAT16 ? 1 : 2;
  const bool narrow = args->d <= 64 && (type == 0 || args->d % 8 == 0);
  const int32_t width = narrow ? 0 : args->d <= DC__CUDA_ATTENTION_WIDE ? 1 : 2;
  const int32_t part = type == 0 ? DC__CUDA_ATTENTION_PART_OF_FLOATS : DC__CUDA_ATTENTION_PART_OF_HALVES;
  const int64_t rows = DC__CUDA_ATTENTION_ROWS * (type != 0 && narrow ? DC__CUDA_ATTENTION_TALL : 1);
  const int64_t blocks = args->batch * args->heads * ((args->longest + rows - 1) / rows);
  stream->device->ops->stream_launch(stream,
                                     &(dc__launch){.kernel = first + 3 * type + width,
                                                   .blocks = (uint32_t)blocks,
                                                   .blocks_y = (uint32_t)(width < 2 ? 1 : (args->d + part - 1) / part),
                                                   .threads = DC__CUDA_ATTENTION_THREADS,
                                                   .args = args,
                                                   .bytes = sizeof *args});
}

void dc__cuda_attention_forward(dc_stream *stream, const dc__cuda_attention_args *args, int32_t dtype) {
  launch(stream, args, dtype, DC__KERNEL_ATTENTION_float32_64);
}

void dc__cuda_attention_backward(dc_stream *stream, const dc__cuda_attention_args *args, int32_t dtype) {
  launch(stream, args, dtype, DC__KERNEL_ATTENTION_QUERIES_float32_64); /* leaves delta */
  launch(stream, args, dtype, DC__KERNEL_ATTENTION_KEYS_float32_64);
}
