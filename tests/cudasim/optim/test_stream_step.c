/* Steps of AdamW, SGD and Muon on a stream have the bits of steps without one. Between them come a gradient that is not
 * finite, other learning rates and saved states. They run on several streams in turn, and for parts of parameters, each
 * on its own. On the simulated driver, or on a card (tests/card). */
#include "stream_steps.h"
#include "support/steps.h"

/* Makes steps, with all that may come between them. */
static void run(const model *m) {
  size_t bytes;
  for (int n = 0; n < STEPS; n++) {
    DO(dc_optimizer_set_lr(m->optimizer, 0, rate(n)));
    DO(dc_optimizer_set_lr(m->optimizer, 1, 2 * rate(n)));
    assert_int_equal(step(m, n), n == BAD && m->stream == NULL ? DC_E_NOT_FINITE : DC_OK);
    if (n == 4) { /* this step is undone, and made again */
      char *state = saved(m, &bytes);
      char *weights = test_malloc(BYTES);
      move(weights, m->memory, BYTES);
      DO(step(m, n));
      DO(dc_optimizer_load(m->optimizer, state, (int64_t)bytes));
      move(m->memory, weights, BYTES);
      test_free(state);
      test_free(weights);
    }
  }
}

static void test_the_bits_of_steps_without_a_stream(void **state) {
  (void)state;
  dc_stream *streams[2];
  for (int kind = 0; kind < KINDS; kind++) {
    DO(dc_stream_create(device, &streams[0]));
    DO(dc_stream_create(device, &streams[1]));
    model plain = open_model(kind, NULL, 0, COUNT);
    model queued = open_model(kind, streams[0], 0, COUNT);
    dc_tensor count = DC_TENSOR_INIT;
    int64_t steps = 0;
    run(&plain);
    run(&queued);
    same(&plain, &queued);
    DO(dc_optimizer_get_state(queued.optimizer, 5, "step", &count));
    move(&steps, count.data, sizeof steps);
    assert_int_equal(steps, 4);                      /* steps 0, 2, 4 and 6 counted */
    assert_int_equal(steps_of(queued.optimizer), 6); /* all steps but BAD */
    DO(step(&plain, 1));
    DO(dc_optimizer_set_stream(plain.optimizer, streams[1]));
    DO(step(&plain, 2)); /* ordered behind the step on the other stream */
    DO(step(&queued, 1));
    DO(dc_optimizer_set_stream(queued.optimizer, streams[1]));
    DO(step(&queued, 2));
    DO(dc_optimizer_set_stream(queued.optimizer, NULL));
    DO(dc_optimizer_set_stream(plain.optimizer, NULL));
    same(&plain, &queued);
    close_model(&plain);
    close_model(&queued);
    dc_stream_destroy(streams[0]);
    dc_stream_destroy(streams[1]);
  }
}

static void test_refused_arguments(void **state) {
  (void)state;
  dc_device *cpu;
  dc_stream *stream;
  model m = open_model(0, NULL, 0, COUNT);
  DO(dc_device_open("cpu", NULL, &cpu));
  DO(dc_stream_create(cpu, &stream));
  assert_int_equal(dc_optimizer_set_stream(m.optimizer, stream), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "stream is of device \"cpu\", must be of the optimizer's, \"cuda\""));
  assert_int_equal(dc_optimizer_set_stream(NULL, NULL), DC_E_INVALID);
  DO(step(&m, 0));
  close_model(&m);
  dc_stream_destroy(stream);
  dc_device_destroy(cpu);
}

/* Each rank has a part of every parameter, and skips steps by its own gradients. */
static void *run_part(void *arg) {
  model *m = arg;
  for (int n = 0; n < STEPS; n++) {
    if (n != BAD && step(m, n) != DC_OK) {
      return (void *)dc_last_error();
    }
  }
  return NULL;
}

static void test_parts_on_streams_of_their_own(void **state) {
  (void)state;
  static const int64_t cut[3] = {0, 101, COUNT};
  static char whole[COUNT * 4], part[COUNT * 4];
  model all = open_model(0, NULL, 0, COUNT);
  model parts[2];
  dc_stream *streams[2];
  pthread_t threads[2];
  for (int r = 0; r < 2; r++) {
    DO(dc_stream_create(device, &streams[r]));
    parts[r] = open_model(0, streams[r], cut[r], cut[r + 1] - cut[r]);
    assert_int_equal(pthread_create(&threads[r], NULL, run_part, &parts[r]), 0);
  }
  assert_null(run_part(&all));
  for (int r = 0; r < 2; r++) {
    void *failure;
    pthread_join(threads[r], &failure);
    assert_null(failure);
    DO(dc_stream_synchronize(streams[r], 0));
    for (int p = 0; p < PARAMS; p++) {
      const size_t size = dc_dtype_size(dtypes[p]);
      const size_t bytes = (size_t)parts[r].count * size;
      move(part, weight_of(&parts[r], p), bytes);
      move(whole, weight_of(&all, p) + (size_t)cut[r] * size, bytes);
      assert_memory_equal(part, whole, bytes);
    }
    close_model(&parts[r]);
    dc_stream_destroy(streams[r]);
  }
  close_model(&all);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_the_bits_of_steps_without_a_stream),
      TEST(test_refused_arguments),
      TEST(test_parts_on_streams_of_their_own),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
