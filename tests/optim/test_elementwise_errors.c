/* Errors of AdamW and SGD: points of the second-order conformance list. */
#include "optim_test.h"
#include "support/steps.h"

static bundle a;

static void test_43_bad_adamw(void **state) {
  (void)state;
  static const double bad[] = {1, 1.5, -0.5, NAN, INFINITY};
  dc_optimizer *made = (dc_optimizer *)(void *)&a;
  for (int i = 0; i < 5; i++) {
    dc_adamw_options o = DC_ADAMW_OPTIONS_INIT;
    o.beta1 = bad[i];
    FAILS(dc_adamw_create(linalg, &o, &made), DC_E_INVALID, "options.beta1");
    assert_null(made);
    o.beta1 = 0, o.beta2 = bad[i];
    FAILS(dc_adamw_create(linalg, &o, &made), DC_E_INVALID, "options.beta2");
    o.beta2 = 0, o.eps = o.weight_decay = bad[i];
    if (i >= 2) {
      FAILS(dc_adamw_create(linalg, &o, &made), DC_E_INVALID, "options.eps");
      o.eps = 0;
      FAILS(dc_adamw_create(linalg, &o, &made), DC_E_INVALID, "options.weight_decay");
    }
  }
  dc_adamw_options o = DC_ADAMW_OPTIONS_INIT;
  o.amsgrad = 2;
  FAILS(dc_adamw_create(linalg, &o, &made), DC_E_INVALID, "options.amsgrad = 2");
  o.amsgrad = 0, o.reserved0 = 1;
  FAILS(dc_adamw_create(linalg, &o, &made), DC_E_INVALID, "options.reserved0 = 1");
  o.reserved0 = 0, o.struct_size = 8;
  FAILS(dc_adamw_create(linalg, &o, &made), DC_E_INVALID, "struct_size = 8");
  FAILS(dc_adamw_create(NULL, NULL, &made), DC_E_INVALID, "linalg is NULL");
  FAILS(dc_adamw_create(linalg, NULL, NULL), DC_E_INVALID, "optimizer is NULL");
}

static void test_43_bad_sgd(void **state) {
  (void)state;
  dc_optimizer *made;
  dc_sgd_options o = DC_SGD_OPTIONS_INIT;
  o.momentum = 1;
  FAILS(dc_sgd_create(linalg, &o, &made), DC_E_INVALID, "options.momentum = 1");
  o.momentum = -1;
  FAILS(dc_sgd_create(linalg, &o, &made), DC_E_INVALID, "options.momentum = -1");
  o.momentum = 0.9, o.dampening = 1.1;
  FAILS(dc_sgd_create(linalg, &o, &made), DC_E_INVALID, "options.dampening = 1.1");
  o.dampening = 1, o.nesterov = 1;
  FAILS(dc_sgd_create(linalg, &o, &made), DC_E_INVALID, "options.nesterov");
  o.dampening = 0, o.momentum = 0;
  FAILS(dc_sgd_create(linalg, &o, &made), DC_E_INVALID, "options.nesterov");
}

static void test_43_bad_groups_and_params(void **state) {
  (void)state;
  const int64_t shape[2] = {3, 4}, wrong[2] = {3, -4};
  dc_sgd_options s = DC_SGD_OPTIONS_INIT;
  dc_adamw_options o = DC_ADAMW_OPTIONS_INIT;
  make_sgd(&a, NULL);
  FAILS(dc_adamw_set_group(a.optimizer, 0, &o), DC_E_STATE, "is of kind sgd, must be adamw");
  FAILS(dc_sgd_set_group(a.optimizer, 2, &s), DC_E_INVALID, "group = 2");
  FAILS(dc_sgd_set_group(a.optimizer, -1, &s), DC_E_INVALID, "group = -1");
  FAILS(dc_sgd_set_group(NULL, 0, &s), DC_E_INVALID, "optimizer is NULL");
  FAILS(dc_optimizer_set_lr(a.optimizer, 1, 0.1), DC_E_INVALID, "group = 1");
  FAILS(dc_optimizer_set_lr(a.optimizer, 0, -0.1), DC_E_INVALID, "lr = -0.1");
  FAILS(dc_optimizer_set_lr(a.optimizer, 0, NAN), DC_E_INVALID, "lr = nan");
  FAILS(dc_optimizer_set_lr(a.optimizer, 0, INFINITY), DC_E_INVALID, "lr = inf");
  FAILS(dc_optimizer_add_param(a.optimizer, 1, shape, 2, 0, 12, 0, NULL), DC_E_INVALID, "group = 1");
  FAILS(dc_optimizer_add_param(a.optimizer, 0, wrong, 2, 0, 0, 0, NULL), DC_E_SHAPE, "length -4");
  FAILS(dc_optimizer_add_param(a.optimizer, 0, NULL, 2, 0, 0, 0, NULL), DC_E_INVALID, "shape is NULL");
  FAILS(dc_optimizer_add_param(a.optimizer, 0, shape, 2, 0, 13, 0, NULL), DC_E_INVALID, "count = 13");
  FAILS(dc_optimizer_add_param(a.optimizer, 0, shape, 2, 12, 1, 0, NULL), DC_E_INVALID, "offset = 12");
  FAILS(dc_optimizer_add_param(a.optimizer, 0, shape, 2, -1, 1, 0, NULL), DC_E_INVALID, "offset = -1");
  FAILS(dc_optimizer_add_param(a.optimizer, 0, shape, 2, INT64_MAX, INT64_MAX, 0, NULL), DC_E_INVALID, "offset");
  FAILS(dc_optimizer_add_param(a.optimizer, 0, shape, 2, 0, 12, DC_FLOAT64, NULL), DC_E_DTYPE, "float64");
  OK(dc_optimizer_add_param(a.optimizer, 0, shape, 2, 0, 12, 0, NULL));
  s.momentum = 0.9;
  OK(dc_sgd_set_group(a.optimizer, 0, &s)); /* allowed before the first step, as a scheduler does */
  piece(&a, 0, "momentum_buffer");
  s.momentum = 0;
  FAILS(dc_sgd_set_group(a.optimizer, 0, &s), DC_E_INVALID, "whether there is momentum must stay");
  OK(dc_sgd_set_group(a.optimizer, 1, &s)); /* allowed for a new group */
  s.momentum = 0.5, s.weight_decay = 1;
  OK(dc_sgd_set_group(a.optimizer, 0, &s));
  dc_optimizer_destroy(a.optimizer);
  dc_optimizer_destroy(NULL);
}

static void test_bad_steps(void **state) {
  (void)state;
  make_adamw(&a, NULL);
  add(&a, 0, 6, 0, 6);
  add(&a, 0, 4, 0, 4);
  dc_optimizer *o = a.optimizer;
  float before = a.weight[0][0];
  a.grad[0][0] = 1;
  FAILS(dc_optimizer_step(o, a.weights, a.grads, sizeof(dc_tensor), 1, 1), DC_E_INVALID, "count = 1, must be 2");
  FAILS(dc_optimizer_step(o, NULL, a.grads, sizeof(dc_tensor), 2, 1), DC_E_INVALID, "weights is NULL");
  FAILS(dc_optimizer_step(o, a.weights, NULL, sizeof(dc_tensor), 2, 1), DC_E_INVALID, "grads is NULL");
  FAILS(dc_optimizer_step(o, a.weights, a.grads, 8, 2, 1), DC_E_INVALID, "tensor_size = 8");
  FAILS(dc_optimizer_step(o, a.weights, a.grads, sizeof(dc_tensor), 2, NAN), DC_E_INVALID, "grad_scale = nan");
  FAILS(dc_optimizer_step(NULL, a.weights, a.grads, sizeof(dc_tensor), 2, 1), DC_E_INVALID, "optimizer is NULL");
  const dc_tensor weight = a.weights[1], grad = a.grads[1];
  a.weights[1].dtype = DC_BFLOAT16;
  FAILS(step(&a), DC_E_DTYPE, "weights[1] is bfloat16, the parameter was added as float32");
  a.weights[1] = a.weights[0];
  FAILS(step(&a), DC_E_SHAPE, "weights[1] has 6 elements, must have 4");
  a.weights[1] = weight;
  a.weights[1].data = NULL;
  FAILS(step(&a), DC_E_INVALID, "weights[1]");
  a.weights[1] = weight;
  a.grads[1] = a.grads[0];
  FAILS(step(&a), DC_E_SHAPE, "grads[1] has 6 elements, must have 4");
  a.grads[1] = grad;
  a.grads[1].dtype = DC_FLOAT64;
  FAILS(step(&a), DC_E_DTYPE, "grads[1] is float64");
  a.grads[1] = grad;
  a.grads[1].data = (float *)a.weights[1].data + 3;
  FAILS(step(&a), DC_E_INVALID, "grads[1] overlaps weights[1], which are written");
  a.grads[1].dtype = DC_BFLOAT16;
  a.grads[1].data = (char *)a.weights[1].data - 6;
  FAILS(step(&a), DC_E_INVALID, "grads[1] overlaps weights[1], which are written");
  a.grads[1] = grad;
  for (int i = 0; i < 2; i++) { /* the second time, too */
    a.weights[1].data = (float *)a.weights[0].data + 5;
    FAILS(step(&a), DC_E_INVALID, "weights[0] overlaps weights[1]: each must have its own memory");
  }
  a.weights[1] = weight;
  a.grads[1].struct_size = 3;
  FAILS(step(&a), DC_E_INVALID, "struct_size = 3");
  assert_true(a.weight[0][0] == before);
  assert_int_equal(steps_of(o), 0);
  assert_int_equal(steps_of(NULL), -1);
  dc_optimizer_destroy(o);
}

/* Their addresses may change from step to step. */
static void test_weights_that_overlap_later(void **state) {
  (void)state;
  make_adamw(&a, NULL);
  add(&a, 0, 6, 0, 6);
  add(&a, 0, 4, 0, 0);
  add(&a, 0, 4, 0, 4);
  const dc_tensor weights[3] = {a.weights[0], a.weights[1], a.weights[2]};
  a.weights[1].data = (float *)a.weights[0].data + 1; /* no elements overlap none */
  OK(step(&a));
  a.weights[0].data = (float *)weights[2].data - 5;
  FAILS(step(&a), DC_E_INVALID, "weights[0] overlaps weights[2]");
  a.weights[0] = weights[0];
  OK(step(&a));
  add(&a, 0, 2, 0, 2);
  a.weights[3].data = (float *)a.weights[2].data + 3;
  FAILS(step(&a), DC_E_INVALID, "weights[2] overlaps weights[3]");
  a.weights[3].data = (float *)a.weights[2].data + 4;
  OK(step(&a));
  assert_int_equal(steps_of(a.optimizer), 3);
  dc_optimizer_destroy(a.optimizer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_43_bad_adamw),
      cmocka_unit_test(test_43_bad_sgd),
      cmocka_unit_test(test_43_bad_groups_and_params),
      cmocka_unit_test(test_bad_steps),
      cmocka_unit_test(test_weights_that_overlap_later),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
