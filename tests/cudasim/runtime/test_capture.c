/* A training step captured into a CUDA graph. Launched, it has the bits of the step that is not captured, at every
 * stage, also after other steps and other captures. Also tested: which memory a graph holds, what it must not touch,
 * and calls that no capture allows. */
#include "captured_step.h"

static void test_a_launch_is_a_step(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    run plain = open_run(stage), captured = open_run(stage);
    for (int i = 0; i < 2 * STEPS; i++) {
      step(&plain);
    }
    step(&captured);
    for (int k = 0; k < 2; k++) { /* a second graph replaces the first one, with other steps between */
      use(&captured, 1);          /* gathered now, and kept; the graph gathers again */
      capture(&captured);
      for (int i = 0; i < STEPS - 1; i++) {
        graph_launch(captured.native);
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
  DO(dc_context_get_memory_stats(r.ctx, &before));
  DO(dc_end_backward(r.ctx, GRAPH, 1)); /* memory that was freed is reused from here on */
  for (int i = 0; i < 24; i++) {
    const size_t bytes = (size_t)(i % 8 + 1) * COUNT;
    int32_t kind = i < 8 ? DC_MEMORY_DEVICE : i < 16 ? DC_MEMORY_SHARED : DC_MEMORY_HOST;
    DO(dc_context_alloc(r.ctx, (int64_t)bytes, kind, &buffers[i]));
  }
  for (int i = 0; i < STEPS; i++) {
    graph_launch(r.native);
  }
  for (int i = 0; i < 24; i++) {
    static char bytes[8 * COUNT];
    copy_to_host(&r, bytes, dc_buffer_data(buffers[i]), (size_t)(i % 8 + 1) * COUNT);
    for (int j = 0; j < (i % 8 + 1) * COUNT; j++) {
      assert_int_equal(bytes[j], 0);
    }
    dc_buffer_release(buffers[i]);
  }
  /* Captures share their memory, so later ones take no more. */
  capture(&r);
  capture(&r);
  DO(dc_context_get_memory_stats(r.ctx, &after));
  assert_int_equal(before.arena_bytes, after.arena_bytes);
  close_run(&r);
}

static void refused(dc_status found, dc_status expected, const char *text) {
  assert_int_equal(found, expected);
  if (strstr(dc_last_error(), text) == NULL) {
    fail_msg("\"%s\" lacks \"%s\"", dc_last_error(), text);
  }
}

static void test_calls_that_a_capture_forbids(void **state) {
  (void)state;
  run r = open_run(3);
  dc_tensor a = flat(r.activation, &count, DC_FLOAT32), out = DC_TENSOR_INIT;
  dc_comm *self;
  dc_stream *other;
  step(&r);
  DO(dc_allgather_param(r.ctx, NULL, GRAPH, 2, DC_DTYPE_NONE, &out));
  graph_capture(r.native);
  refused(dc_allgather_param(r.ctx, NULL, GRAPH, 0, DC_DTYPE_NONE, &out), DC_E_STATE,
          "a capture into a CUDA graph begins, but parameter 2 is still gathered");
  graph_capture_end(r.native);
  DO(dc_release_param(r.ctx, NULL, GRAPH, 2, 1));
  DO(dc_start_backward(r.ctx, 1));
  DO(dc_reduce_grad(r.ctx, &a, GRAPH, 1));
  graph_capture(r.native);
  refused(dc_end_backward(r.ctx, GRAPH, 0), DC_E_STATE, "begins, but parameter 1 has a gradient pending");
  graph_capture_end(r.native);
  DO(dc_end_backward(r.ctx, GRAPH, 0));

  graph_capture(r.native);
  step(&r);
  DO(dc_stream_create(r.device, &other));
  refused(dc_context_set_stream(r.ctx, other), DC_E_STATE, "the stream set before is captured into a CUDA graph");
  refused(dc_end_backward(r.ctx, GRAPH, 1), DC_E_STATE, "release_buckets = 1, but the CUDA graph");
  DO(dc_comm_create_threads(1, NULL, &self));
  refused(dc_comm_broadcast(self, &a, 0, r.stream), DC_E_UNSUPPORTED, "a CUDA graph, which cannot hold a collective");
  DO(dc_allgather_param(r.ctx, NULL, GRAPH, 3, DC_DTYPE_NONE, &out));
  graph_capture_end(r.native);
  refused(dc_start_backward(r.ctx, 1), DC_E_STATE, "has ended, but parameter 3 is still gathered");
  DO(dc_context_set_stream(r.ctx, other));
  DO(dc_context_set_stream(r.ctx, r.stream));
  step(&r);
  dc_comm_destroy(self);
  dc_stream_destroy(other);
  close_run(&r);
}

static void expect_finite(run *r, int32_t expected) {
  int32_t finite = -1;
  int64_t id = -1;
  DO(dc_context_grads_finite(r->ctx, &finite, &id));
  assert_int_equal(finite, expected);
  assert_int_equal(id, expected == 1 ? -1 : 0); /* one bad weight makes all gradients bad */
}

static void test_each_launch_looks_for_itself(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    run r = open_run(stage);
    int32_t finite;
    const float infinite = __builtin_inff(), none = 0;
    step(&r);
    expect_finite(&r, 1);
    graph_capture(r.native);
    step(&r);
    refused(dc_context_grads_finite(r.ctx, &finite, NULL), DC_E_STATE,
            "captured into a CUDA graph; ask after a launch");
    graph_capture_end(r.native);
    for (int i = 0; i < 3; i++) {            /* weights become large; one is gathered as float16 */
      for (int64_t k = 0; k < PARAMS; k++) { /* at the place of the last step's gradients */
        dc__stream_copy(r.stream, r.weights + k * COUNT + 5, i == 1 ? &infinite : &none, sizeof none);
      }
      graph_launch(r.native);
      expect_finite(&r, i != 1);
    }
    step(&r);
    expect_finite(&r, 1);
    close_run(&r);
  }
}

/* The context gets a stream that is already captured, as PyTorch's is when a captured step begins. */
static void test_a_captured_stream_is_set(void **state) {
  (void)state;
  run plain = open_run(3), captured = open_run(3);
  void *native = graph_stream();
  dc_stream *wrapped, *before = captured.stream;
  DO(dc_stream_wrap(captured.device, native, &wrapped));
  step(&plain);
  step(&plain);
  step(&captured);
  graph_capture(native);
  captured.stream = wrapped;
  DO(dc_context_set_stream(captured.ctx, wrapped));
  step(&captured);
  graph_capture_end(native);
  captured.stream = before;
  DO(dc_context_set_stream(captured.ctx, before));
  graph_launch(captured.native);
  compare(&plain, &captured);
  dc_stream_destroy(wrapped);
  graph_stream_end(native);
  close_run(&captured);
  close_run(&plain);
}

/* A capture with two ranks is refused, and they stay usable. */
static void one_of_two(rank *r) {
  void *native = graph_stream();
  dc_stream *stream;
  OK(r, dc_stream_wrap(r->device, native, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  graph_capture(native);
  CHECK(r, dc_start_forward(r->ctx) == DC_E_UNSUPPORTED);
  CHECK(r, strstr(dc_last_error(), "the context has ranks that meet (local, 2 of them)") != NULL);
  graph_capture_end(native);
  graph_drop();
  OK(r, dc_start_forward(r->ctx));
  OK(r, dc_context_set_stream(r->ctx, NULL));
  dc_stream_destroy(stream);
  graph_stream_end(native);
}

static void test_ranks_that_meet_are_refused(void **state) {
  (void)state;
  assert_int_equal(setenv("LIBDC_TEST_DEVICE", "cuda", 1), 0);
  run_ranks((setup){.world = 2}, one_of_two, NULL);
}

/* The default stream cannot be captured, and must not be asked whether it is. */
static void test_the_default_stream_has_two_names(void **state) {
  (void)state;
  run r = open_run(3);
  for (uintptr_t name = 0; name <= DC__CU_STREAM_LEGACY; name++) {
    dc_stream *stream;
    float found[2] = {7, 7};
    DO(dc_stream_wrap(r.device, (void *)name, &stream));
    DO(dc_context_set_stream(r.ctx, stream));
    dc__stream_zero(stream, r.full, sizeof found);
    dc__stream_copy(stream, r.full, r.weights, 0); /* nothing */
    dc__stream_copy(stream, found, r.full, sizeof found);
    DO(dc_stream_synchronize(stream, 0));
    assert_true(found[1] == 0.0f);
    DO(dc_context_set_stream(r.ctx, r.stream));
    dc_stream_destroy(stream);
  }
  close_run(&r);
}

/* Devices are opened and closed during another thread's capture, without waiting for its work. */
static void test_a_device_closes_during_a_capture(void **state) {
  (void)state;
  run plain = open_run(3), captured = open_run(3);
  step(&plain);
  step(&plain);
  step(&captured);
  graph_capture(captured.native);
  run other = open_run(3);
  step(&other);
  close_run(&other);
  step(&captured);
  graph_capture_end(captured.native);
  graph_launch(captured.native);
  compare(&plain, &captured);
  close_run(&captured);
  close_run(&plain);
}

/* A capture is invalidated in the middle of a step, as another thread's call may do. Later steps and captures work. */
static void test_a_spoiled_capture_fails_alone(void **state) {
  (void)state;
  run plain = open_run(3), captured = open_run(3);
  step(&plain);
  step(&captured);
  graph_capture(captured.native);
  use(&captured, 0);
  graph_spoil(captured.native);
  step(&captured);
  graph_spoiled_end(captured.native);
  compare(&plain, &captured); /* no work of the capture has run */
  step(&plain);
  step(&captured);
  compare(&plain, &captured);
  capture(&captured);
  graph_launch(captured.native);
  step(&plain);
  compare(&plain, &captured);
  close_run(&captured);
  close_run(&plain);
}

#ifndef ON_CARD
static void note(void *user) {
  *(bool *)user = true;
}

static void test_closing_waits_for_streams_of_others(void **state) {
  (void)state;
  void *native = graph_stream();
  bool ran = false;
  dc_device *device;
  dc_stream *stream;
  DO(dc_device_open("cuda", NULL, &device));
  DO(dc_stream_wrap(device, native, &stream));
  cudasim_hold();
  cudasim_stream_call(native, note, &ran); /* stands for a kernel on that stream */
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  assert_true(ran);
  graph_stream_end(native);
}
#endif

static int reset(void **state) {
  (void)state;
#ifndef ON_CARD
  cudasim_reset();
#endif
  graphs_open();
  return 0;
}

static int all_memory_returned(void **state) {
  (void)state;
  graph_drop();
  graphs_close();
#ifndef ON_CARD
  assert_int_equal(cudasim_live(), 0);
  assert_int_equal(cudasim_depth(), 0);
#endif
  return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, reset, all_memory_returned)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_a_launch_is_a_step),
      TEST(test_a_graph_writes_to_nothing_of_others),
      TEST(test_calls_that_a_capture_forbids),
      TEST(test_each_launch_looks_for_itself),
      TEST(test_a_captured_stream_is_set),
      TEST(test_ranks_that_meet_are_refused),
      TEST(test_the_default_stream_has_two_names),
      TEST(test_a_device_closes_during_a_capture),
      TEST(test_a_spoiled_capture_fails_alone),
#ifndef ON_CARD
      TEST(test_closing_waits_for_streams_of_others),
#endif
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
