/* The elementwise work in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/launch.h"

#include "kernels/cuda/args.h"
#include "kernels/cuda/list.h"
#include "kernels/update.h"

/* A thread does several elements where there are more than the device runs threads at once. */
static uint32_t blocks_for(int64_t count) {
  enum { MOST = 4096 };
  int64_t blocks = (count + DC__CUDA_THREADS - 1) / DC__CUDA_THREADS;
  return blocks < MOST ? (uint32_t)blocks : MOST;
}

static void launch(dc_stream *stream, int32_t kernel, int64_t count, const void *args, size_t bytes) {
  if (count > 0) {
    stream->device->ops->stream_launch(
        stream,
        &(dc__launch){
            .kernel = kernel, .blocks = blocks_for(count), .threads = DC__CUDA_THREADS, .args = args, .bytes = bytes});
  }
}

void dc__cuda_combine(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                      int64_t count, bool add, dc__not_finite *note, uint64_t key) {
  const dc__cuda_binary_args args = {dst, src, count, dst_dtype, src_dtype, note, key};
  launch(stream, add ? DC__KERNEL_ACCUMULATE : DC__KERNEL_CAST, count, &args, sizeof args);
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
  launch(stream, DC__KERNEL_REDUCE, count, &args, sizeof args);
}

_Static_assert(sizeof(dc__cuda_box_args) <= DC__LAUNCH_BYTES, "a box must fit into a launch");

void dc__cuda_box(dc_stream *stream, const dc__cuda_box_args *args) {
  launch(stream, DC__KERNEL_BOX, args->count, args, sizeof *args);
}

void dc__cuda_graft_learn(dc_stream *stream, const dc__cuda_graft_args *args) {
  launch(stream, DC__KERNEL_GRAFT_LEARN, args->count, args, sizeof *args);
}

void dc__cuda_graft_take(dc_stream *stream, const dc__cuda_graft_args *args) {
  launch(stream, DC__KERNEL_GRAFT_TAKE, args->count, args, sizeof *args);
}

void dc__cuda_graft_finish(dc_stream *stream, const dc__cuda_graft_args *args) {
  launch(stream, DC__KERNEL_GRAFT_FINISH, args->count, args, sizeof *args);
}

void dc__cuda_sort(dc_stream *stream, const dc__cuda_sort_args *args) {
  launch(stream, DC__KERNEL_SORT, args->count, args, sizeof *args);
}

_Static_assert(sizeof(dc__update_batch) <= DC__LAUNCH_BYTES, "a batch must fit into a launch");
_Static_assert(sizeof(dc__update_begin) <= DC__LAUNCH_BYTES, "a step's beginning must fit into a launch");
_Static_assert((int)DC__UPDATE_RECORDS <= (int)DC__CUDA_THREADS, "a block begins a step, a thread a parameter");

void dc__update_there(dc_stream *stream, int32_t kind, const dc__update_batch *batch) {
  int64_t most = 0;
  for (int32_t i = 0; i < batch->spans_used; i++) {
    most = batch->spans[i].count > most ? batch->spans[i].count : most;
  }
  const dc__launch update = {.kernel = DC__KERNEL_ADAMW + kind,
                             .blocks = blocks_for(most),
                             .blocks_y = (uint32_t)batch->spans_used,
                             .threads = DC__CUDA_THREADS,
                             .args = batch,
                             .bytes = sizeof *batch};
  stream->device->ops->stream_launch(stream, &update);
}

void dc__update_begin_there(dc_stream *stream, const dc__update_begin *begin) {
  launch(stream, DC__KERNEL_UPDATE_BEGIN, 1, begin, sizeof *begin);
}

void dc__update_number_there(dc_stream *stream, double *to, double value) {
  const dc__update_number args = {to, value};
  launch(stream, DC__KERNEL_UPDATE_NUMBER, 1, &args, sizeof args);
}
