/* Steps of AdamW and SGD that read the loss scale and found_inf from the device's memory. They have the bits of steps
 * that get both from the host, on a stream and in a CUDA graph; both values change between its launches. On the
 * simulated driver or on a card. */
#include "stream_steps.h"

#include "cuda_graph.h"

typedef struct numbers {
  float loss_scale, found_inf;
} numbers;

static numbers *alloc_numbers(void) {
  void *ptr;
  DO(device->ops->alloc(device, sizeof(numbers), DC_MEMORY_DEVICE, &ptr));
  return ptr;
}

static void free_numbers(numbers *on_device) {
  device->ops->free(device, on_device, sizeof *on_device, DC_MEMORY_DEVICE);
}

static void set_loss_scale(const model *m, numbers *on_device) {
  static const int64_t one = 1;
  const dc_tensor scale = flat(&on_device->loss_scale, &one, DC_FLOAT32),
                  found = flat(&on_device->found_inf, &one, DC_FLOAT32);
  DO(dc_optimizer_set_loss_scale(m->optimizer, &scale, &found));
}

/* As step(), with the gradients of step 0 and a scale from the host. */
static dc_status step_of(const model *m, double grad_scale) {
  dc_tensor weights[PARAMS], grads[PARAMS];
  for (int p = 0; p < PARAMS; p++) {
    weights[p] = flat(weight_of(m, p), &m->count, dtypes[p]);
    grads[p] = flat(grad_of(m, 0, p), &m->count, grad_dtypes[p]);
  }
  return dc_optimizer_step(m->optimizer, weights, grads, sizeof *weights, PARAMS, grad_scale);
}

static numbers of_step(int n) {
  return (numbers){.loss_scale = (float)(n + 3), .found_inf = n == 2 ? 1.0f : 0.0f};
}

/* Compares m's steps, which `go` makes, with those of a plain optimizer. The host gives that one the same loss scales,
 * and leaves out the steps in which found_inf is set. */
static void compare_with_host_scale(int kind, const model *m, numbers *on_device,
                                    void (*go)(const model *m, void *native), void *native) {
  model plain = open_model(kind, NULL, 0, COUNT);
  DO(step_of(&plain, 0.5));
  int64_t left_out = 0;
  for (int n = 1; n < STEPS; n++) {
    const numbers now = of_step(n);
    dc__stream_copy(m->stream, grad_of(m, 0, 0), grad_of(m, n, 0), BYTES);
    dc__stream_copy(m->stream, on_device, &now, sizeof now);
    DO(dc_stream_synchronize(m->stream, 0)); /* `now` is on the host's stack */
    go(m, native);
    if (now.found_inf == 0) {
      move(grad_of(&plain, 0, 0), grad_of(&plain, n, 0), BYTES);
      assert_int_equal(step_of(&plain, 0.5 / (double)now.loss_scale), n == BAD ? DC_E_NOT_FINITE : DC_OK);
    } else {
      left_out++;
    }
  }
  dc_optimizer_stats stats[2] = {DC_OPTIMIZER_STATS_INIT, DC_OPTIMIZER_STATS_INIT};
  static char weights[2][BYTES];
  for (int k = 0; k < 2; k++) {
    const model *device_optimizer = k == 0 ? &plain : m;
    DO(dc_optimizer_get_stats(device_optimizer->optimizer, &stats[k]));
    move(weights[k], device_optimizer->memory, BYTES);
  }
  assert_memory_equal(weights[0], weights[1], BYTES);
  assert_int_equal(stats[1].steps, stats[0].steps);
  assert_int_equal(stats[1].skipped_steps, stats[0].skipped_steps + left_out);
  close_model(&plain);
}

static void plain_step(const model *m, void *native) {
  (void)native;
  DO(step_of(m, 0.5));
}

static void launch(const model *m, void *native) {
  (void)m;
  graph_launch(native);
}

static void test_numbers_are_read_in_the_steps_turn(void **state) {
  (void)state;
  for (int kind = 0; kind < KINDS; kind++) {
    dc_stream *stream;
    numbers *on_device = alloc_numbers();
    DO(dc_stream_create(device, &stream));
    model m = open_model(kind, stream, 0, COUNT);
    DO(step_of(&m, 0.5));
    set_loss_scale(&m, on_device);
    compare_with_host_scale(kind, &m, on_device, plain_step, NULL);
    close_model(&m);
    dc_stream_destroy(stream);
    free_numbers(on_device);
  }
}

static void test_launches_read_them_anew(void **state) {
  (void)state;
  graphs_open();
  void *native = graph_stream();
  dc_stream *stream;
  DO(dc_stream_wrap(device, native, &stream));
  for (int kind = 0; kind < KINDS; kind++) {
    numbers *on_device = alloc_numbers();
    model m = open_model(kind, stream, 0, COUNT);
    DO(step_of(&m, 0.5));
    set_loss_scale(&m, on_device);
    graph_capture(native);
    DO(step_of(&m, 0.5));
    graph_capture_end(native);
    compare_with_host_scale(kind, &m, on_device, launch, native);
    graph_drop();
    close_model(&m);
    free_numbers(on_device);
  }
  dc_stream_destroy(stream);
  graph_stream_end(native);
  graphs_close();
}

/* Without a stream, too, a gradient that is not finite is no error if found_inf is set. */
static void test_found_inf_is_no_error(void **state) {
  (void)state;
  model m = open_model(0, NULL, 0, COUNT);
  numbers *on_device = alloc_numbers();
  const numbers now = {.loss_scale = 1, .found_inf = 1};
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  move(on_device, &now, sizeof now);
  set_loss_scale(&m, on_device);
  DO(step(&m, BAD));
  DO(dc_optimizer_set_loss_scale(m.optimizer, NULL, NULL));
  assert_int_equal(step(&m, BAD), DC_E_NOT_FINITE);
  DO(dc_optimizer_get_stats(m.optimizer, &stats));
  assert_int_equal(stats.skipped_steps, 2);
  assert_int_equal(stats.steps, 0);
  close_model(&m);
  free_numbers(on_device);
}

/* Shampoo waits for the stream, and then reads both values. */
static void test_second_order_kinds_read_them(void **state) {
  (void)state;
  const int64_t shape[2] = {4, 4}, count = 16;
  dc_optimizer *optimizer;
  dc_stream *stream;
  numbers *on_device = alloc_numbers();
  float *x, before[32], after[32];
  DO(device->ops->alloc(device, ALLOC_BYTES, DC_MEMORY_DEVICE, (void **)&x));
  for (int i = 0; i < 32; i++) {
    before[i] = (float)(i * 7 % 5) - 2.0f;
  }
  move(x, before, sizeof before);
  DO(dc_stream_create(device, &stream));
  DO(dc_shampoo_create(linalg, NULL, NULL, &optimizer));
  DO(dc_optimizer_add_param(optimizer, 0, shape, 2, 0, count, DC_FLOAT32, NULL));
  DO(dc_optimizer_set_stream(optimizer, stream));
  const model m = {.optimizer = optimizer};
  set_loss_scale(&m, on_device);
  dc_tensor weight = flat(x, &count, DC_FLOAT32), grad = flat(x + 16, &count, DC_FLOAT32);
  for (int found = 1; found >= 0; found--) {
    const numbers now = {.loss_scale = 2, .found_inf = (float)found};
    dc__stream_copy(stream, on_device, &now, sizeof now);
    DO(dc_optimizer_step(optimizer, &weight, &grad, sizeof weight, 1, 1));
    move(after, x, sizeof after);
    assert_int_equal(memcmp(before, after, sizeof after) == 0, found);
  }
  dc_optimizer_destroy(optimizer);
  dc_stream_destroy(stream);
  device->ops->free(device, x, ALLOC_BYTES, DC_MEMORY_DEVICE);
  free_numbers(on_device);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_numbers_are_read_in_the_steps_turn),
      TEST(test_launches_read_them_anew),
      TEST(test_found_inf_is_no_error),
      TEST(test_second_order_kinds_read_them),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
