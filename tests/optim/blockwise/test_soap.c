/* SOAP's steps by hand, its ranks, threads, failures and state: points 16, 43 to 45, 47, 48 and 54 of the conformance
 * list. tests/python/test_soap.py compares it with a reference. */
#include "rank_invariance_test.h"

static dc_soap_options usual(void) {
  dc_soap_options o = DC_SOAP_OPTIONS_INIT;
  o.precondition_frequency = 2;
  return o;
}

static void near(double got, double want, double tolerance) {
  if (!(fabs(got - want) <= tolerance)) {
    fail_msg("got %.9g, want %.9g", got, want);
  }
}

/* ---- what is refused ---- */

#define REFUSED(field, value, text)                                               \
  do {                                                                            \
    dc_soap_options o = DC_SOAP_OPTIONS_INIT;                                     \
    dc_optimizer *optimizer = (dc_optimizer *)(void *)&o;                         \
    o.field = (value);                                                            \
    assert_int_equal(dc_soap_create(linalg, NULL, &o, &optimizer), DC_E_INVALID); \
    SAYS(text);                                                                   \
    assert_null(optimizer);                                                       \
  } while (0)

static void point_43_options_out_of_range(void **state) {
  (void)state;
  REFUSED(beta1, 1, "dc_soap_create: options.beta1 = 1, must be > 0 and < 1");
  REFUSED(beta2, -0.5, "options.beta2 = -0.5");
  REFUSED(shampoo_beta, 1, "options.shampoo_beta = 1, must be > 0 and < 1; 0 stands for 0.95");
  REFUSED(eps, NAN, "options.eps = nan");
  REFUSED(weight_decay, -1, "options.weight_decay = -1");
  REFUSED(max_block, -1, "options.max_block = -1");
  REFUSED(merge_below, -1, "options.merge_below = -1");
  REFUSED(max_precond_dim, 16385, "options.max_precond_dim = 16385, must be -1 to 16384, or 0");
  REFUSED(max_precond_dim, -2, "options.max_precond_dim = -2");
  REFUSED(precondition_frequency, -1, "options.precondition_frequency = -1");
  REFUSED(tolerated_failures, -2, "options.tolerated_failures = -2");
  REFUSED(reserved0, 1, "options.reserved0");
  assert_int_equal(dc_soap_create(NULL, NULL, NULL, &(dc_optimizer *){NULL}), DC_E_INVALID);
  assert_int_equal(dc_soap_create(linalg, NULL, NULL, NULL), DC_E_INVALID);
  assert_int_equal(dc_soap_set_group(NULL, 0, NULL), DC_E_INVALID);
}

static void point_43_what_shapes_the_state_stays(void **state) {
  (void)state;
  const dc_soap_options o = DC_SOAP_OPTIONS_INIT;
  dc_soap_options others[3] = {o, o, o}, other = o;
  dc_optimizer *optimizer = one_param(soap(linalg, NULL, &o), 2, 3);
  others[0].max_block = 2;
  others[1].merge_below = 6;
  others[2].max_precond_dim = -1;
  for (int i = 0; i < 3; i++) {
    static const char *const names[] = {"max_block", "merge_below", "max_precond_dim"};
    assert_int_equal(dc_soap_set_group(optimizer, 0, &others[i]), DC_E_INVALID);
    SAYS("group 0 has parameters: ");
    SAYS(names[i]);
    OK(dc_soap_set_group(optimizer, 1, &others[i])); /* the group has no parameters */
  }
  other.beta1 = other.beta2 = other.shampoo_beta = other.eps = -1;
  other.precondition_frequency = 3;
  OK(dc_soap_set_group(optimizer, 0, &other));
  assert_int_equal(dc_shampoo_set_group(optimizer, 0, NULL), DC_E_STATE);
  SAYS("optimizer is of kind soap, must be shampoo");
  dc_optimizer_destroy(optimizer);
}

/* ---- steps by hand ---- */

/* The first step does not change weights: it finds the eigenvectors, the largest eigenvalue's first. */
static void point_45_the_first_step(void **state) {
  (void)state;
  dc_soap_options o = usual();
  o.weight_decay = 0.5;
  dc_optimizer *optimizer = one_param(soap(linalg, NULL, &o), 2, 2);
  float weight[4] = {1, 2, 3, 4}, grad[4] = {1, 0, 0, 3};
  const float before[4] = {1, 2, 3, 4};
  one_step(optimizer, weight, grad, 4);
  assert_memory_equal(weight, before, sizeof before);
  const float *factor = state_of(optimizer, "factor.0.0"), *vectors = state_of(optimizer, "vectors.0.1");
  near((double)factor[0], 0.05, 1e-7);
  near((double)factor[3], 0.45, 1e-7);
  near(fabs((double)vectors[1]), 1, 1e-6);
  near(fabs((double)vectors[2]), 1, 1e-6);
  near((double)state_of(optimizer, "exp_avg.0")[0], 0, 0);
  one_step(optimizer, weight, grad, 4); /* Adam's first: the sign of the rotated gradient, rotated back */
  near((double)weight[0], 0.5 * 1 - 1, 1e-5);
  near((double)weight[1], 0.5 * 2, 1e-5);
  near((double)weight[3], 0.5 * 4 - 1, 1e-5);
  near((double)state_of(optimizer, "exp_avg_sq.0")[0], 0.05 * 9, 1e-6); /* the largest first */
  dc_optimizer_destroy(optimizer);
}

/* Where columns swap, v moves with them, and m is rotated with the basis. */
static void point_45_moments_move_with_the_basis(void **state) {
  (void)state;
  dc_soap_options o = usual();
  dc_optimizer *optimizer = one_param(soap(linalg, NULL, &o), 2, 2);
  float weight[4] = {0}, grad[4] = {2, 0, 0, 1};
  one_step(optimizer, weight, grad, 4);
  one_step(optimizer, weight, grad, 4);
  float *left = state_of(optimizer, "factor.0.0"), *vectors = state_of(optimizer, "vectors.0.0");
  float *m = state_of(optimizer, "exp_avg.0"), *v = state_of(optimizer, "exp_avg_sq.0");
  const float sign[2] = {vectors[0], vectors[3]};
  left[0] = 1; /* from now on smaller than the other row's */
  left[3] = 9;
  const float old_m[4] = {m[0], m[1], m[2], m[3]}, old_v[4] = {v[0], v[1], v[2], v[3]};
  memset(grad, 0, sizeof grad);
  one_step(optimizer, weight, grad, 4); /* the third step is the first with a refresh */
  near(fabs((double)vectors[2]), 1, 1e-6);
  near(fabs((double)vectors[1]), 1, 1e-6);
  for (int j = 0; j < 2; j++) {
    near((double)v[j], 0.95 * (double)old_v[2 + j], 1e-7);
    near((double)v[2 + j], 0.95 * (double)old_v[j], 1e-7);
    /* Q m is what it was */
    near((double)vectors[1] * (double)m[2 + j], 0.95 * (double)sign[0] * (double)old_m[j], 1e-6);
    near((double)vectors[2] * (double)m[j], 0.95 * (double)sign[1] * (double)old_m[2 + j], 1e-6);
  }
  dc_optimizer_destroy(optimizer);
}

/* Vectors take AdamW's steps except for the first. So do all parameters if max_precond_dim leaves no side a factor. */
static void point_45_without_factors_it_is_adam(void **state) {
  (void)state;
  const int64_t shapes_of[3][2] = {{6, 1}, {1, 6}, {2, 3}};
  for (int i = 0; i < 3; i++) {
    dc_soap_options o = usual();
    dc_adamw_options a = DC_ADAMW_OPTIONS_INIT;
    dc_optimizer *adamw;
    a.beta1 = a.beta2 = 0.95;
    a.weight_decay = o.weight_decay = 0.1;
    o.max_precond_dim = i == 2 ? -1 : 0;
    OK(dc_adamw_create(linalg, &a, &adamw));
    dc_optimizer *optimizer = one_param(soap(linalg, NULL, &o), shapes_of[i][0], shapes_of[i][1]);
    one_param(adamw, shapes_of[i][0], shapes_of[i][1]);
    float ours[6] = {0}, expected[6] = {0}, grad[6];
    one_step(optimizer, ours, (const float[6]){1, 2, 3, 4, 5, 6}, 6);
    for (int64_t step = 1; step <= STEPS; step++) {
      gradient(step, 0, 6, grad);
      one_step(optimizer, ours, grad, 6);
      one_step(adamw, expected, grad, 6);
      for (int k = 0; k < 6; k++) {
        near((double)ours[k], (double)expected[k], 1e-5);
      }
    }
    dc_tensor view = DC_TENSOR_INIT;
    assert_int_equal(dc_optimizer_get_state(optimizer, 0, "factor.0.0", &view), DC_E_NOT_FOUND);
    dc_optimizer_destroy(optimizer);
    dc_optimizer_destroy(adamw);
  }
}

/* ---- failures that are tolerated ---- */

static void point_16_failed_bases(void **state) {
  (void)state;
  dc_soap_options o = usual();
  o.precondition_frequency = 1;
  o.tolerated_failures = 2;
  the_last_good_one_stays(one_param(soap(linalg, NULL, &o), 3, 2), "vectors.0.0",
                          "the vectors of factor.0.0 of parameter 0 failed 3 times in a row");
}

/* Gradients that are zero, entirely or in one direction, are harmless, with LAPACK and without. */
static void point_42_nothing_to_learn(void **state) {
  (void)state;
  const dc_soap_options o = usual();
  dc_linalg_options plain = DC_LINALG_OPTIONS_INIT;
  dc_linalg *l;
  plain.plain = 1;
  OK(dc_linalg_create(device, &plain, &l));
  for (int way = 0; way < 4; way++) {
    dc_optimizer *optimizer = one_param(soap(way % 2 == 0 ? linalg : l, NULL, &o), 4, 3);
    float weight[12] = {0}, grad[12] = {0};
    grad[5] = way / 2 == 0 ? 0 : 1;
    for (int step = 0; step < 6; step++) {
      one_step(optimizer, weight, grad, 12);
    }
    for (int k = 0; k < 12; k++) {
      near((double)weight[k], k == 5 ? -5 * (double)grad[5] : 0, 1e-4);
    }
    dc_optimizer_destroy(optimizer);
  }
  dc_linalg_destroy(l);
}

/* The bases of LAPACK and of the plain solver give the same steps, except for rounding. */
static void solvers_agree(void **state) {
  (void)state;
  dc_soap_options o = usual();
  dc_linalg_options plain = DC_LINALG_OPTIONS_INIT;
  dc_linalg *l;
  plain.plain = 1;
  OK(dc_linalg_create(device, &plain, &l));
  dc_optimizer *with = one_param(soap(linalg, NULL, &o), 8, 8), *without = one_param(soap(l, NULL, &o), 8, 8);
  float ours[64] = {0}, expected[64] = {0}, grad[64];
  for (int64_t step = 1; step <= 12; step++) {
    gradient(step, 0, 64, grad);
    one_step(with, ours, grad, 64);
    one_step(without, expected, grad, 64);
  }
  for (int k = 0; k < 64; k++) {
    near((double)ours[k], (double)expected[k], 1e-2);
  }
  dc_optimizer_destroy(with);
  dc_optimizer_destroy(without);
  dc_linalg_destroy(l);
}

/* ---- ranks, threads, state ---- */

static dc_soap_options rank_options(void) {
  dc_soap_options o = usual();
  o.max_block = 4;
  o.merge_below = 6;
  o.max_precond_dim = 3;
  o.weight_decay = 0.1;
  return o;
}

static dc_optimizer *make(dc_linalg *l, dc_comm *comm) {
  const dc_soap_options o = rank_options();
  return soap(l, comm, &o);
}

static void point_47_48_ranks_agree_with_one(void **state) {
  (void)state;
  ranks_agree_with_one(make);
}

static void point_44_54_a_bad_gradient_and_steady_memory(void **state) {
  (void)state;
  dc_optimizer_stats first = DC_OPTIMIZER_STATS_INIT, last = DC_OPTIMIZER_STATS_INIT;
  model m;
  float grads[PARAMS][MOST];
  size_t bytes;
  open_model(&m, make(linalg, NULL), 0, 1, false);
  steps(&m, 1, 3);
  OK(dc_optimizer_get_stats(m.optimizer, &first));
  void *before = saved(m.optimizer, &bytes);
  gradients_of(3, grads);
  grads[3][17] = INFINITY;
  assert_int_equal(step_with(&m, grads, NULL), DC_E_NOT_FINITE);
  void *after = saved(m.optimizer, &bytes);
  assert_memory_equal(before, after, bytes);
  free(before);
  free(after);
  steps(&m, 3, 30);
  OK(dc_optimizer_get_stats(m.optimizer, &last));
  assert_int_equal(first.state_bytes, last.state_bytes);
  assert_int_equal(first.scratch_bytes, last.scratch_bytes);
  assert_true(last.warm_refreshes > 0 && last.warm_refreshes < last.refreshes && last.failed_refreshes == 0);
  dc_optimizer_destroy(m.optimizer);
}

static void point_53_threads(void **state) {
  (void)state;
  threads_do_not_change_bits(make);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(point_43_options_out_of_range),
      cmocka_unit_test(point_43_what_shapes_the_state_stays),
      cmocka_unit_test(point_45_the_first_step),
      cmocka_unit_test(point_45_moments_move_with_the_basis),
      cmocka_unit_test(point_45_without_factors_it_is_adam),
      cmocka_unit_test(point_16_failed_bases),
      cmocka_unit_test(point_42_nothing_to_learn),
      cmocka_unit_test(solvers_agree),
      cmocka_unit_test(point_47_48_ranks_agree_with_one),
      cmocka_unit_test(point_44_54_a_bad_gradient_and_steady_memory),
      cmocka_unit_test(point_53_threads),
  };
  return cmocka_run_group_tests(tests, open_handle, close_handle);
}
