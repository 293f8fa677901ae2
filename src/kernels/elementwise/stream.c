/* Elementwise work in stream order: the device's own kernels, or host tasks. All other modules queue it through this
 * file. */
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/kernels.h"

static bool has_kernels(const dc_stream *stream) {
  return stream != NULL && stream->device->ops->stream_launch != NULL;
}

typedef struct binary_args {
  void *dst;
  const void *src;
  int64_t count;
  int32_t dst_dtype, src_dtype;
} binary_args;

static void cast_task(void *args) {
  const binary_args *p = args;
  dc__cast(p->dst, p->dst_dtype, p->src, p->src_dtype, p->count);
}

static void accumulate_task(void *args) {
  const binary_args *p = args;
  dc__accumulate(p->dst, p->dst_dtype, p->src, p->src_dtype, p->count);
}

void dc__stream_cast(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                     int64_t count) {
  if (has_kernels(stream)) {
    dc__cuda_cast(stream, dst, dst_dtype, src, src_dtype, count);
    return;
  }
  const binary_args p = {.dst = dst, .src = src, .count = count, .dst_dtype = dst_dtype, .src_dtype = src_dtype};
  dc__stream_call(stream, cast_task, &p, sizeof p);
}

void dc__stream_accumulate(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                           int64_t count) {
  if (has_kernels(stream)) {
    dc__cuda_accumulate(stream, dst, dst_dtype, src, src_dtype, count);
    return;
  }
  const binary_args p = {.dst = dst, .src = src, .count = count, .dst_dtype = dst_dtype, .src_dtype = src_dtype};
  dc__stream_call(stream, accumulate_task, &p, sizeof p);
}

typedef struct combine_args {
  binary_args p;
  dc__nonfinite *nonfinite;
  uint64_t key;
  bool add;
} combine_args;

static void combine_task(void *args) {
  const combine_args *c = args;
  if (!dc__combine(c->p.dst, c->p.dst_dtype, c->p.src, c->p.src_dtype, c->p.count, c->add)) {
    c->nonfinite->found = 1;
    c->nonfinite->key = c->key > c->nonfinite->key ? c->key : c->nonfinite->key;
  }
}

void dc__stream_combine(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                        int64_t count, bool add, dc__nonfinite *nonfinite, uint64_t key) {
  if (nonfinite != NULL && has_kernels(stream)) {
    dc__cuda_combine(stream, dst, dst_dtype, src, src_dtype, count, add, nonfinite, key);
  } else if (nonfinite != NULL) {
    const binary_args p = {.dst = dst, .src = src, .count = count, .dst_dtype = dst_dtype, .src_dtype = src_dtype};
    const combine_args c = {.p = p, .nonfinite = nonfinite, .key = key, .add = add};
    dc__stream_call(stream, combine_task, &c, sizeof c);
  } else if (add) {
    dc__stream_accumulate(stream, dst, dst_dtype, src, src_dtype, count);
  } else if (dst_dtype == src_dtype) {
    dc__stream_copy(stream, dst, src, (size_t)count * dc_dtype_size(dst_dtype));
  } else {
    dc__stream_cast(stream, dst, dst_dtype, src, src_dtype, count);
  }
}

void dc__internal_reduce(dc_stream *internal, void *dst, int32_t dst_dtype, const void *const *src, int32_t n,
                         int32_t src_dtype, int64_t count, bool mean, bool accumulate) {
  if (internal != NULL) {
    dc__cuda_reduce(internal, dst, dst_dtype, src, n, src_dtype, count, mean, accumulate);
  } else {
    dc__reduce(dst, dst_dtype, src, n, src_dtype, count, mean, accumulate);
  }
}

void dc__internal_copy(dc_stream *internal, void *dst, const void *src, size_t bytes) {
  if (internal != NULL) {
    dc__stream_copy(internal, dst, src, bytes);
  } else {
    dc__copy(dst, src, bytes);
  }
}
