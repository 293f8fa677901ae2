/* Operations on streams: copies, zeros, kernels, and calls of other libraries. */
#include <string.h>

#include "device/cuda/cuda.h"

typedef struct copy_op {
  void *dst;
  const void *src; /* NULL: zeros */
  size_t bytes;
} copy_op;

static void issue_copy(dc__cuda_stream *stream, void *args) {
  const copy_op *m = args;
  dc__cu_ptr dst = (uintptr_t)m->dst;
  if (m->src != NULL) {
    (void)DC__CUDA_KEEP_ON(stream, cuMemcpyAsync, dst, (uintptr_t)m->src, m->bytes, stream->native);
  } else {
    (void)DC__CUDA_KEEP_ON(stream, cuMemsetD8Async, dst, 0, m->bytes, stream->native);
  }
}

/* A copy of 0 bytes is skipped, since a graph cannot hold it. */
void dc__cuda_stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes) {
  const copy_op m = {dst, src, bytes};
  if (bytes == 0) {
    return;
  }
  dc__cuda_submit_kept((dc__cuda_stream *)stream, issue_copy, &m, sizeof m);
}

void dc__cuda_stream_zero(dc_stream *stream, void *dst, size_t bytes) {
  dc__cuda_stream_copy(stream, dst, NULL, bytes);
}

/* ---- kernels ---- */

typedef struct launch_op {
  int32_t kernel;
  uint32_t blocks[3];
  uint32_t threads;
  uint32_t shared_bytes;
  _Alignas(max_align_t) unsigned char args[DC__LAUNCH_BYTES];
} launch_op;
_Static_assert(sizeof(launch_op) <= DC__TASK_BYTES, "a launch must fit into a worker's task");

static void issue_launch(dc__cuda_stream *stream, void *args) {
  launch_op *l = args;
  const dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  void *params[] = {l->args};
  (void)DC__CUDA_KEEP_ON(stream, cuLaunchKernel, device->kernels[l->kernel], l->blocks[0], l->blocks[1], l->blocks[2],
                         l->threads, 1, 1, l->shared_bytes, stream->native, params, NULL);
}

void dc__cuda_stream_launch(dc_stream *stream, const dc__launch *launch) {
  launch_op l = {.kernel = launch->kernel, .threads = launch->threads, .shared_bytes = launch->shared_bytes};
  l.blocks[0] = launch->blocks;
  l.blocks[1] = launch->blocks_y != 0 ? launch->blocks_y : 1;
  l.blocks[2] = launch->blocks_z != 0 ? launch->blocks_z : 1;
  memcpy(l.args, launch->args, launch->bytes);
  dc__cuda_submit_kept((dc__cuda_stream *)stream, issue_launch, &l, offsetof(launch_op, args) + launch->bytes);
}

/* ---- other libraries ---- */

typedef struct native_call {
  dc__native_fn fn;
  _Alignas(max_align_t) unsigned char args[DC__LAUNCH_BYTES];
} native_call;

static void issue_native(dc__cuda_stream *stream, void *args) {
  native_call *f = args;
  f->fn(stream->native, f->args);
}

dc_status dc__cuda_stream_issue(dc_stream *stream, dc__native_fn fn, const void *args, size_t bytes, bool blocks) {
  native_call f = {.fn = fn};
  memcpy(f.args, args, bytes);
  return dc__cuda_submit((dc__cuda_stream *)stream, issue_native, &f, offsetof(native_call, args) + bytes, blocks);
}
