/* Steps of AdamW, SGD and Muon on a stream that is held back, and in CUDA graphs whose launches are steps; calls of the
 * driver that fail. */
#include "stream_steps.h"
#include "support/steps.h"

/* ---- work is held back until the host waits for it ---- */

static void waits_for_nothing(int kind) {
  dc_stream *stream;
  model plain = open_model(kind, NULL, 0, COUNT);
  DO(dc_stream_create(device, &stream));
  model m = open_model(kind, stream, 0, COUNT);
  float before, after;
  DO(step(&plain, 0));
  DO(dc_optimizer_set_lr(plain.optimizer, 0, 0.7));
  DO(step(&plain, 1));
  DO(step(&m, 0));
  DO(dc_stream_synchronize(stream, 0));
  move(&before, m.memory, sizeof before);
  cudasim_hold();
  DO(dc_optimizer_set_lr(m.optimizer, 0, 0.7));
  DO(step(&m, 1));
  memcpy(&after, cudasim_host_ptr(m.memory), sizeof after);
  assert_true(before == after);
  same(&m, &plain); /* waits for the steps */
  DO(step(&m, 2));
  dc_optimizer_destroy(m.optimizer); /* waits too */
  DO(step(&plain, 2));
  assert_memory_equal(cudasim_host_ptr(m.memory), cudasim_host_ptr(plain.memory), COUNT * sizeof(float));
  m.optimizer = NULL;
  close_model(&m);
  close_model(&plain);
  dc_stream_destroy(stream);
}

static void test_a_step_waits_for_nothing(void **state) {
  (void)state;
  for (int kind = 0; kind < KINDS; kind++) {
    waits_for_nothing(kind);
  }
}

/* If a stream has been replaced by none, reading the handle still waits for what was queued on it. */
static void test_reading_waits_for_the_stream_before(void **state) {
  (void)state;
  for (int kind = 0; kind < KINDS; kind++) {
    dc_stream *stream;
    dc_tensor count = DC_TENSOR_INIT;
    DO(dc_stream_create(device, &stream));
    model m = open_model(kind, stream, 0, COUNT);
    DO(step(&m, 0));
    DO(dc_stream_synchronize(stream, 0));
    cudasim_hold();
    DO(step(&m, 1));
    DO(dc_optimizer_set_stream(m.optimizer, NULL));
    DO(dc_optimizer_get_state(m.optimizer, 0, "step", &count));
    assert_int_equal(*(const int64_t *)cudasim_host_ptr(count.data), 2);
    close_model(&m);
    dc_stream_destroy(stream);
  }
}

/* Shampoo's step is complete when it returns, and comes after the stream's work on its gradient. */
static void test_other_kinds_wait_for_the_stream(void **state) {
  (void)state;
  const int64_t n = 8;
  dc_optimizer *optimizer;
  dc_stream *stream;
  float *x;
  DO(device->ops->alloc(device, ALLOC_BYTES, DC_MEMORY_DEVICE, (void **)&x));
  dc__stream_zero(device->internal_stream, x, 16 * sizeof *x);
  dc__device_sync_internal(device, NULL);
  DO(dc_stream_create(device, &stream));
  DO(dc_shampoo_create(linalg, NULL, NULL, &optimizer));
  DO(dc_optimizer_add_param(optimizer, 0, &n, 1, 0, n, DC_FLOAT32, NULL));
  DO(dc_optimizer_set_stream(optimizer, stream));
  dc_tensor weight = flat(x, &n, DC_FLOAT32), grad = flat(x + 8, &n, DC_FLOAT32);
  static const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  cudasim_hold();
  dc__stream_copy(stream, x + 8, ones, sizeof ones);
  DO(dc_optimizer_step(optimizer, &weight, &grad, sizeof weight, 1, 1));
  assert_true(*(float *)cudasim_host_ptr(x) < 0);
  dc_optimizer_destroy(optimizer);
  dc_stream_destroy(stream);
  device->ops->free(device, x, ALLOC_BYTES, DC_MEMORY_DEVICE);
}

/* ---- graphs ---- */

/* Calls that a capture does not allow. */
static void refuse(const model *fresh, const model *m) {
  char bytes[1];
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  assert_int_equal(step(fresh, 0), DC_E_STATE);
  assert_non_null(strstr(dc_last_error(), "make a step before the capture"));
  assert_int_equal(dc_optimizer_set_lr(m->optimizer, 0, 0.3), DC_E_STATE);
  assert_non_null(strstr(dc_last_error(), "set it before the capture, or between launches"));
  DO(dc_optimizer_set_lr(m->optimizer, 0, 1e-3)); /* the rate that is set already */
  assert_int_equal(dc_optimizer_save(m->optimizer, bytes, sizeof bytes), DC_E_STATE);
  assert_non_null(strstr(dc_last_error(), "where the host cannot wait"));
  assert_int_equal(dc_optimizer_get_stats(m->optimizer, &stats), DC_E_STATE);
  assert_int_equal(steps_of(m->optimizer), -1);
  assert_int_equal(dc_optimizer_set_stream(m->optimizer, NULL), DC_E_STATE);
  assert_non_null(strstr(dc_last_error(), "end the capture first"));
}

static void test_launches_are_steps(void **state) {
  (void)state;
  void *native = cudasim_stream();
  dc_stream *stream;
  DO(dc_stream_wrap(device, native, &stream));
  for (int kind = 0; kind < KINDS; kind++) {
    model plain = open_model(kind, NULL, 0, COUNT);
    model m = open_model(kind, stream, 0, COUNT);
    model fresh = open_model(kind, stream, 0, COUNT);
    DO(step(&plain, 0));
    DO(step(&m, 0));
    cudasim_capture(native);
    const int taken = cudasim_calls("cuMemAllocFromPoolAsync");
    refuse(&fresh, &m);
    DO(step(&m, 0));
    assert_int_equal(cudasim_calls("cuMemAllocFromPoolAsync"), taken);
    assert_true(cudasim_capture_end(native));
    for (int n = 1; n < STEPS; n++) { /* copies each step's gradients to where the graph reads them */
      DO(dc_optimizer_set_lr(m.optimizer, 1, rate(n)));
      DO(dc_optimizer_set_lr(plain.optimizer, 1, rate(n)));
      dc__stream_copy(stream, grad_of(&m, 0, 0), grad_of(&m, n, 0), BYTES);
      move(grad_of(&plain, 0, 0), grad_of(&plain, n, 0), BYTES);
      cudasim_launch(native);
      assert_int_equal(step(&plain, 0), n == BAD ? DC_E_NOT_FINITE : DC_OK);
      if (n == 5) {
        same(&plain, &m);
      }
    }
    same(&plain, &m);
    DO(step(&plain, 0)); /* and without the graph */
    DO(step(&m, 0));
    same(&plain, &m);
    close_model(&plain);
    close_model(&fresh);
    close_model(&m);
  }
  dc_stream_destroy(stream);
  cudasim_stream_end(native);
}

/* As in PyTorch's adapter: the first steps use another stream than the captured one, which is set during the
 * capture. */
static void test_the_captured_stream_is_set_in_the_capture(void **state) {
  (void)state;
  void *native = cudasim_stream();
  dc_stream *first, *captured;
  DO(dc_stream_create(device, &first));
  DO(dc_stream_wrap(device, native, &captured));
  model plain = open_model(0, NULL, 0, COUNT);
  model m = open_model(0, first, 0, COUNT);
  DO(step(&plain, 0));
  DO(step(&m, 0));
  cudasim_capture(native);
  DO(dc_optimizer_set_stream(m.optimizer, captured));
  DO(step(&m, 0));
  assert_true(cudasim_capture_end(native));
  DO(dc_optimizer_set_stream(m.optimizer, first));
  for (int n = 0; n < 2; n++) {
    DO(step(&plain, 0));
    cudasim_launch(native);
  }
  DO(dc_stream_synchronize(captured, 0)); /* launches and calls on the handle are in order */
  DO(step(&plain, 0));
  DO(step(&m, 0));
  same(&plain, &m);
  close_model(&plain);
  close_model(&m);
  dc_stream_destroy(first);
  dc_stream_destroy(captured);
  cudasim_stream_end(native);
}

/* ---- the driver's failures ---- */

/* Makes two steps. Returns how often `counted` was called in them. */
static int use(int kind, const char *counted, const char *failing, int before) {
  model m = {0};
  (void)open_all(NULL);
  DO(device->ops->alloc(device, ALLOC_BYTES, DC_MEMORY_DEVICE, (void **)&m.memory));
  dc__stream_zero(device->internal_stream, m.memory, ALLOC_BYTES);
  dc__device_sync_internal(device, NULL);
  DO(dc_stream_create(device, &m.stream));
  const int begun = cudasim_calls(counted);
  if (failing != NULL) {
    cudasim_fail(failing, before, 2);
  }
  dc_status status = make(&m, kind, 0, COUNT);
  status = status == DC_OK ? dc_optimizer_set_stream(m.optimizer, m.stream) : status;
  status = status == DC_OK ? step(&m, 0) : status;
  status = status == DC_OK ? dc_optimizer_set_lr(m.optimizer, 1, 0.5) : status;
  status = status == DC_OK ? step(&m, 1) : status;
  status = status == DC_OK && steps_of(m.optimizer) != 2 ? DC_E_DEVICE : status;
  const int calls = cudasim_calls(counted) - begun;
  if ((status != DC_OK) != (failing != NULL)) {
    fail_msg("%s, call %d: %s", failing == NULL ? "nothing" : failing, before, dc_last_error());
  }
  close_model(&m);
  dc_stream_destroy(m.stream);
  (void)close_all(NULL);
  return calls;
}

static void test_every_call_fails(void **state) {
  static const char *const functions[] = {"cuLaunchKernel",          "cuMemcpyAsync", "cuMemsetD8Async",
                                          "cuMemAllocFromPoolAsync", "cuEventRecord", "cuStreamSynchronize"};
  (void)close_all(state);
  for (size_t f = 0; f < 2 * DC__COUNT(functions); f++) {
    const int kind = f % 2 == 0 ? ADAMW : MUON;
    const int calls = use(kind, functions[f / 2], NULL, 0);
    assert_true(calls > 0);
    for (int before = 0; before < calls; before++) {
      (void)use(kind, functions[f / 2], functions[f / 2], before);
    }
  }
  (void)open_all(state);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_a_step_waits_for_nothing),
      TEST(test_reading_waits_for_the_stream_before),
      TEST(test_other_kinds_wait_for_the_stream),
      TEST(test_launches_are_steps),
      TEST(test_the_captured_stream_is_set_in_the_capture),
      TEST(test_every_call_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
