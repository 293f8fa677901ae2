/* A training run of one rank on a wrapped stream, whose steps can be captured into a CUDA graph, on the simulated
 * driver or on a card. */
#ifndef TESTS_CAPTURED_STEP_H
#define TESTS_CAPTURED_STEP_H

#include "harness.h"

#ifndef ON_CARD
#include "cudasim.h"
#endif
#include "cuda_graph.h"
#include "device/device.h"
#include "kernels/kernels.h"

enum { PARAMS = 4, COUNT = 300, GRAPH = 7, STEPS = 6 };

/* One training run: a context of one rank on a wrapped stream. */
typedef struct run {
  dc_device *device;
  void *native;
  dc_stream *stream;
  dc_context *ctx;
  int32_t stage;
  float *weights, *grads, *activation, *full; /* on the device; the first two have PARAMS * COUNT elements */
} run;

static const int64_t count = COUNT;

#define DO(call)                                  \
  do {                                            \
    if ((call) != DC_OK) {                        \
      fail_msg("%s: %s", #call, dc_last_error()); \
    }                                             \
  } while (0)

static inline float *run_alloc(run *r, int64_t elements) {
  void *ptr;
  DO(r->device->ops->alloc(r->device, (size_t)elements * sizeof(float), DC_MEMORY_DEVICE, &ptr));
  return ptr;
}

static inline void run_release(run *r, float *ptr, int64_t elements) {
  r->device->ops->free(r->device, ptr, (size_t)elements * sizeof(float), DC_MEMORY_DEVICE);
}

static inline void register_all(run *r) {
  static dc_status (*const graphs[])(dc_context *, int64_t, const int64_t *, int64_t) = {
      dc_register_graph_z0, dc_register_graph_z1, dc_register_graph_z2, dc_register_graph_z3};
  int64_t ids[PARAMS];
  for (int64_t i = 0; i < PARAMS; i++) {
    dc_tensor weight = flat(r->weights + i * COUNT, &count, DC_FLOAT32);
    dc_tensor grad = flat(r->grads + i * COUNT, &count, DC_FLOAT32);
    ids[i] = i;
    DO(r->stage == 3 ? dc_register_z3_param(r->ctx, i, &count, 1, &weight, &grad, i == 1, DC_DTYPE_NONE)
                     : dc_register_param(r->ctx, i, &count, 1, &weight, &grad, 0));
  }
  DO(graphs[r->stage](r->ctx, GRAPH, ids, PARAMS));
}

static inline run open_run(int32_t stage) {
  run r = {.stage = stage};
  float host[PARAMS * COUNT];
  DO(dc_device_open("cuda", NULL, &r.device));
  r.native = graph_stream();
  DO(dc_stream_wrap(r.device, r.native, &r.stream));
  r.weights = run_alloc(&r, PARAMS * COUNT);
  r.grads = run_alloc(&r, PARAMS * COUNT);
  r.activation = run_alloc(&r, COUNT);
  r.full = run_alloc(&r, COUNT);
  for (int i = 0; i < PARAMS * COUNT; i++) {
    host[i] = (float)(i * 7919 % 1013) / 512.0f - 1.0f;
  }
  dc__stream_copy(r.stream, r.weights, host, sizeof host);
  DO(dc_context_create(r.device, NULL, &r.ctx));
  DO(dc_init(r.ctx, NULL, &(dc_config){.struct_size = sizeof(dc_config), .check_finite = 1}, 2 * COUNT));
  DO(dc_context_set_stream(r.ctx, r.stream));
  register_all(&r);
  return r;
}

static inline void close_run(run *r) {
  DO(dc_stream_synchronize(r->stream, 0));
  dc_context_destroy(r->ctx);
  run_release(r, r->weights, PARAMS * COUNT);
  run_release(r, r->grads, PARAMS * COUNT);
  run_release(r, r->activation, COUNT);
  run_release(r, r->full, COUNT);
  dc_stream_destroy(r->stream);
  graph_stream_end(r->native);
  dc_device_destroy(r->device);
}

/* Uses a parameter's weights: at stage 3 gathered, every third parameter as float16; below stage 3 its own. */
static inline void use(run *r, int64_t id) {
  const void *full = r->weights + id * COUNT;
  int32_t dtype = DC_FLOAT32;
  dc_tensor out = DC_TENSOR_INIT;
  if (r->stage == 3) {
    dtype = id % 3 == 2 ? DC_FLOAT16 : DC_FLOAT32;
    DO(dc_allgather_param(r->ctx, NULL, GRAPH, id, dtype, &out));
    DO(dc_wait_allgather(r->ctx, NULL, GRAPH, id));
    full = out.data;
  }
  dc__stream_accumulate(r->stream, r->activation, DC_FLOAT32, full, dtype, COUNT);
  if (r->stage == 3) {
    DO(dc_release_param(r->ctx, NULL, GRAPH, id, 1));
  }
}

/* Offloads an activation between forward and backward. */
static inline void offload(run *r, const dc_tensor *a) {
  dc_tensor out = DC_TENSOR_INIT;
  DO(dc_offload_tensor(r->ctx, a, GRAPH, 99, &out));
  DO(dc_wait_offload(r->ctx, NULL, GRAPH, 99, &out));
  dc__stream_zero(r->stream, r->activation, COUNT * sizeof(float));
}

static inline void reload(run *r) {
  dc_tensor out = DC_TENSOR_INIT;
  DO(dc_reload_tensor(r->ctx, NULL, GRAPH, 99, &out));
  DO(dc_wait_reload(r->ctx, NULL, GRAPH, 99, &out));
  dc__stream_copy(r->stream, r->activation, out.data, COUNT * sizeof(float));
}

/* Two micro-batches and an optimizer's step, all on the stream. */
static inline void step(run *r) {
  dc_tensor a = flat(r->activation, &count, DC_FLOAT32);
  for (int32_t half = 0; half < 2; half++) {
    dc__stream_zero(r->stream, r->activation, COUNT * sizeof(float));
    for (int64_t i = 0; i < PARAMS; i++) {
      use(r, i);
    }
    if (r->stage == 3) {
      offload(r, &a);
      reload(r);
    }
    DO(dc_start_backward(r->ctx, half));
    for (int64_t i = PARAMS - 1; i >= 0; i--) {
      use(r, i);
      DO(dc_reduce_grad(r->ctx, &a, GRAPH, i));
    }
    DO(dc_end_backward(r->ctx, GRAPH, 0));
  }
  dc__stream_copy(r->stream, r->full, r->activation, COUNT * sizeof(float));
  dc__stream_accumulate(r->stream, r->weights, DC_FLOAT32, r->grads, DC_FLOAT32, PARAMS * COUNT);
  int64_t ids[PARAMS] = {0, 1, 2, 3};
  DO(dc_context_params_updated(r->ctx, ids, PARAMS));
}

static inline void capture(run *r) {
  dc_memory_stats stats = DC_MEMORY_STATS_INIT;
  graph_capture(r->native);
  DO(dc_context_reset_stats(r->ctx));
  step(r);
  DO(dc_context_get_memory_stats(r->ctx, &stats));
  assert_true(stats.gathered_peak_bytes < 2 * COUNT * (int64_t)sizeof(float)); /* one parameter at a time */
  graph_capture_end(r->native);
}

/* Copies values when the stream has done all its work. */
static inline void copy_to_host(run *r, void *to, const void *from, size_t bytes) {
  dc__stream_copy(r->stream, to, from, bytes);
  DO(dc_stream_synchronize(r->stream, 0));
  DO(dc__device_check(r->device));
}

static inline void compare(run *a, run *b) {
  static float found[2][2 * PARAMS * COUNT + COUNT];
  for (int k = 0; k < 2; k++) {
    run *r = k == 0 ? a : b;
    copy_to_host(r, found[k], r->weights, PARAMS * COUNT * sizeof(float));
    copy_to_host(r, found[k] + PARAMS * COUNT, r->grads, PARAMS * COUNT * sizeof(float));
    copy_to_host(r, found[k] + 2 * PARAMS * COUNT, r->full, COUNT * sizeof(float));
  }
  assert_memory_equal(found[0], found[1], sizeof found[0]);
}

#endif
