/* Kernels in stream order, as host tasks. The one place through which the rooms above queue elementwise work. */
#include "kernels/kernels.h"

typedef struct pair {
  void *dst;
  const void *src;
  int64_t count;
  int32_t dst_dtype, src_dtype;
} pair;

static void cast_task(void *args) {
  const pair *p = args;
  dc__cast(p->dst, p->dst_dtype, p->src, p->src_dtype, p->count);
}

static void accumulate_task(void *args) {
  const pair *p = args;
  dc__accumulate(p->dst, p->dst_dtype, p->src, p->src_dtype, p->count);
}

void dc__stream_cast(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                     int64_t count) {
  const pair p = {dst, src, count, dst_dtype, src_dtype};
  dc__stream_call(stream, cast_task, &p, sizeof p);
}

void dc__stream_accumulate(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                           int64_t count) {
  const pair p = {dst, src, count, dst_dtype, src_dtype};
  dc__stream_call(stream, accumulate_task, &p, sizeof p);
}
