/* State: its names and views, saving and loading, and states that are refused. */
#include "optim_test.h"
#include "support/steps.h"

static bundle a, b;

static void begin(bundle *x) {
  dc_adamw_options o = DC_ADAMW_OPTIONS_INIT;
  o.amsgrad = 1;
  memset(x, 0, sizeof *x);
  OK(dc_adamw_create(linalg, &o, &x->optimizer));
  add(x, 0, 7, 0, 7);
  add(x, 0, 0, 0, 0);
  add(x, 0, 1000, 3, 500);
}

static void end(void) {
  dc_optimizer_destroy(a.optimizer);
  dc_optimizer_destroy(b.optimizer);
}

static unsigned char *saved(bundle *x, size_t *bytes) {
  int64_t size;
  OK(dc_optimizer_get_save_bytes(x->optimizer, &size));
  *bytes = (size_t)size;
  unsigned char *memory = malloc(*bytes);
  OK(dc_optimizer_save(x->optimizer, memory, size));
  return memory;
}

static void test_names(void **state) {
  (void)state;
  static const char *const names[] = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  const char *name = "";
  dc_tensor view = DC_TENSOR_INIT;
  begin(&a);
  for (int64_t i = 0; i < 4; i++) {
    OK(dc_optimizer_get_state_name(a.optimizer, 2, i, &name));
    assert_string_equal(name, names[i]);
  }
  OK(dc_optimizer_get_state_name(a.optimizer, 2, 4, &name));
  assert_null(name);
  OK(dc_optimizer_get_state(a.optimizer, 2, "exp_avg", &view));
  assert_int_equal(view.shape[0], 500);
  assert_int_equal((uintptr_t)view.data % 64, 0);
  FAILS(dc_optimizer_get_state(a.optimizer, 3, "exp_avg", &view), DC_E_NOT_FOUND, "index = 3");
  FAILS(dc_optimizer_get_state(a.optimizer, -1, "exp_avg", &view), DC_E_NOT_FOUND, "index = -1");
  FAILS(dc_optimizer_get_state(a.optimizer, 0, "master", &view), DC_E_NOT_FOUND, "no state of the name master");
  FAILS(dc_optimizer_get_state(a.optimizer, 0, NULL, &view), DC_E_INVALID, "name is NULL");
  FAILS(dc_optimizer_get_state(a.optimizer, 0, "step", NULL), DC_E_INVALID, "view is NULL");
  FAILS(dc_optimizer_get_state_name(a.optimizer, 9, 0, &name), DC_E_NOT_FOUND, "index = 9");
  FAILS(dc_optimizer_get_state_name(a.optimizer, 0, -1, &name), DC_E_INVALID, "piece = -1");
  FAILS(dc_optimizer_get_state_name(a.optimizer, 0, 0, NULL), DC_E_INVALID, "name is NULL");
  dc_optimizer_destroy(a.optimizer);
  OK(dc_adamw_create(linalg, NULL, &a.optimizer));
  FAILS(dc_optimizer_get_state_name(a.optimizer, 0, 0, &name), DC_E_NOT_FOUND, "no parameter was added");
  dc_optimizer_destroy(a.optimizer);
}

/* A run that is interrupted continues with the same bits. Views keep their addresses when parameters are added. */
static void test_48_round_trip(void **state) {
  (void)state;
  size_t bytes;
  begin(&a);
  begin(&b);
  for (int t = 1; t <= 3; t++) {
    fill_grads(&a, t, 0);
    OK(step(&a));
  }
  unsigned char *memory = saved(&a, &bytes);
  memcpy(b.weight, a.weight, sizeof a.weight);
  OK(dc_optimizer_load(b.optimizer, memory, (int64_t)bytes));
  const float *m = piece(&b, 2, "exp_avg");
  add(&a, 0, 20, 0, 20);
  add(&b, 0, 20, 0, 20);
  for (int t = 4; t <= 6; t++) {
    fill_grads(&a, t, 0);
    fill_grads(&b, t, 0);
    OK(step(&a));
    OK(step(&b));
  }
  assert_memory_equal(a.weight, b.weight, sizeof a.weight);
  assert_ptr_equal(m, piece(&b, 2, "exp_avg"));
  assert_int_equal(steps_of(b.optimizer), 6);
  free(memory);
  end();
}

/* Each changed byte, and each missing byte, is noticed, and then nothing changes. */
static void test_48_damage(void **state) {
  (void)state;
  size_t bytes, after;
  begin(&a);
  fill_grads(&a, 1, 0);
  OK(step(&a));
  unsigned char *memory = saved(&a, &bytes);
  begin(&b);
  unsigned char *before = saved(&b, &after);
  assert_int_equal(bytes, after);
  for (size_t i = 0; i < bytes; i += i < 600 ? 1 : 97) {
    memory[i] ^= 0x10;
    dc_status status = dc_optimizer_load(b.optimizer, memory, (int64_t)bytes);
    assert_true(status == DC_E_CORRUPT || (status == DC_E_UNSUPPORTED && i >= 8 && i < 16));
    memory[i] ^= 0x10;
    FAILS(dc_optimizer_load(b.optimizer, memory, (int64_t)i), DC_E_CORRUPT, "dc_optimizer_load");
  }
  unsigned char *now = saved(&b, &after);
  assert_memory_equal(before, now, after);
  OK(dc_optimizer_load(b.optimizer, memory, (int64_t)bytes));
  free(memory);
  free(before);
  free(now);
  end();
}

/* A valid state of another optimizer. */
static void test_48_others(void **state) {
  (void)state;
  size_t bytes;
  begin(&a);
  unsigned char *memory = saved(&a, &bytes);
  dc_adamw_options o = DC_ADAMW_OPTIONS_INIT;
  o.amsgrad = 1;
  for (int i = 0; i < 6; i++) {
    memset(&b, 0, sizeof b);
    if (i == 0) {
      OK(dc_sgd_create(linalg, NULL, &b.optimizer));
    } else {
      OK(dc_adamw_create(linalg, i == 5 ? NULL : &o, &b.optimizer));
    }
    add(&b, 0, i == 1 ? 8 : 7, 0, 7);
    add(&b, 0, 0, 0, 0);
    if (i != 2) {
      add(&b, 0, 1000, i == 3 ? 4 : 3, 500);
    }
    if (i == 4) {
      add(&b, 0, 1, 0, 1);
    }
    static const char *const texts[] = {"kind of optimizer is not", "shape of parameter 0",
                                        "number of parameters",     "part or dtype of parameter 2",
                                        "number of parameters",     "number of pieces of parameter 0"};
    FAILS(dc_optimizer_load(b.optimizer, memory, (int64_t)bytes), i == 0 ? DC_E_STATE : DC_E_SHAPE, texts[i]);
    dc_optimizer_destroy(b.optimizer);
  }
  FAILS(dc_optimizer_load(a.optimizer, NULL, 5), DC_E_INVALID, "memory is NULL");
  FAILS(dc_optimizer_save(a.optimizer, NULL, 5), DC_E_INVALID, "memory is NULL");
  FAILS(dc_optimizer_save(a.optimizer, memory, -1), DC_E_INVALID, "bytes = -1, must be 0 to");
  FAILS(dc_optimizer_load(a.optimizer, memory, -1), DC_E_INVALID, "bytes = -1, must be 0 to");
  FAILS(dc_optimizer_save(a.optimizer, memory, (int64_t)bytes - 1), DC_E_BUFFER_TOO_SMALL, "must be at least");
  FAILS(dc_optimizer_get_save_bytes(a.optimizer, NULL), DC_E_INVALID, "bytes is NULL");
  free(memory);
  dc_optimizer_destroy(a.optimizer);
}

static void test_stats(void **state) {
  (void)state;
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  begin(&a);
  fill_grads(&a, 1, 0);
  OK(step(&a));
  OK(dc_optimizer_get_stats(a.optimizer, &stats));
  assert_int_equal(stats.steps, 1);
  assert_int_equal(stats.params, 3);
  assert_int_equal(stats.blocks, 0);
  assert_true(stats.state_bytes >= 3 * (500 + 7) * 4);
  assert_int_equal(stats.wire_bytes, 0);
  FAILS(dc_optimizer_get_stats(a.optimizer, NULL), DC_E_INVALID, "stats is NULL");
  dc_optimizer_destroy(a.optimizer);
}

/* From the second step on, nothing is allocated (point 54). */
static void test_54_steady(void **state) {
  (void)state;
  dc_optimizer_stats first = DC_OPTIMIZER_STATS_INIT, last = DC_OPTIMIZER_STATS_INIT;
  begin(&a);
  for (int t = 1; t <= 100; t++) {
    OK(step(&a));
    OK(dc_optimizer_get_stats(a.optimizer, t == 1 ? &first : &last));
  }
  assert_int_equal(first.state_bytes, last.state_bytes);
  assert_int_equal(first.scratch_bytes, last.scratch_bytes);
  dc_optimizer_destroy(a.optimizer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_names),     cmocka_unit_test(test_48_round_trip), cmocka_unit_test(test_48_damage),
      cmocka_unit_test(test_48_others), cmocka_unit_test(test_stats),         cmocka_unit_test(test_54_steady),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
