/* Shampoo and SOAP on the device compared with the CPU: weights of all types, blocks of all orders, every graft; states
 * that one side saves and the other loads; gradients and factors that are not finite. Elementwise results have the
 * CPU's bits, others differ by rounding. On the simulated driver, or on a card (tests/card). */
#include "optim_pair.h"

static void step_both(device_optimizer *pair, int number) {
  for (int k = 0; k < 2; k++) {
    if (step(&pair[k], number) != DC_OK) {
      fail_msg("step %d on side %d: %s", number, k, dc_last_error());
    }
  }
}

/* ---- comparing ---- */

/* Elementwise state depends on the gradient only, which is the same on both sides, unless it depends on the weights. */
static double gate_of(const char *name, bool exact) {
  const bool each = strncmp(name, "exp_avg", 7) == 0 || strncmp(name, "graft", 5) == 0;
  return strcmp(name, "step") == 0 || strncmp(name, "failures", 8) == 0 || strncmp(name, "rooted", 6) == 0 ||
                 (each && exact)
             ? 0
             : 2e-4;
}

static void compare(device_optimizer *pair, bool exact) {
  char copy[8 * MOST];
  for (int p = 0; p < PARAMS; p++) {
    const char *name;
    move(&pair[1], copy, pair[1].weights[p], (size_t)pair[1].count[p] * dc_dtype_size(shapes[p].dtype));
    same("the weight", p, pair[0].weights[p], copy, pair[0].count[p], shapes[p].dtype,
         shapes[p].dtype == DC_FLOAT32 ? 2e-4 : 8e-3);
    for (int i = 0; dc_optimizer_get_state_name(pair[0].optimizer, p, i, &name) == DC_OK && name != NULL; i++) {
      dc_tensor views[2] = {DC_TENSOR_INIT, DC_TENSOR_INIT};
      int64_t count = 1;
      for (int k = 0; k < 2; k++) {
        assert_int_equal(dc_optimizer_get_state(pair[k].optimizer, p, name, &views[k]), DC_OK);
      }
      for (int32_t d = 0; d < views[0].ndim; d++) {
        count *= views[0].shape[d];
      }
      const bool host = views[0].dtype == DC_INT64; /* the host has it on both sides */
      if (!host) {
        move(&pair[1], copy, views[1].data, (size_t)count * dc_dtype_size(views[1].dtype));
      }
      if (strncmp(name, "basis", 5) == 0) {
        continue; /* eigenvectors of a factor without full rank are not unique */
      }
      same(name, p, views[0].data, host ? views[1].data : copy, count, views[0].dtype, gate_of(name, exact));
    }
  }
}

/* ---- against the CPU ---- */

/* exact: elementwise state has the CPU's bits. */
static void run(make_fn make, const void *options, bool exact) {
  device_optimizer pair[2];
  for (int k = 0; k < 2; k++) {
    open_optimizer(&pair[k], k == 0 ? "cpu" : "cuda");
    if (make(&pair[k], NULL, options) != DC_OK) {
      fail_msg("%s", dc_last_error());
    }
    assert_int_equal(add_params(&pair[k], 0, 1), DC_OK);
  }
  for (int number = 1; number <= STEPS; number++) {
    step_both(pair, number);
    compare(pair, exact);
  }
  swap_states(pair);
  step_both(pair, STEPS + 1);
  compare(pair, false);
  dc_optimizer_stats stats[2] = {DC_OPTIMIZER_STATS_INIT, DC_OPTIMIZER_STATS_INIT};
  for (int k = 0; k < 2; k++) {
    assert_int_equal(dc_optimizer_get_stats(pair[k].optimizer, &stats[k]), DC_OK);
    dc_optimizer_destroy(pair[k].optimizer);
    close_optimizer(&pair[k]);
  }
  assert_int_equal(stats[0].refreshes, stats[1].refreshes);
  assert_int_equal(stats[0].blocks, stats[1].blocks);
  assert_int_equal(stats[1].failed_refreshes, 0);
}

static void test_grafts(void **state) {
  (void)state;
  for (int32_t graft = DC_GRAFT_ADAM; graft <= DC_GRAFT_RMSPROP; graft++) {
    dc_shampoo_options o = options_of();
    o.graft = graft;
    o.graft_beta2 = 0.9;
    o.beta1 = graft % 2 == 0 ? 0.8 : -1;
    o.momentum = graft < 3 ? 0.7 : 0;
    o.nesterov = graft == 1;
    o.weight_decay = 0.1;
    o.decay = graft == 2 ? DC_DECAY_L2 : DC_DECAY_DECOUPLED;
    run(make_shampoo, &o, o.decay != DC_DECAY_L2);
  }
}

static void test_blocks_and_refreshes(void **state) {
  (void)state;
  dc_shampoo_options o = options_of();
  o.beta2 = 0.9; /* so that the bias correction shows */
  o.precondition_frequency = 2;
  o.start_preconditioning_step = 3;
  run(make_shampoo, &o, true);
  o.max_block = 3;
  o.merge_below = -1;
  o.root = 2;
  run(make_shampoo, &o, true);
  o.max_block = 0;
  o.tolerance = 1e-6;
  run(make_shampoo, &o, true);
}

static void test_soap(void **state) {
  (void)state;
  dc_soap_options o = DC_SOAP_OPTIONS_INIT;
  o.precondition_frequency = 2;
  o.weight_decay = 0.1;
  run(make_soap, &o, false);
  o.max_precond_dim = 4; /* so that some sides have no factor */
  o.precondition_frequency = 1;
  run(make_soap, &o, false);
  o.max_precond_dim = -1;
  run(make_soap, &o, true);
}

/* ---- what fails ---- */

static void test_gradients_that_are_not_finite(void **state) {
  (void)state;
  const dc_shampoo_options options = options_of();
  refuses_gradient(make_shampoo, &options, 0, 0x1p51f);
}

/* If a factor gives no root or basis, its last good one is used, as often as is tolerated. */
static void fail_often(make_fn make, const void *options, const char *matrix) {
  const float nan = __builtin_nanf("");
  dc_tensor factor = DC_TENSOR_INIT, view = DC_TENSOR_INIT;
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  float good[36], now[36];
  char name[16], text[96];
  device_optimizer s;
  snprintf(name, sizeof name, "%s.0.0", matrix);
  snprintf(text, sizeof text, "the %s of factor.0.0 of parameter 0 failed 3 times in a row", matrix);
  open_optimizer(&s, "cuda");
  assert_int_equal(make(&s, NULL, options), DC_OK);
  assert_int_equal(add_params(&s, 0, 1), DC_OK);
  assert_int_equal(step(&s, 1), DC_OK);
  assert_int_equal(dc_optimizer_get_state(s.optimizer, 0, "factor.0.0", &factor), DC_OK);
  assert_int_equal(dc_optimizer_get_state(s.optimizer, 0, name, &view), DC_OK);
  move(&s, good, view.data, sizeof good);
  move(&s, (float *)factor.data + 7, &nan, sizeof nan);
  for (int number = 3; number < 6; number++) {
    assert_int_equal(step(&s, number), DC_OK);
    move(&s, now, view.data, sizeof now);
    assert_memory_equal(now, good, sizeof good);
    assert_int_equal(dc_optimizer_get_stats(s.optimizer, &stats), DC_OK);
    assert_int_equal(stats.failed_refreshes, number - 2);
  }
  assert_int_equal(step(&s, 6), DC_E_NOT_CONVERGED);
  assert_non_null(strstr(dc_last_error(), text));
  dc_optimizer_destroy(s.optimizer);
  close_optimizer(&s);
}

static void test_matrices_that_fail(void **state) {
  (void)state;
  dc_shampoo_options shampoo = options_of();
  dc_soap_options soap = {sizeof soap, .precondition_frequency = 1, .max_block = 6, .tolerated_failures = 2};
  shampoo.tolerated_failures = 2;
  fail_often(make_shampoo, &shampoo, "root");
  fail_often(make_soap, &soap, "vectors");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_grafts),
      TEST(test_blocks_and_refreshes),
      TEST(test_soap),
      TEST(test_gradients_that_are_not_finite),
      TEST(test_matrices_that_fail),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
