/* The elementwise work in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernels_cuda.h"

#include "kernels/cuda/args.h"
#include "kernels/cuda/kernel_list.h"
#include "kernels/optim/update.h"

/* A thread does `each` elements at once, and more where there are very many. Blocks are as small as that so that the
 * last ones to run, which do not fill the card, are a small part of all. */
static uint32_t blocks_for(int64_t count, int64_t each, int64_t max) {
  int64_t blocks = (count + each * DC__CUDA_THREADS - 1) / (each * DC__CUDA_THREADS);
  return (uint32_t)(blocks < max ? blocks : max);
}

enum { MAX_BLOCKS = 4096, MAX_BLOCKS_VECTORIZED = 1 << 16 };

static void launch_blocks(dc_stream *stream, int32_t kernel, uint32_t blocks, const void *args, size_t bytes) {
  if (blocks > 0) {
    stream->device->ops->stream_launch(
        stream,
        &(dc__launch){.kernel = kernel, .blocks = blocks, .threads = DC__CUDA_THREADS, .args = args, .bytes = bytes});
  }
}

static void elementwise_launch(dc_stream *stream, int32_t kernel, int64_t count, const void *args, size_t bytes) {
  launch_blocks(stream, kernel, blocks_for(count, 1, MAX_BLOCKS), args, bytes);
}

/* Of kernels that move 16 bytes of the widest type at once, between the types that weights and gradients have. */
static void launch_together(dc_stream *stream, int32_t kernel, int64_t count, int32_t dst_dtype, int32_t src_dtype,
                            size_t widest, const void *args, size_t bytes) {
  const bool together = widest <= 4 && dc__dtype_is_float(dst_dtype) && dc__dtype_is_float(src_dtype);
  const int64_t each = together ? 16 / (int64_t)widest : 1;
  launch_blocks(stream, kernel, blocks_for(count, each, MAX_BLOCKS_VECTORIZED), args, bytes);
}

static size_t wider(int32_t a, int32_t b) {
  return dc_dtype_size(a) > dc_dtype_size(b) ? dc_dtype_size(a) : dc_dtype_size(b);
}

void dc__cuda_combine(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                      int64_t count, bool add, dc__nonfinite *note, uint64_t key) {
  const dc__cuda_binary_args args = {dst, src, count, dst_dtype, src_dtype, note, key};
  launch_together(stream, add ? DC__KERNEL_ACCUMULATE : DC__KERNEL_CAST, count, dst_dtype, src_dtype,
                  wider(dst_dtype, src_dtype), &args, sizeof args);
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
  dc__cuda_reduce_args args = {dst, count, dst_dtype, src_dtype, n, mean, accumulate, {0}};
  for (int32_t i = 0; i < n; i++) {
    args.src[i] = src[i];
  }
  const size_t sums = wider(dst_dtype, src_dtype) > 4 ? 8 : 4;
  launch_together(stream, DC__KERNEL_REDUCE, count, dst_dtype, src_dtype, sums, &args, sizeof args);
}

_Static_assert(sizeof(dc__cuda_box_copy_args) <= DC__LAUNCH_BYTES, "a box must fit into a launch");

void dc__cuda_box_copy(dc_stream *stream, const dc__cuda_box_copy_args *args) {
  elementwise_launch(stream, DC__KERNEL_BOX_COPY, args->count, args, sizeof *args);
}

/* For each of `together` blocks of parameters, or parts of them. */
static void launch_each(dc_stream *stream, int32_t kernel, int64_t count, int32_t together, const void *args,
                        size_t bytes) {
  const dc__launch all = {.kernel = kernel,
                          .blocks = blocks_for(count, 1, MAX_BLOCKS),
                          .blocks_y = (uint32_t)together,
                          .threads = DC__CUDA_THREADS,
                          .args = args,
                          .bytes = bytes};
  stream->device->ops->stream_launch(stream, &all);
}

void dc__cuda_stack(dc_stream *stream, const dc__cuda_stack_args *args) {
  launch_each(stream, DC__KERNEL_STACK, args->count, args->together, args, sizeof *args);
}

void dc__cuda_graft_update(dc_stream *stream, const dc__cuda_graft_args *args) {
  launch_each(stream, DC__KERNEL_GRAFT_UPDATE, args->count, args->together, args, sizeof *args);
}

void dc__cuda_graft_direction(dc_stream *stream, const dc__cuda_graft_args *args) {
  launch_each(stream, DC__KERNEL_GRAFT_DIRECTION, args->count, args->together, args, sizeof *args);
}

void dc__cuda_graft_finish(dc_stream *stream, const dc__cuda_graft_args *args) {
  launch_each(stream, DC__KERNEL_GRAFT_FINISH, args->count, args->together, args, sizeof *args);
}

void dc__cuda_permute(dc_stream *stream, const dc__cuda_permute_args *args) {
  launch_each(stream, DC__KERNEL_PERMUTE, args->count, args->together, args, sizeof *args);
}

_Static_assert(sizeof(dc__update_batch) <= DC__LAUNCH_BYTES, "a batch must fit into a launch");
_Static_assert(sizeof(dc__update_begin) <= DC__LAUNCH_BYTES, "a step's beginning must fit into a launch");
_Static_assert((int)DC__UPDATE_RECORDS <= (int)DC__CUDA_THREADS, "a block begins a step, a thread a parameter");

void dc__update_cuda(dc_stream *stream, int32_t kind, const dc__update_batch *batch) {
  int64_t max = 0;
  for (int32_t i = 0; i < batch->spans_used; i++) {
    max = batch->spans[i].count > max ? batch->spans[i].count : max;
  }
  launch_each(stream, DC__KERNEL_ADAMW + kind, max, batch->spans_used, batch, sizeof *batch);
}

void dc__update_begin_cuda(dc_stream *stream, const dc__update_begin *begin) {
  elementwise_launch(stream, DC__KERNEL_UPDATE_BEGIN, 1, begin, sizeof *begin);
}

void dc__update_read_scaler_cuda(dc_stream *stream, const dc__update_read_scaler *heed) {
  elementwise_launch(stream, DC__KERNEL_UPDATE_READ_SCALER, 1, heed, sizeof *heed);
}

void dc__update_set_scalar_cuda(dc_stream *stream, double *to, double value) {
  const dc__update_set_scalar args = {to, value};
  elementwise_launch(stream, DC__KERNEL_UPDATE_SET_SCALAR, 1, &args, sizeof args);
}
