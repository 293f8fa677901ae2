/* The elementwise work in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/threads.h"

/* Threads move 16 bytes of the widest type at once between the types of weights and gradients. Blocks are small: the
 * last ones, which do not fill the device, are then a small part of all. */
static void elementwise_launch(dc_stream *stream, int32_t kernel, int64_t count, int32_t dst_dtype, int32_t src_dtype,
                               size_t widest, const void *args, size_t bytes) {
  enum { MAX_BLOCKS = 1 << 16 };
  const bool together = widest <= 4 && dc__dtype_is_float(dst_dtype) && dc__dtype_is_float(src_dtype);
  const int64_t each = together ? 16 / (int64_t)widest : 1;
  if (count > 0) {
    const dc__launch one = {.kernel = kernel,
                            .blocks = dc__cuda_blocks_for(count, each, MAX_BLOCKS),
                            .threads = DC__CUDA_THREADS,
                            .args = args,
                            .bytes = bytes};
    stream->device->ops->stream_launch(stream, &one);
  }
}

static size_t max_element_size(int32_t a, int32_t b) {
  return dc_dtype_size(a) > dc_dtype_size(b) ? dc_dtype_size(a) : dc_dtype_size(b);
}

void dc__cuda_combine(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                      int64_t count, bool add, dc__nonfinite *note, uint64_t key) {
  const dc__cuda_binary_args args = {.dst = dst,
                                     .src = src,
                                     .count = count,
                                     .dst_dtype = dst_dtype,
                                     .src_dtype = src_dtype,
                                     .nonfinite = note,
                                     .key = key};
  elementwise_launch(stream, add ? DC__KERNEL_ACCUMULATE : DC__KERNEL_CAST, count, dst_dtype, src_dtype,
                     max_element_size(dst_dtype, src_dtype), &args, sizeof args);
}

void dc__cuda_cast(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count) {
  dc__cuda_combine(stream, dst, dst_dtype, src, src_dtype, count, false, NULL, 0);
}

void dc__cuda_accumulate(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                         int64_t count) {
  dc__cuda_combine(stream, dst, dst_dtype, src, src_dtype, count, true, NULL, 0);
}

void dc__cuda_reduce(dc_stream *stream, void *dst, int32_t dst_dtype, const void *const *src, int32_t n,
                     int32_t src_dtype, int64_t count, bool mean, bool accumulate) {
  dc__cuda_reduce_args args = {.dst = dst,
                               .count = count,
                               .dst_dtype = dst_dtype,
                               .src_dtype = src_dtype,
                               .n = n,
                               .mean = mean,
                               .accumulate = accumulate};
  for (int32_t i = 0; i < n; i++) {
    args.src[i] = src[i];
  }
  const size_t sums = max_element_size(dst_dtype, src_dtype) > 4 ? 8 : 4;
  elementwise_launch(stream, DC__KERNEL_REDUCE, count, dst_dtype, src_dtype, sums, &args, sizeof args);
}
