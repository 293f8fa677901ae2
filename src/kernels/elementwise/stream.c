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
  dc__combination c;
  dc__nonfinite *nonfinite;
  uint64_t key;
} combine_args;

static void combine_task(void *args) {
  const combine_args *p = args;
  const dc__combination *c = &p->c;
  if (!dc__combine(c->dst, c->dst_dtype, c->src, c->src_dtype, c->count, c->add)) {
    p->nonfinite->found = 1;
    p->nonfinite->key = p->key > p->nonfinite->key ? p->key : p->nonfinite->key;
  }
}

void dc__stream_combine(dc_stream *stream, const dc__combination *c, dc__nonfinite *nonfinite, uint64_t key) {
  if (nonfinite != NULL && has_kernels(stream)) {
    dc__cuda_combine(stream, c, nonfinite, key);
  } else if (nonfinite != NULL) {
    const combine_args p = {.c = *c, .nonfinite = nonfinite, .key = key};
    dc__stream_call(stream, combine_task, &p, sizeof p);
  } else if (c->add) {
    dc__stream_accumulate(stream, c->dst, c->dst_dtype, c->src, c->src_dtype, c->count);
  } else if (c->dst_dtype == c->src_dtype) {
    dc__stream_copy(stream, c->dst, c->src, (size_t)c->count * dc_dtype_size(c->dst_dtype));
  } else {
    dc__stream_cast(stream, c->dst, c->dst_dtype, c->src, c->src_dtype, c->count);
  }
}

void dc__internal_reduce(dc_stream *internal, const dc__reduction *r) {
  if (internal != NULL) {
    dc__cuda_reduce(internal, r);
  } else {
    dc__reduce(r);
  }
}

void dc__internal_copy(dc_stream *internal, void *dst, const void *src, size_t bytes) {
  if (internal != NULL) {
    dc__stream_copy(internal, dst, src, bytes);
  } else {
    dc__copy(dst, src, bytes);
  }
}
