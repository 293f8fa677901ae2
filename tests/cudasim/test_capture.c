/* A training step captured into a CUDA graph: launched, it has the bits of the step that is not captured, at every
 * stage, and again after other steps and other captures. What it holds, what it leaves alone, and what no capture
 * allows. */
#include "harness.h"

#include "cudasim.h"
#include "device/cuda/driver.h"
#include "device/device.h"
#include "kernels/kernels.h"

enum { PARAMS = 4, COUNT = 300, GRAPH = 7, STEPS = 6 };

/* One training run: a context of one rank on a stream that is somebody else's. */
typedef struct run {
  dc_device *device;
  void *native;
  dc_stream *stream;
  dc_context *ctx;
  int32_t stage;
  float *weights, *grads, *activation, *full; /* of the device, PARAMS times COUNT in the first two */
} run;

static const int64_t count = COUNT;

#define DO(call)                                  \
  do {                                            \
    if ((call) != DC_OK) {                        \
      fail_msg("%s: %s", #call, dc_last_error()); \
    }                                             \
  } while (0)

static float *take(run *r, int64_t elements) {
  void *ptr;
  DO(r->device->ops->alloc(r->device, (size_t)elements * sizeof(float), DC_MEMORY_DEVICE, &ptr));
  return ptr;
}

static void give(run *r, float *ptr, int64_t elements) {
  r->device->ops->free(r->device, ptr, (size_t)elements * sizeof(float), DC_MEMORY_DEVICE);
}

static void register_all(run *r) {
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

static run open_run(int32_t stage) {
  run r = {.stage = stage};
  float host[PARAMS * COUNT];
  DO(dc_device_open("cuda", NULL, &r.device));
  r.native = cudasim_stream();
  DO(dc_stream_wrap(r.device, r.native, &r.stream));
  r.weights = take(&r, PARAMS * COUNT);
  r.grads = take(&r, PARAMS * COUNT);
  r.activation = take(&r, COUNT);
  r.full = take(&r, COUNT);
  for (int i = 0; i < PARAMS * COUNT; i++) {
    host[i] = (float)(i * 7919 % 1013) / 512.0f - 1.0f;
  }
  dc__stream_copy(r.stream, r.weights, host, sizeof host);
  DO(dc_context_create(r.device, NULL, &r.ctx));
  DO(dc_init(r.ctx, NULL, &(dc_config){.struct_size = sizeof(dc_config), .check_finite = 1}, 2 * COUNT));
  DO(dc_set_stream(r.ctx, r.stream));
  register_all(&r);
  return r;
}

static void close_run(run *r) {
  DO(dc_stream_synchronize(r->stream, 0));
  dc_context_destroy(r->ctx);
  give(r, r->weights, PARAMS * COUNT);
  give(r, r->grads, PARAMS * COUNT);
  give(r, r->activation, COUNT);
  give(r, r->full, COUNT);
  dc_stream_destroy(r->stream);
  cudasim_stream_end(r->native);
  dc_device_destroy(r->device);
}

/* The parameter's weights, every third one gathered as float16 too; below stage 3 its own. */
static void use(run *r, int64_t id) {
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

/* An activation is away between forward and backward. */
static void offload(run *r, const dc_tensor *a) {
  dc_tensor out = DC_TENSOR_INIT;
  DO(dc_offload_tensor(r->ctx, a, GRAPH, 99, &out));
  DO(dc_wait_offload(r->ctx, NULL, GRAPH, 99, &out));
  dc__stream_zero(r->stream, r->activation, COUNT * sizeof(float));
}

static void reload(run *r) {
  dc_tensor out = DC_TENSOR_INIT;
  DO(dc_reload_tensor(r->ctx, NULL, GRAPH, 99, &out));
  DO(dc_wait_reload(r->ctx, NULL, GRAPH, 99, &out));
  dc__stream_copy(r->stream, r->activation, out.data, COUNT * sizeof(float));
}

/* Two micro-batches and an optimizer's step, all on the stream. */
static void step(run *r) {
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
  DO(dc_params_updated(r->ctx, ids, PARAMS));
}

static void capture(run *r) {
  dc_memory_stats stats = DC_MEMORY_STATS_INIT;
  cudasim_capture(r->native);
  DO(dc_reset_stats(r->ctx));
  step(r);
  DO(dc_get_memory_stats(r->ctx, &stats));
  assert_true(stats.gathered_peak_bytes < 2 * COUNT * (int64_t)sizeof(float)); /* one at a time */
  assert_true(cudasim_capture_end(r->native));
}

static void compare(run *a, run *b) {
  for (int k = 0; k < 2; k++) {
    run *r = k == 0 ? a : b;
    DO(dc_stream_synchronize(r->stream, 0));
    DO(dc__device_check(r->device));
  }
  const size_t bytes = PARAMS * COUNT * sizeof(float);
  assert_memory_equal(cudasim_look(a->weights), cudasim_look(b->weights), bytes);
  assert_memory_equal(cudasim_look(a->grads), cudasim_look(b->grads), bytes);
  assert_memory_equal(cudasim_look(a->full), cudasim_look(b->full), COUNT * sizeof(float));
}

static void test_a_launch_is_a_step(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    run plain = open_run(stage), captured = open_run(stage);
    for (int i = 0; i < 2 * STEPS; i++) {
      step(&plain);
    }
    step(&captured);
    for (int k = 0; k < 2; k++) { /* a second graph takes the first one's place, with other steps between */
      use(&captured, 1);          /* gathered now, and kept; but not for the graph */
      capture(&captured);
      for (int i = 0; i < STEPS - 1; i++) {
        cudasim_launch(captured.native);
      }
      if (k == 0) {
        step(&captured);
      }
    }
    compare(&plain, &captured);
    step(&plain);
    step(&captured);
    compare(&plain, &captured);
    close_run(&captured);
    close_run(&plain);
  }
}

static void test_a_graph_writes_to_nothing_of_others(void **state) {
  (void)state;
  run r = open_run(3);
  dc_memory_stats before = DC_MEMORY_STATS_INIT, after = DC_MEMORY_STATS_INIT;
  dc_buffer *buffers[24];
  step(&r);
  capture(&r);
  DO(dc_get_memory_stats(r.ctx, &before));
  DO(dc_end_backward(r.ctx, GRAPH, 1)); /* what was given back is others' now */
  for (int i = 0; i < 24; i++) {
    const size_t bytes = (size_t)(i % 8 + 1) * COUNT;
    int32_t kind = i < 8 ? DC_MEMORY_DEVICE : i < 16 ? DC_MEMORY_SHARED : DC_MEMORY_HOST;
    DO(dc_memory_alloc(r.ctx, bytes, kind, &buffers[i]));
  }
  for (int i = 0; i < STEPS; i++) {
    cudasim_launch(r.native);
  }
  DO(dc_stream_synchronize(r.stream, 0));
  for (int i = 0; i < 24; i++) {
    const char *bytes = i < 16 ? cudasim_look(dc_buffer_data(buffers[i])) : dc_buffer_data(buffers[i]);
    for (int j = 0; j < (i % 8 + 1) * COUNT; j++) {
      assert_int_equal(bytes[j], 0);
    }
    dc_buffer_release(buffers[i]);
  }
  /* Captures share their memory, and take no more from one to the next. */
  capture(&r);
  capture(&r);
  DO(dc_get_memory_stats(r.ctx, &after));
  assert_int_equal(before.arena_bytes, after.arena_bytes);
  close_run(&r);
}

static void refused(dc_status found, dc_status expected, const char *text) {
  assert_int_equal(found, expected);
  if (strstr(dc_last_error(), text) == NULL) {
    fail_msg("\"%s\" lacks \"%s\"", dc_last_error(), text);
  }
}

static void test_what_no_capture_allows(void **state) {
  (void)state;
  run r = open_run(3);
  dc_tensor a = flat(r.activation, &count, DC_FLOAT32), out = DC_TENSOR_INIT;
  dc_comm *self;
  dc_stream *other;
  step(&r);
  DO(dc_allgather_param(r.ctx, NULL, GRAPH, 2, DC_DTYPE_NONE, &out));
  cudasim_capture(r.native);
  refused(dc_allgather_param(r.ctx, NULL, GRAPH, 0, DC_DTYPE_NONE, &out), DC_E_STATE,
          "a capture into a CUDA graph begins, but parameter 2 is still gathered");
  assert_true(cudasim_capture_end(r.native));
  DO(dc_release_param(r.ctx, NULL, GRAPH, 2, 1));
  DO(dc_start_backward(r.ctx, 1));
  DO(dc_reduce_grad(r.ctx, &a, GRAPH, 1));
  cudasim_capture(r.native);
  refused(dc_end_backward(r.ctx, GRAPH, 0), DC_E_STATE, "begins, but parameter 1 has a gradient pending");
  assert_true(cudasim_capture_end(r.native));
  DO(dc_end_backward(r.ctx, GRAPH, 0));

  cudasim_capture(r.native);
  step(&r);
  DO(dc_stream_create(r.device, &other));
  refused(dc_set_stream(r.ctx, other), DC_E_STATE, "the stream set before is captured into a CUDA graph");
  refused(dc_end_backward(r.ctx, GRAPH, 1), DC_E_STATE, "release_buckets = 1, but the CUDA graph");
  DO(dc_comm_create_threads(1, NULL, &self));
  refused(dc_comm_broadcast(self, &a, 0, r.stream), DC_E_UNSUPPORTED, "a CUDA graph, which cannot hold a collective");
  DO(dc_allgather_param(r.ctx, NULL, GRAPH, 3, DC_DTYPE_NONE, &out));
  assert_true(cudasim_capture_end(r.native));
  refused(dc_start_backward(r.ctx, 1), DC_E_STATE, "has ended, but parameter 3 is still gathered");
  DO(dc_set_stream(r.ctx, other));
  DO(dc_set_stream(r.ctx, r.stream));
  step(&r);
  dc_comm_destroy(self);
  dc_stream_destroy(other);
  close_run(&r);
}

static void expect_finite(run *r, int32_t expected) {
  int32_t finite = -1;
  int64_t id = -1;
  DO(dc_grads_finite(r->ctx, &finite, &id));
  assert_int_equal(finite, expected);
  assert_int_equal(id, expected == 1 ? -1 : 0); /* what one weight has spoilt is in all gradients */
}

static void test_each_launch_looks_for_itself(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    run r = open_run(stage);
    int32_t finite;
    const float infinite = __builtin_inff(), none = 0;
    step(&r);
    expect_finite(&r, 1);
    cudasim_capture(r.native);
    step(&r);
    refused(dc_grads_finite(r.ctx, &finite, NULL), DC_E_STATE, "captured into a CUDA graph; ask after a launch");
    assert_true(cudasim_capture_end(r.native));
    for (int i = 0; i < 3; i++) {            /* weights grow, and one is gathered as float16 */
      for (int64_t k = 0; k < PARAMS; k++) { /* where the last step's gradients went */
        dc__stream_copy(r.stream, r.weights + k * COUNT + 5, i == 1 ? &infinite : &none, sizeof none);
      }
      cudasim_launch(r.native);
      expect_finite(&r, i != 1);
    }
    step(&r);
    expect_finite(&r, 1);
    close_run(&r);
  }
}

/* The stream that comes is captured already, as PyTorch's is when a captured step begins. */
static void test_a_captured_stream_is_set(void **state) {
  (void)state;
  run plain = open_run(3), captured = open_run(3);
  void *native = cudasim_stream();
  dc_stream *theirs, *before = captured.stream;
  DO(dc_stream_wrap(captured.device, native, &theirs));
  step(&plain);
  step(&plain);
  step(&captured);
  cudasim_capture(native);
  captured.stream = theirs;
  DO(dc_set_stream(captured.ctx, theirs));
  step(&captured);
  assert_true(cudasim_capture_end(native));
  captured.stream = before;
  DO(dc_set_stream(captured.ctx, before));
  cudasim_launch(captured.native);
  compare(&plain, &captured);
  dc_stream_destroy(theirs);
  cudasim_stream_end(native);
  close_run(&captured);
  close_run(&plain);
}

/* And nothing of them is broken. */
static void one_of_two(rank *r) {
  void *native = cudasim_stream();
  dc_stream *stream;
  OK(r, dc_stream_wrap(r->device, native, &stream));
  OK(r, dc_set_stream(r->ctx, stream));
  cudasim_capture(native);
  CHECK(r, dc_start_forward(r->ctx) == DC_E_UNSUPPORTED);
  CHECK(r, strstr(dc_last_error(), "the context has ranks that meet (local, 2 of them)") != NULL);
  CHECK(r, cudasim_capture_end(native));
  OK(r, dc_start_forward(r->ctx));
  OK(r, dc_set_stream(r->ctx, NULL));
  dc_stream_destroy(stream);
  cudasim_stream_end(native);
}

static void test_ranks_that_meet_are_refused(void **state) {
  (void)state;
  assert_int_equal(setenv("DC_TEST_DEVICE", "cuda", 1), 0);
  run_ranks((setup){.world = 2}, one_of_two, NULL);
}

/* Which no graph can be captured on, and which is not asked whether one is. */
static void test_the_default_stream_has_two_names(void **state) {
  (void)state;
  run r = open_run(3);
  for (uintptr_t name = 0; name <= DC__CU_STREAM_LEGACY; name++) {
    dc_stream *stream;
    float found[2] = {7, 7};
    DO(dc_stream_wrap(r.device, (void *)name, &stream));
    DO(dc_set_stream(r.ctx, stream));
    dc__stream_zero(stream, r.full, sizeof found);
    dc__stream_copy(stream, r.full, r.weights, 0); /* nothing */
    dc__stream_copy(stream, found, r.full, sizeof found);
    DO(dc_stream_synchronize(stream, 0));
    assert_true(found[1] == 0.0f);
    DO(dc_set_stream(r.ctx, r.stream));
    dc_stream_destroy(stream);
  }
  close_run(&r);
}

static int reset(void **state) {
  (void)state;
  cudasim_reset();
  return 0;
}

static int all_given_back(void **state) {
  (void)state;
  assert_int_equal(cudasim_live(), 0);
  assert_int_equal(cudasim_depth(), 0);
  return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, reset, all_given_back)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_a_launch_is_a_step),
      TEST(test_a_graph_writes_to_nothing_of_others),
      TEST(test_what_no_capture_allows),
      TEST(test_each_launch_looks_for_itself),
      TEST(test_a_captured_stream_is_set),
      TEST(test_ranks_that_meet_are_refused),
      TEST(test_the_default_stream_has_two_names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
