/* K-FAC on the device compared with the CPU: factors, eigenvalues, momentum and weights for every option, types of
 * batches, states that one side saves and the other loads. Refusals have the same status and text on both. Sums on the
 * device differ by rounding. On the simulated driver, or on a card (tests/card). */
#include "kfac_pair.h"

static device_optimizer pair[2];

static void open_both(const dc_kfac_options *options, int32_t approximation) {
  for (int k = 0; k < 2; k++) {
    open_optimizer(&pair[k], k == 0 ? "cpu" : "cuda");
    if (make(&pair[k], NULL, options, approximation) != DC_OK) {
      fail_msg("%s", dc_last_error());
    }
  }
}

static void close_both(void) {
  for (int k = 0; k < 2; k++) {
    close_optimizer(&pair[k]);
  }
}

static void step_both(int number, const int32_t dtypes[2]) {
  for (int k = 0; k < 2; k++) {
    if (step(&pair[k], number, dtypes) != DC_OK) {
      fail_msg("step %d on side %d: %s", number, k, dc_last_error());
    }
  }
}

/* The call fails on both sides with the same text. */
static void both_fail(dc_status (*call)(device_optimizer *s), dc_status status, const char *text) {
  char first_text[512];
  for (int k = 0; k < 2; k++) {
    assert_int_equal(call(&pair[k]), status);
    if (strstr(dc_last_error(), text) == NULL || (k == 1 && strcmp(first_text, dc_last_error()) != 0)) {
      fail_msg("side %d: %s; must say %s", k, dc_last_error(), text);
    }
    snprintf(first_text, sizeof first_text, "%s", dc_last_error());
  }
}

/* ---- comparing ---- */

static double gate_of(const char *name) {
  const bool factor = strncmp(name, "factor", 6) == 0 || strncmp(name, "values", 6) == 0;
  return strcmp(name, "step") == 0 || strcmp(name, "counts") == 0 ? 0 : factor ? 2e-6 : 2e-4;
}

static void compare_state(int p) {
  char copy[8 * MOST];
  const char *name;
  for (int i = 0; dc_optimizer_get_state_name(pair[0].optimizer, p, i, &name) == DC_OK && name != NULL; i++) {
    dc_tensor views[2] = {DC_TENSOR_INIT, DC_TENSOR_INIT};
    for (int k = 0; k < 2; k++) {
      assert_int_equal(dc_optimizer_get_state(pair[k].optimizer, p, name, &views[k]), DC_OK);
    }
    const int64_t count = product_of(views[0].shape, views[0].ndim);
    const bool host = views[0].dtype == DC_INT64; /* the host has it on both sides */
    if (!host) {
      move(&pair[1], copy, views[1].data, (size_t)count * dc_dtype_size(views[1].dtype));
    }
    if (strncmp(name, "vectors", 7) != 0) { /* eigenvectors of a factor without full rank are not unique */
      same(name, p, views[0].data, host ? views[1].data : copy, count, views[0].dtype, gate_of(name));
    }
  }
}

static void compare(void) {
  char copy[4 * MOST];
  for (int p = 0; p < PARAMS; p++) {
    move(&pair[1], copy, pair[1].weights[p], (size_t)pair[1].count[p] * dc_dtype_size(shapes[p].dtype));
    same("the weight", p, pair[0].weights[p], copy, pair[0].count[p], shapes[p].dtype,
         p == 5                          ? 0
         : shapes[p].dtype == DC_FLOAT32 ? 2e-4
                                         : 8e-3);
    compare_state(p);
  }
}

/* ---- against the CPU ---- */

static void run(const dc_kfac_options *options, int32_t approximation, const int32_t dtypes[2]) {
  dc_optimizer_stats stats[2] = {DC_OPTIMIZER_STATS_INIT, DC_OPTIMIZER_STATS_INIT};
  open_both(options, approximation);
  for (int number = 1; number <= STEPS; number++) {
    step_both(number, dtypes);
    compare();
  }
  swap_states(pair);
  step_both(STEPS + 1, dtypes);
  compare();
  for (int k = 0; k < 2; k++) {
    assert_int_equal(dc_optimizer_get_stats(pair[k].optimizer, &stats[k]), DC_OK);
  }
  assert_int_equal(stats[0].refreshes, stats[1].refreshes);
  assert_int_equal(stats[1].failed_refreshes, 0);
  close_both();
}

static void test_eigen(void **state) {
  (void)state;
  dc_kfac_options o = options_of();
  o.nesterov = 1;
  o.kl_clip = -1;
  run(&o, DC_KFAC_EXPAND, floats);
}

static void test_factored_and_reduced(void **state) {
  (void)state;
  dc_kfac_options o = options_of();
  o.inverse = DC_KFAC_FACTORED;
  o.momentum = -1;
  o.decay = -1;
  run(&o, DC_KFAC_REDUCE, floats);
}

/* Clipping, and decompositions that are used for several steps. */
static void test_frequencies(void **state) {
  (void)state;
  dc_kfac_options o = options_of();
  o.kl_clip = 1e-4;
  o.factor_frequency = 2;
  o.refresh_frequency = 3;
  run(&o, DC_KFAC_EXPAND, floats);
}

static void test_types_of_batches(void **state) {
  (void)state;
  static const int32_t dtypes[2][2] = {{DC_BFLOAT16, DC_FLOAT16}, {DC_FLOAT16, DC_FLOAT32}};
  const dc_kfac_options o = options_of();
  for (int32_t approximation = 0; approximation < 2; approximation++) {
    run(&o, approximation, dtypes[approximation]);
  }
}

/* More positions than one pass takes. */
static void test_long_batches(void **state) {
  (void)state;
  enum { CHANNELS = 2, LENGTH = 17000, ALL = 3 * CHANNELS * LENGTH, WEIGHT = 12 };
  static float x[ALL];
  static const int64_t shape[3] = {CHANNELS, CHANNELS, 3}, batch[3] = {3, CHANNELS, LENGTH}, count = WEIGHT;
  const dc_kfac_options options = options_of();
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.kind = DC_SAMPLE_CONV;
  layer.kernel[0] = 3;
  layer.padding[0] = 1;
  for (int i = 0; i < ALL; i++) {
    x[i] = (float)(i * 7 % 23 - 11) / 8;
  }
  for (int k = 0; k < 2; k++) {
    device_optimizer *s = &pair[k];
    char *on_device;
    open_optimizer(s, k == 0 ? "cpu" : "cuda");
    s->count[0] = WEIGHT;
    fill(s, 0, false, 0);
    fill(s, 0, true, 0);
    assert_int_equal(s->device->ops->alloc(s->device, sizeof x, DC_MEMORY_DEVICE, (void **)&on_device), DC_OK);
    move(s, on_device, x, sizeof x);
    dc_tensor t = flat(on_device, batch, DC_FLOAT32), weight = flat(s->weights[0], &count, DC_FLOAT32);
    dc_tensor grad = flat(s->grads[0], &count, DC_FLOAT32);
    t.ndim = 3;
    assert_int_equal(dc_kfac_create(s->linalg, NULL, &options, &s->optimizer), DC_OK);
    assert_int_equal(dc_optimizer_add_param(s->optimizer, 0, shape, 3, 0, WEIGHT, DC_FLOAT32, NULL), DC_OK);
    assert_int_equal(dc_kfac_add_layer(s->optimizer, &layer, DC_KFAC_EXPAND, 0, -1, NULL), DC_OK);
    assert_int_equal(dc_kfac_accumulate(s->optimizer, 0, &t, &t, 1), DC_OK);
    assert_int_equal(dc_optimizer_step(s->optimizer, &weight, &grad, sizeof weight, 1, 1), DC_OK);
    s->device->ops->free(s->device, on_device, sizeof x, DC_MEMORY_DEVICE);
  }
  compare_state(0);
  close_both();
}

/* ---- what is refused ---- */

static int32_t bad_index;
static float bad_value;
static bool bad_delta;

static dc_status accumulate_nonfinite(device_optimizer *s) {
  write_batch(s, 2, 7, floats);
  move(s, (float *)(void *)(bad_delta ? s->delta : s->x) + bad_index, &bad_value, sizeof bad_value);
  return accumulate_part(s, 2, 0, SAMPLES, floats);
}

static dc_status step_plainly(device_optimizer *s) {
  return step_as_is(s, NULL);
}

static dc_status write_state(device_optimizer *s, int p, const char *name, int64_t at, float value) {
  dc_tensor view = DC_TENSOR_INIT;
  const dc_status status = dc_optimizer_get_state(s->optimizer, p, name, &view);
  move(s, (float *)view.data + at, &value, sizeof value);
  return status;
}

/* Batches and gradients that are not finite, or whose products may overflow, change nothing. */
static void test_nonfinite_input(void **state) {
  (void)state;
  static const float values[3] = {__builtin_nanf(""), __builtin_inff(), -__builtin_inff()};
  const dc_kfac_options o = options_of();
  size_t bytes;
  open_both(&o, DC_KFAC_EXPAND);
  step_both(1, floats);
  char *before = saved(&pair[1], &bytes);
  for (int i = 0; i < 3; i++) {
    bad_value = values[i];
    bad_index = 17 + i;
    bad_delta = i == 1;
    both_fail(accumulate_nonfinite, DC_E_NOT_FINITE,
              bad_delta ? "delta has a NaN or an infinity at element 18" : "x has a NaN");
  }
  bad_value = 3e19f;
  both_fail(accumulate_nonfinite, DC_E_NOT_FINITE, "products of x may be as large as");
  for (int k = 0; k < 2; k++) {
    fill(&pair[k], 3, true, 1);
    move(&pair[k], pair[k].grads[3] + 6, "\x00\x7e", 2); /* a NaN */
  }
  both_fail(step_plainly, DC_E_NOT_FINITE, "grads[3]");
  unchanged(&pair[1], before, bytes);
  step_both(2, floats);
  compare();
  close_both();
}

/* If a factor has no decomposition, its last good one is used, as often as is tolerated. After that a step fails, and
 * neither the state nor what was accumulated changes. */
static void test_decompositions_that_fail(void **state) {
  (void)state;
  dc_kfac_options o = options_of();
  size_t bytes;
  o.tolerated_failures = 1;
  open_both(&o, DC_KFAC_EXPAND);
  step_both(1, floats);
  for (int k = 0; k < 2; k++) {
    assert_int_equal(write_state(&pair[k], 3, "factor_a", 1, __builtin_nanf("")), DC_OK);
  }
  step_both(4, floats);
  for (int k = 0; k < 2; k++) {
    assert_int_equal(accumulate(&pair[k], 5, floats), DC_OK);
  }
  char *before = saved(&pair[1], &bytes);
  both_fail(step_plainly, DC_E_NOT_CONVERGED, "the factor_a of parameter 3 could not be decomposed 2 times in a row");
  unchanged(&pair[1], before, bytes);
  for (int k = 0; k < 2; k++) { /* in both triangles */
    assert_int_equal(write_state(&pair[k], 3, "factor_a", 1, 0.25f), DC_OK);
    assert_int_equal(write_state(&pair[k], 3, "factor_a", 13, 0.25f), DC_OK);
    assert_int_equal(step_plainly(&pair[k]), DC_OK);
  }
  compare();
  close_both();
}

/* The caller has overwritten eigenvalues, so damping no longer makes them positive. */
static void test_values_that_do_not_damp(void **state) {
  (void)state;
  dc_kfac_options o = options_of();
  o.refresh_frequency = 100;
  open_both(&o, DC_KFAC_EXPAND);
  step_both(1, floats);
  for (int k = 0; k < 2; k++) {
    assert_int_equal(write_state(&pair[k], 3, "values_g", 2, -1e6f), DC_OK);
  }
  both_fail(step_plainly, DC_E_NOT_POSITIVE, "must be > 0");
  close_both();
  o.inverse = DC_KFAC_FACTORED;
  open_both(&o, DC_KFAC_EXPAND);
  step_both(1, floats);
  for (int k = 0; k < 2; k++) {
    assert_int_equal(write_state(&pair[k], 0, "values_a", 3, __builtin_nanf("")), DC_OK);
  }
  both_fail(step_plainly, DC_E_NOT_POSITIVE, "must be > 0");
  close_both();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_eigen),
      TEST(test_factored_and_reduced),
      TEST(test_frequencies),
      TEST(test_types_of_batches),
      TEST(test_long_batches),
      TEST(test_nonfinite_input),
      TEST(test_decompositions_that_fail),
      TEST(test_values_that_do_not_damp),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
