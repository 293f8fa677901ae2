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

void dc__cuda_combine(dc_stream *stream, const dc__combination *c, dc__nonfinite *nonfinite, uint64_t key) {
  const dc__cuda_binary_args args = {.dst = c->dst,
                                     .src = c->src,
                                     .count = c->count,
                                     .dst_dtype = c->dst_dtype,
                                     .src_dtype = c->src_dtype,
                                     .nonfinite = nonfinite,
                                     .key = key};
  elementwise_launch(stream, c->add ? DC__KERNEL_ACCUMULATE : DC__KERNEL_CAST, c->count, c->dst_dtype, c->src_dtype,
                     max_element_size(c->dst_dtype, c->src_dtype), &args, sizeof args);
}

void dc__cuda_cast(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count) {
  const dc__combination c = {.dst = dst, .src = src, .count = count, .dst_dtype = dst_dtype, .src_dtype = src_dtype};
  dc__cuda_combine(stream, &c, NULL, 0);
}

void dc__cuda_accumulate(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                         int64_t count) {
  const dc__combination c = {
      .dst = dst, .src = src, .count = count, .dst_dtype = dst_dtype, .src_dtype = src_dtype, .add = true};
  dc__cuda_combine(stream, &c, NULL, 0);
}

void dc__cuda_reduce(dc_stream *stream, const dc__reduction *r) {
  dc__cuda_reduce_args args = {.dst = r->dst,
                               .count = r->count,
                               .dst_dtype = r->dst_dtype,
                               .src_dtype = r->src_dtype,
                               .n = r->n,
                               .mean = r->mean,
                               .accumulate = r->accumulate};
  for (int32_t i = 0; i < r->n; i++) {
    args.src[i] = r->src[i];
  }
  const size_t sums = max_element_size(r->dst_dtype, r->src_dtype) > 4 ? 8 : 4;
  elementwise_launch(stream, DC__KERNEL_REDUCE, r->count, r->dst_dtype, r->src_dtype, sums, &args, sizeof args);
}
