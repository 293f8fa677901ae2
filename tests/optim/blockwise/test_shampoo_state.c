/* Shampoo's errors, failures that it tolerates, its ranks, threads and state (points 43, 44, 47 and 48 of the
 * conformance list). */
#include "rank_invariance_test.h"
#include "support/steps.h"

/* ---- what is refused ---- */

static void refused(dc_shampoo_options o, const char *text) {
  dc_optimizer *optimizer = (dc_optimizer *)(void *)&o;
  assert_int_equal(dc_shampoo_create(linalg, NULL, &o, &optimizer), DC_E_INVALID);
  SAYS(text);
  assert_null(optimizer);
}

#define REFUSED(field, value, text)                 \
  do {                                              \
    dc_shampoo_options o = DC_SHAMPOO_OPTIONS_INIT; \
    o.field = (value);                              \
    refused(o, text);                               \
  } while (0)

static void point_43_options_out_of_range(void **state) {
  (void)state;
  REFUSED(beta1, 1, "dc_shampoo_create: options.beta1 = 1, must be > 0 and < 1");
  REFUSED(beta1, -0.5, "options.beta1 = -0.5");
  REFUSED(beta2, 1.5, "options.beta2 = 1.5, must be > 0 and <= 1");
  REFUSED(beta2, -1, "options.beta2 = -1");
  REFUSED(eps_abs, -2, "options.eps_abs = -2");
  REFUSED(eps_rel, INFINITY, "options.eps_rel = inf");
  REFUSED(tolerance, NAN, "options.tolerance = nan");
  REFUSED(tolerance, -1, "options.tolerance = -1");
  REFUSED(graft_beta2, 1, "options.graft_beta2 = 1");
  REFUSED(graft_eps, -1, "options.graft_eps = -1");
  REFUSED(weight_decay, -1e-9, "options.weight_decay = -1e-09");
  REFUSED(momentum, 1, "options.momentum = 1");
  REFUSED(max_block, 16385, "options.max_block = 16385, must be 1 to 16384, or 0");
  REFUSED(max_block, -1, "options.max_block = -1");
  REFUSED(merge_below, -2, "options.merge_below = -2");
  REFUSED(precondition_frequency, -1, "options.precondition_frequency = -1");
  REFUSED(start_preconditioning_step, -1, "options.start_preconditioning_step = -1");
  REFUSED(root, 65, "options.root = 65");
  REFUSED(graft, 5, "options.graft");
  REFUSED(decay, 2, "options.decay");
  REFUSED(nesterov, 1, "options.nesterov = 1 needs momentum > 0");
  REFUSED(nesterov, 2, "options.nesterov");
  REFUSED(tolerated_failures, -2, "options.tolerated_failures = -2");
  REFUSED(reserved0, 1, "options.reserved0");
  REFUSED(struct_size, 8, "options");
  dc_optimizer *optimizer;
  assert_int_equal(dc_shampoo_create(NULL, NULL, NULL, &optimizer), DC_E_INVALID);
  assert_int_equal(dc_shampoo_create(linalg, NULL, NULL, NULL), DC_E_INVALID);
  assert_int_equal(dc_shampoo_set_group(NULL, 0, NULL), DC_E_INVALID);
}

static void point_43_what_shapes_the_state_stays(void **state) {
  (void)state;
  dc_shampoo_options o = DC_SHAMPOO_OPTIONS_INIT, other = o;
  dc_optimizer *optimizer = one_param(shampoo(linalg, NULL, &o), 2, 3);
  other.max_block = 512;
  assert_int_equal(dc_shampoo_set_group(optimizer, 0, &other), DC_E_INVALID);
  SAYS("group 0 has parameters: max_block must stay as it is");
  other = o;
  other.beta1 = -1;
  assert_int_equal(dc_shampoo_set_group(optimizer, 0, &other), DC_E_INVALID);
  SAYS("whether there is a first moment (beta1) must stay");
  other = o;
  other.momentum = 0.5;
  assert_int_equal(dc_shampoo_set_group(optimizer, 0, &other), DC_E_INVALID);
  SAYS("whether there is momentum must stay");
  other = o;
  other.graft = DC_GRAFT_SGD;
  assert_int_equal(dc_shampoo_set_group(optimizer, 0, &other), DC_E_INVALID);
  SAYS("whether graft has squares must stay");
  other = o;
  other.tolerance = 1e-2;
  assert_int_equal(dc_shampoo_set_group(optimizer, 0, &other), DC_E_INVALID);
  SAYS("whether tolerance is 0 must stay");
  other = o;
  other.merge_below = -1;
  assert_int_equal(dc_shampoo_set_group(optimizer, 0, &other), DC_E_INVALID);
  SAYS("merge_below must stay");
  other = o;
  other.beta1 = 0.5;
  other.beta2 = 0.99;
  other.precondition_frequency = 10;
  other.graft = DC_GRAFT_RMSPROP;
  OK(dc_shampoo_set_group(optimizer, 0, &other));
  other.max_block = 2;
  OK(dc_shampoo_set_group(optimizer, 1, &other)); /* a new group */
  assert_int_equal(dc_shampoo_set_group(optimizer, 3, &other), DC_E_INVALID);
  dc_optimizer_destroy(optimizer);
}

static void point_44_gradients_that_are_not_finite(void **state) {
  (void)state;
  const float bad[] = {NAN, INFINITY, -INFINITY, 3e38f, 1e16f};
  dc_shampoo_options o = DC_SHAMPOO_OPTIONS_INIT;
  o.momentum = 0.9;
  model m;
  open_model(&m, shampoo(linalg, NULL, &o), 0, 1, false);
  steps(&m, 1, 3);
  size_t bytes, again;
  void *before = saved(m.optimizer, &bytes);
  float weights[PARAMS][MOST], grads[PARAMS][MOST];
  memcpy(weights, m.weights, sizeof weights);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    gradients_of(3, grads);
    grads[3][17] = bad[i];
    assert_int_equal(step_with(&m, grads, NULL), DC_E_NOT_FINITE);
    SAYS("grads[3] times grad_scale is not finite, or not below 2^50");
    void *after = saved(m.optimizer, &again);
    assert_int_equal(bytes, again);
    assert_memory_equal(before, after, bytes);
    assert_memory_equal(weights, m.weights, sizeof weights);
    free(after);
  }
  free(before);
  steps(&m, 3, 5);
  dc_optimizer_destroy(m.optimizer);
}

/* ---- roots that fail ---- */

static void point_16_failed_roots(void **state) {
  (void)state;
  dc_shampoo_options o = plain_options();
  o.tolerated_failures = 2;
  the_last_good_one_stays(one_param(shampoo(linalg, NULL, &o), 3, 2), "root.0.0",
                          "the root of factor.0.0 of parameter 0 failed 3 times in a row");
}

/* ---- ranks ---- */

static dc_shampoo_options rank_options(void) {
  dc_shampoo_options o = DC_SHAMPOO_OPTIONS_INIT;
  o.max_block = 3;
  o.merge_below = -1;
  o.momentum = 0.9;
  o.weight_decay = 0.1;
  o.decay = DC_DECAY_L2;
  o.precondition_frequency = 2;
  return o;
}

static dc_optimizer *make(dc_linalg *l, dc_comm *comm) {
  const dc_shampoo_options o = rank_options();
  return shampoo(l, comm, &o);
}

static void point_47_48_ranks_agree_with_one(void **state) {
  (void)state;
  ranks_agree_with_one(make);
}

static void *failing_rank(void *arg) {
  rank *r = arg;
  dc_shampoo_options o = rank_options();
  float grads[PARAMS][MOST];
  o.tolerated_failures = -1;
  open_model(&r->m, shampoo(linalg, r->comm, &o), r->rank, r->world, true);
  gradients_of(1, grads);
  if (r->rank == 1) { /* the last element of the flattened parameter is the last rank's */
    grads[0][34] = NAN;
  }
  float before[PARAMS][MOST];
  memcpy(before, r->m.weights, sizeof before);
  dc_status want = DC_E_NOT_FINITE;
  if (step_with(&r->m, grads, NULL) != want || memcmp(before, r->m.weights, sizeof before) != 0) {
    abort();
  }
  steps(&r->m, 1, 2);
  dc_tensor view = DC_TENSOR_INIT;
  bool owner = dc_optimizer_get_state(r->m.optimizer, 0, "factor.0.0", &view) == DC_OK;
  if (owner) {
    *(float *)view.data = INFINITY;
  }
  steps(&r->m, 2, 3); /* step 2's refresh fails on the block's owner */
  memcpy(before, r->m.weights, sizeof before);
  want = owner ? DC_E_NOT_CONVERGED : DC_E_MISMATCH;
  gradients_of(3, grads);
  if (step_with(&r->m, grads, NULL) != want || memcmp(before, r->m.weights, sizeof before) != 0) {
    fprintf(stderr, "%s\n", dc_last_error());
    abort();
  }
  dc_optimizer_destroy(r->m.optimizer);
  dc_comm_destroy(r->comm);
  return NULL;
}

static void on_two_ranks(void *(*body)(void *)) {
  static rank ranks[2];
  dc_comm *comms[2];
  OK(dc_comm_create_threads(2, NULL, comms));
  for (int32_t r = 0; r < 2; r++) {
    ranks[r] = (rank){.comm = comms[r], .rank = r, .world = 2};
    assert_int_equal(pthread_create(&ranks[r].thread, NULL, body, &ranks[r]), 0);
  }
  for (int32_t r = 0; r < 2; r++) {
    pthread_join(ranks[r].thread, NULL);
  }
}

static void point_44_one_rank_fails_and_none_steps(void **state) {
  (void)state;
  on_two_ranks(failing_rank);
}

/* One rank lacks a gradient that the other has: a rank that made the step would wait for ever. */
static void *rank_without_a_gradient(void *arg) {
  rank *r = arg;
  dc_shampoo_options o = rank_options();
  float grads[PARAMS][MOST], before[PARAMS][MOST];
  bool skip[PARAMS] = {r->rank == 1};
  open_model(&r->m, shampoo(linalg, r->comm, &o), r->rank, r->world, true);
  gradients_of(1, grads);
  memcpy(before, r->m.weights, sizeof before);
  if (step_with(&r->m, grads, skip) != DC_E_MISMATCH || memcmp(before, r->m.weights, sizeof before) != 0 ||
      strstr(dc_last_error(), "has other parameters, or gradients of other parameters") == NULL) {
    fprintf(stderr, "%s\n", dc_last_error());
    abort();
  }
  steps(&r->m, 1, 2);
  dc_optimizer_destroy(r->m.optimizer);
  dc_comm_destroy(r->comm);
  return NULL;
}

static void point_44_ranks_with_other_gradients_do_not_step(void **state) {
  (void)state;
  on_two_ranks(rank_without_a_gradient);
}

/* ---- threads, state, growth ---- */

static void point_53_threads(void **state) {
  (void)state;
  threads_do_not_change_bits(make);
}

static void point_48_a_saved_state_goes_on_bit_for_bit(void **state) {
  (void)state;
  dc_shampoo_options o = rank_options();
  o.beta2 = 0.9;
  model through, resumed;
  open_model(&through, shampoo(linalg, NULL, &o), 0, 1, false);
  steps(&through, 1, 4);
  size_t bytes;
  void *memory = saved(through.optimizer, &bytes);
  open_model(&resumed, shampoo(linalg, NULL, &o), 0, 1, false);
  memcpy(resumed.weights, through.weights, sizeof through.weights);
  OK(dc_optimizer_load(resumed.optimizer, memory, (int64_t)bytes));
  steps(&through, 4, STEPS);
  steps(&resumed, 4, STEPS);
  assert_memory_equal(resumed.weights, through.weights, sizeof through.weights);
  size_t one, other;
  void *a = saved(through.optimizer, &one), *b = saved(resumed.optimizer, &other);
  assert_int_equal(one, other);
  assert_memory_equal(a, b, one);
  dc_optimizer_destroy(resumed.optimizer);

  o.max_block = 5; /* other blocks */
  open_model(&resumed, shampoo(linalg, NULL, &o), 0, 1, false);
  assert_int_equal(dc_optimizer_load(resumed.optimizer, memory, (int64_t)bytes), DC_E_SHAPE);
  free(a);
  free(b);
  free(memory);
  dc_optimizer_destroy(resumed.optimizer);
  dc_optimizer_destroy(through.optimizer);
}

/* Rarer refreshes change the default of start_preconditioning_step. Roots that are in use stay in use, also after an
 * optimizer loads the state. */
static void roots_outlast_rarer_refreshes(void **state) {
  (void)state;
  dc_shampoo_options o = rank_options();
  model expected, through, resumed;
  open_model(&through, shampoo(linalg, NULL, &o), 0, 1, false);
  o.start_preconditioning_step = o.precondition_frequency;
  open_model(&expected, shampoo(linalg, NULL, &o), 0, 1, false);
  steps(&through, 1, 4);
  steps(&expected, 1, 4);
  o.precondition_frequency = 100;
  OK(dc_shampoo_set_group(expected.optimizer, 0, &o));
  o.start_preconditioning_step = 0;
  OK(dc_shampoo_set_group(through.optimizer, 0, &o));
  size_t bytes;
  void *memory = saved(through.optimizer, &bytes);
  open_model(&resumed, shampoo(linalg, NULL, &o), 0, 1, false);
  memcpy(resumed.weights, through.weights, sizeof through.weights);
  OK(dc_optimizer_load(resumed.optimizer, memory, (int64_t)bytes));
  model *all[] = {&expected, &through, &resumed};
  for (int i = 0; i < 3; i++) {
    steps(all[i], 4, STEPS);
    assert_memory_equal(all[i]->weights, expected.weights, sizeof expected.weights);
    dc_optimizer_destroy(all[i]->optimizer);
  }
  free(memory);
}

static void parameters_may_come_later(void **state) {
  (void)state;
  dc_shampoo_options o = plain_options();
  dc_optimizer *optimizer = one_param(shampoo(linalg, NULL, &o), 3, 2);
  float first[6] = {0}, second[8] = {0}, grad[8];
  gradient(1, 0, 8, grad);
  one_step(optimizer, first, grad, 6);
  OK(dc_optimizer_add_param(optimizer, 0, (int64_t[]){2, 4}, 2, 0, 8, DC_DTYPE_NONE, NULL));
  int64_t counts[2] = {6, 8};
  dc_tensor w[2] = {{sizeof *w, first, &counts[0], NULL, 1, DC_FLOAT32, NULL},
                    {sizeof *w, second, &counts[1], NULL, 1, DC_FLOAT32, NULL}};
  const dc_tensor g[2] = {{sizeof *g, grad, &counts[0], NULL, 1, DC_FLOAT32, NULL},
                          {sizeof *g, grad, &counts[1], NULL, 1, DC_FLOAT32, NULL}};
  OK(dc_optimizer_step(optimizer, w, g, sizeof *w, 2, 1));
  dc_optimizer *alone = one_param(shampoo(linalg, NULL, &o), 2, 4);
  float want[8] = {0};
  one_step(alone, want, grad, 8);
  assert_memory_equal(second, want, sizeof want);
  assert_int_equal(steps_of(optimizer), 2);
  dc_optimizer_destroy(alone);
  dc_optimizer_destroy(optimizer);
}

/* ---- memory that is refused ---- */

static int64_t allowed; /* number of allocations that still succeed */

static void *limited_alloc(int64_t bytes, int64_t align, void *user) {
  (void)user;
  return allowed-- > 0 ? aligned_alloc((size_t)align, (size_t)((bytes + align - 1) / align * align)) : NULL;
}

static void limited_free(void *ptr, int64_t bytes, int64_t align, void *user) {
  (void)bytes, (void)align, (void)user;
  free(ptr);
}

static void refused_memory_leaves_all_as_it_was(void **state) {
  (void)state;
  const dc_allocator allocator = {sizeof allocator, limited_alloc, limited_free, NULL, NULL};
  const dc_device_options options = {.struct_size = sizeof options, .allocator = &allocator};
  dc_device *scarce;
  dc_linalg *l;
  allowed = 1000;
  OK(dc_device_open("cpu", &options, &scarce));
  OK(dc_linalg_create(scarce, NULL, &l));
  dc_shampoo_options o = plain_options();
  model m, before;
  open_model(&m, shampoo(l, NULL, &o), 0, 1, false);
  float grads[PARAMS][MOST];
  gradients_of(1, grads);
  before = m;
  int failed = 0;
  for (allowed = 0; step_with(&m, grads, NULL) != DC_OK; allowed = 1) { /* allows one more each time */
    SAYS("gave no");
    assert_memory_equal(m.weights, before.weights, sizeof m.weights);
    assert_true(++failed < 100);
  }
  assert_int_equal(failed, 3); /* for state, scratch memory and exchange */
  allowed = 0;                 /* a steady step allocates nothing */
  steps(&m, 2, 5);
  model plenty;
  open_model(&plenty, shampoo(linalg, NULL, &o), 0, 1, false);
  steps(&plenty, 1, 5);
  assert_memory_equal(m.weights, plenty.weights, sizeof m.weights);
  dc_optimizer_destroy(plenty.optimizer);
  dc_optimizer_destroy(m.optimizer);
  dc_linalg_destroy(l);
  dc_device_destroy(scarce);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(point_43_options_out_of_range),
      cmocka_unit_test(point_43_what_shapes_the_state_stays),
      cmocka_unit_test(point_44_gradients_that_are_not_finite),
      cmocka_unit_test(point_44_one_rank_fails_and_none_steps),
      cmocka_unit_test(point_44_ranks_with_other_gradients_do_not_step),
      cmocka_unit_test(point_47_48_ranks_agree_with_one),
      cmocka_unit_test(point_48_a_saved_state_goes_on_bit_for_bit),
      cmocka_unit_test(roots_outlast_rarer_refreshes),
      cmocka_unit_test(point_16_failed_roots),
      cmocka_unit_test(point_53_threads),
      cmocka_unit_test(parameters_may_come_later),
      cmocka_unit_test(refused_memory_leaves_all_as_it_was),
  };
  return cmocka_run_group_tests(tests, open_handle, close_handle);
}
