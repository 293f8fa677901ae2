/* Muon: compared with a reference in float64, properties of its polar factors, ranks, threads, state and refusals:
 * points 42 to 44, 47, 48, 53 and 54 of the conformance list. */
#define OWN_SHAPES
#include "rank_invariance_test.h"

static const sizes shapes[PARAMS] = {{2, {5, 7}},       {2, {9, 1}},  {2, {1, 6}}, {3, {4, 3, 5}},
                                     {4, {2, 3, 2, 4}}, {2, {12, 4}}, {2, {0, 4}}};

static void near(double got, double want, double tolerance) {
  if (!(fabs(got - want) <= tolerance)) {
    fail_msg("got %.9g, want %.9g", got, want);
  }
}

/* With products in float32, which are close to a float64 reference. */
static const dc_muon_options exact = {.struct_size = sizeof exact, .precision = DC_FLOAT32};

/* ---- what is refused ---- */

#define REFUSED(field, value, text)                                               \
  do {                                                                            \
    dc_muon_options o = DC_MUON_OPTIONS_INIT;                                     \
    dc_optimizer *optimizer = (dc_optimizer *)(void *)&o;                         \
    o.field = (value);                                                            \
    assert_int_equal(dc_muon_create(linalg, NULL, &o, &optimizer), DC_E_INVALID); \
    SAYS(text);                                                                   \
    assert_null(optimizer);                                                       \
  } while (0)

static void point_43_options_out_of_range(void **state) {
  (void)state;
  REFUSED(momentum, 1, "dc_muon_create: options.momentum = 1, must be > 0 and < 1");
  REFUSED(eps, -1, "options.eps = -1");
  REFUSED(weight_decay, -1, "options.weight_decay = -1");
  REFUSED(num_splits, -1, "options.num_splits = -1");
  REFUSED(polynomial, 2, "options.polynomial = 2");
  REFUSED(steps, 65, "options.steps = 65");
  REFUSED(precision, DC_FLOAT16, "options.precision is float16, must be float32 or bfloat16");
  REFUSED(adjust, 3, "options.adjust = 3");
  REFUSED(nesterov, 2, "options.nesterov = 2");
  REFUSED(reserved0, 1, "options.reserved0");
  assert_int_equal(dc_muon_create(NULL, NULL, NULL, &(dc_optimizer *){NULL}), DC_E_INVALID);
  assert_int_equal(dc_muon_create(linalg, NULL, NULL, NULL), DC_E_INVALID);
  assert_int_equal(dc_muon_set_group(NULL, 0, NULL), DC_E_INVALID);
}

static void point_43_vectors_are_adamws(void **state) {
  (void)state;
  const dc_muon_options o = {.struct_size = sizeof o, .num_splits = 3};
  const int64_t shape[2] = {9, 4}, uneven[2] = {8, 4};
  dc_optimizer *optimizer = muon(linalg, NULL, &o);
  for (int32_t ndim = 0; ndim < 2; ndim++) {
    assert_int_equal(dc_optimizer_add_param(optimizer, 0, shape, ndim, 0, 1, DC_FLOAT32, NULL), DC_E_SHAPE);
    SAYS("must be at least 2: Muon is for matrices; give biases, gains and other vectors to AdamW");
  }
  assert_int_equal(dc_optimizer_add_param(optimizer, 0, uneven, 2, 0, 1, DC_FLOAT32, NULL), DC_E_SHAPE);
  SAYS("shape[0] = 8, must be a multiple of options.num_splits = 3");
  OK(dc_optimizer_add_param(optimizer, 0, shape, 2, 0, 36, DC_FLOAT32, NULL));
  dc_optimizer_destroy(optimizer);
}

static void point_43_what_shapes_the_state_stays(void **state) {
  (void)state;
  const dc_muon_options o = DC_MUON_OPTIONS_INIT;
  dc_muon_options others[2] = {o, o}, other = o;
  dc_optimizer *optimizer = one_param(muon(linalg, NULL, &o), 2, 3);
  others[0].num_splits = 2;
  others[1].momentum = -1;
  for (int i = 0; i < 2; i++) {
    static const char *const names[] = {"num_splits must stay", "whether there is momentum must stay"};
    assert_int_equal(dc_muon_set_group(optimizer, 0, &others[i]), DC_E_INVALID);
    SAYS(names[i]);
    OK(dc_muon_set_group(optimizer, 1, &others[i])); /* the group has no parameters */
  }
  other.momentum = 0.5;
  other.precision = DC_BFLOAT16;
  other.polynomial = DC_ORTHOGONAL_MUON;
  other.adjust = DC_MUON_PLAIN;
  other.nesterov = -1;
  OK(dc_muon_set_group(optimizer, 0, &other));
  assert_int_equal(dc_soap_set_group(optimizer, 0, NULL), DC_E_STATE);
  SAYS("optimizer is of kind muon, must be soap");
  dc_optimizer_destroy(optimizer);
}

/* ---- against a reference ---- */

/* The step of one matrix, all in float64. */
static void reference(const dc_muon_options *o, int64_t rows, int64_t cols, const float *g, double *b, double *w) {
  double u[MOST], p[MOST];
  const double momentum = o->momentum < 0 ? 0 : o->momentum > 0 ? o->momentum : 0.95;
  const double r = (double)rows, c = (double)cols, eps = o->eps > 0 ? o->eps : 1e-7;
  const double adjust = o->adjust == DC_MUON_ORIGINAL    ? sqrt(fmax(1, r / c))
                        : o->adjust == DC_MUON_MATCH_RMS ? 0.2 * sqrt(fmax(r, c))
                                                         : 1;
  double squares = 0;
  for (int64_t i = 0; i < rows * cols; i++) {
    b[i] = momentum * b[i] + (double)g[i];
    u[i] = o->nesterov >= 0 ? (double)g[i] + momentum * b[i] : b[i];
    squares += u[i] * u[i];
  }
  const dc_tensor from = {
      .struct_size = sizeof from, .data = u, .shape = (const int64_t[]){rows, cols}, .ndim = 2, .dtype = DC_FLOAT64};
  dc_tensor to = from;
  to.data = p;
  OK(dc_orthogonalize(linalg, &from, o->polynomial, o->steps > 0 ? o->steps : 5, &to)); /* for any norm above eps */
  assert_true(squares == 0 || sqrt(squares) > eps);
  for (int64_t i = 0; i < rows * cols; i++) {
    w[i] = (1 - 0.1 * o->weight_decay) * w[i] - 0.1 * adjust * p[i];
  }
}

static void compare(const dc_muon_options *o, int64_t rows, int64_t cols, double tolerance) {
  const int64_t splits = o->num_splits > 0 ? o->num_splits : 1, each = rows / splits * cols;
  float grad[MOST], weight[MOST];
  double b[MOST] = {0}, w[MOST];
  dc_optimizer *optimizer = one_param(muon(linalg, NULL, o), rows, cols);
  OK(dc_optimizer_set_lr(optimizer, 0, 0.1));
  gradient(100, 0, rows * cols, weight);
  for (int64_t i = 0; i < rows * cols; i++) {
    w[i] = (double)weight[i];
  }
  for (int64_t t = 1; t <= 3; t++) {
    gradient(t, 1, rows * cols, grad);
    one_step(optimizer, weight, grad, rows * cols);
    for (int64_t s = 0; s < splits; s++) {
      reference(o, rows / splits, cols, grad + s * each, b + s * each, w + s * each);
    }
    for (int64_t i = 0; i < rows * cols; i++) {
      near((double)weight[i], w[i], tolerance);
    }
  }
  for (int64_t i = 0; i < each && o->momentum >= 0; i++) {
    near((double)state_of(optimizer, "momentum.0")[i], b[i], 1e-5);
  }
  dc_optimizer_destroy(optimizer);
}

static void the_definition(void **state) {
  (void)state;
  static const int64_t sides[][2] = {{6, 6}, {4, 20}, {20, 4}, {1, 9}, {9, 1}, {1, 1}, {12, 40}, {40, 12}};
  for (size_t i = 0; i < sizeof sides / sizeof sides[0]; i++) {
    const int64_t rows = sides[i][0], cols = sides[i][1];
    dc_muon_options o = exact;
    compare(&o, rows, cols, 1e-4);
    o.polynomial = DC_ORTHOGONAL_MUON;
    o.weight_decay = 0.5;
    o.adjust = DC_MUON_MATCH_RMS;
    compare(&o, rows, cols, 1e-4);
    o.nesterov = -1;
    o.steps = 3;
    o.adjust = DC_MUON_PLAIN;
    compare(&o, rows, cols, 1e-4);
    o.momentum = -1;
    compare(&o, rows, cols, 1e-4);
    o = exact;
    o.num_splits = rows % 4 == 0 ? 4 : 1;
    compare(&o, rows, cols, 1e-4);
    o.num_splits = 1;
    o.precision = DC_DTYPE_NONE; /* bfloat16: its rounding shows most for a nearly singular matrix */
    compare(&o, rows, cols, 0.15);
    o.polynomial = DC_ORTHOGONAL_MUON;
    compare(&o, rows, cols, 0.15);
  }
}

/* Returns the weights after a step of length 1 from zero. */
static void direction(const dc_muon_options *o, int64_t rows, int64_t cols, const float *grad, float *to) {
  dc_optimizer *optimizer = one_param(muon(linalg, NULL, o), rows, cols);
  memset(to, 0, (size_t)(rows * cols) * sizeof *to);
  one_step(optimizer, to, grad, rows * cols);
  dc_optimizer_destroy(optimizer);
}

/* Singular values are the square roots of the eigenvalues of W W^T, which is [n, n] with n <= cols. */
static void band(const float *w, int64_t n, int64_t cols, int64_t full, double low, double high) {
  double gram[64], values[8], vectors[64];
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < n; j++) {
      gram[i * n + j] = 0;
      for (int64_t k = 0; k < cols; k++) {
        gram[i * n + j] += (double)w[i * cols + k] * (double)w[j * cols + k];
      }
    }
  }
  const dc_tensor a = {
      .struct_size = sizeof a, .data = gram, .shape = (const int64_t[]){n, n}, .ndim = 2, .dtype = DC_FLOAT64};
  dc_tensor v = {.struct_size = sizeof v, .data = values, .shape = &n, .ndim = 1, .dtype = DC_FLOAT64}, q = a;
  q.data = vectors;
  OK(dc_eigh(linalg, &a, NULL, &v, &q, NULL, 0));
  for (int64_t i = 0; i < n; i++) { /* in ascending order */
    const double value = sqrt(fmax(values[i], 0));
    near(value, i < n - full ? 0 : (low + high) / 2, i < n - full ? 1e-3 : (high - low) / 2);
  }
}

static void singular_values_are_in_the_band(void **state) {
  (void)state;
  dc_muon_options o = DC_MUON_OPTIONS_INIT;
  float grad[48], w[48];
  for (int64_t i = 0; i < 48; i++) { /* far from singular, except the last rows of the second one */
    grad[i] = (i % 7 == 0 ? 2.0f : 0) + (float)(i * 29 % 31) / 31;
  }
  for (int k = 0; k < 2; k++) { /* both types of products */
    direction(&o, 6, 8, grad, w);
    band(w, 6, 8, 6, 0.84, 1.13);
    o.polynomial = DC_ORTHOGONAL_MUON;
    direction(&o, 6, 8, grad, w);
    band(w, 6, 8, 6, 0.68, 1.16);
    o = exact;
  }
  o.steps = 10;
  direction(&o, 6, 8, grad, w);
  band(w, 6, 8, 6, 0.9999, 1.0001);
  memcpy(grad + 40, grad, 8 * sizeof *grad); /* two equal rows */
  direction(&exact, 6, 8, grad, w);
  band(w, 6, 8, 5, 0.84, 1.13);
}

static void products_are_bfloat16_unless_told(void **state) {
  (void)state;
  dc_muon_options o = DC_MUON_OPTIONS_INIT;
  float grad[48], usual[48], w[48];
  gradient(5, 0, 48, grad);
  direction(&o, 6, 8, grad, usual);
  o.precision = DC_BFLOAT16;
  direction(&o, 6, 8, grad, w);
  assert_memory_equal(w, usual, sizeof w);
  direction(&exact, 6, 8, grad, w);
  assert_memory_not_equal(w, usual, sizeof w);
}

static void point_42_lengths_and_zeros(void **state) {
  (void)state;
  float grad[20] = {0}, w[20], large[20], small[20];
  direction(&exact, 4, 5, grad, w);
  for (int i = 0; i < 20; i++) {
    assert_true(w[i] == 0);
  }
  gradient(3, 0, 20, grad);
  direction(&exact, 4, 5, grad, w);
  for (int i = 0; i < 20; i++) {
    large[i] = grad[i] * 0x1p48f;
  }
  direction(&exact, 4, 5, large, small);
  assert_memory_equal(w, small, sizeof w); /* scaling by a power of two changes no bit */
  for (int i = 0; i < 20; i++) {
    small[i] = grad[i] * 1e-30f; /* eps is larger than the norm */
  }
  direction(&exact, 4, 5, small, w);
  for (int i = 0; i < 20; i++) {
    assert_true(fabsf(w[i]) < 1e-15f);
  }
}

/* ---- ranks, threads, state ---- */

static dc_optimizer *make(dc_linalg *l, dc_comm *comm) {
  const dc_muon_options o = {.struct_size = sizeof o, .weight_decay = 0.1, .precision = DC_FLOAT32};
  return muon(l, comm, &o);
}

static dc_optimizer *make_short(dc_linalg *l, dc_comm *comm) {
  const dc_muon_options o = DC_MUON_OPTIONS_INIT;
  return muon(l, comm, &o);
}

static void point_47_48_ranks_agree_with_one(void **state) {
  (void)state;
  ranks_agree_with_one(make);
  ranks_agree_with_one(make_short);
}

/* Two ranks, whose second group has this many steps of the polynomial. The third matrix's owner depends on costs
 * only. */
static dc_optimizer *with_steps(dc_comm *comm, int32_t steps_of_second) {
  static const int64_t shapes_of[3][2] = {{8, 8}, {7, 7}, {4, 4}};
  const dc_muon_options first = DC_MUON_OPTIONS_INIT, second = {.struct_size = sizeof second, .steps = steps_of_second};
  dc_optimizer *optimizer = muon(linalg, comm, &first);
  OK(dc_muon_set_group(optimizer, 1, &second));
  for (int32_t i = 0; i < 3; i++) {
    const int64_t numel = shapes_of[i][0] * shapes_of[i][1];
    OK(dc_optimizer_add_param(optimizer, i == 1, shapes_of[i], 2, 0, numel, DC_FLOAT32, NULL));
  }
  return optimizer;
}

static void *load_with_other_steps(void *arg) {
  size_t bytes;
  dc_optimizer *optimizer = with_steps(arg, 5);
  void *memory = saved(optimizer, &bytes);
  dc_optimizer_destroy(optimizer);
  optimizer = with_steps(arg, 10);
  OK(dc_optimizer_load(optimizer, memory, (int64_t)bytes));
  dc_optimizer_destroy(optimizer);
  free(memory);
  dc_comm_destroy(arg);
  return NULL;
}

/* The number of steps may change, so a state saved with another number loads. */
static void a_state_of_other_steps_is_loaded(void **state) {
  (void)state;
  dc_comm *comms[2];
  pthread_t threads[2];
  OK(dc_comm_create_threads(2, NULL, comms));
  for (int r = 0; r < 2; r++) {
    assert_int_equal(pthread_create(&threads[r], NULL, load_with_other_steps, comms[r]), 0);
  }
  for (int r = 0; r < 2; r++) {
    pthread_join(threads[r], NULL);
  }
}

static void point_53_threads(void **state) {
  (void)state;
  threads_do_not_change_bits(make);
  threads_do_not_change_bits(make_short);
}

static void point_44_54_a_bad_gradient_and_steady_memory(void **state) {
  (void)state;
  dc_optimizer_stats first = DC_OPTIMIZER_STATS_INIT, last = DC_OPTIMIZER_STATS_INIT;
  model m;
  float grads[PARAMS][MOST];
  size_t bytes;
  open_model(&m, make_short(linalg, NULL), 0, 1, false);
  steps(&m, 1, 3);
  OK(dc_optimizer_get_stats(m.optimizer, &first));
  assert_int_equal(first.blocks, PARAMS - 1);
  void *before = saved(m.optimizer, &bytes);
  gradients_of(3, grads);
  grads[3][17] = NAN;
  assert_int_equal(step_with(&m, grads, NULL), DC_E_NOT_FINITE);
  SAYS("grads[3] times grad_scale is not finite, or not below 2^50");
  void *after = saved(m.optimizer, &bytes);
  assert_memory_equal(before, after, bytes);
  free(before);
  free(after);
  OK(dc_muon_set_group(m.optimizer, 0, &exact));
  steps(&m, 3, 30);
  OK(dc_optimizer_get_stats(m.optimizer, &last));
  assert_int_equal(first.state_bytes, last.state_bytes);
  assert_int_equal(first.scratch_bytes, last.scratch_bytes);
  dc_optimizer_destroy(m.optimizer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(point_43_options_out_of_range),
      cmocka_unit_test(point_43_vectors_are_adamws),
      cmocka_unit_test(point_43_what_shapes_the_state_stays),
      cmocka_unit_test(the_definition),
      cmocka_unit_test(singular_values_are_in_the_band),
      cmocka_unit_test(products_are_bfloat16_unless_told),
      cmocka_unit_test(point_42_lengths_and_zeros),
      cmocka_unit_test(point_47_48_ranks_agree_with_one),
      cmocka_unit_test(a_state_of_other_steps_is_loaded),
      cmocka_unit_test(point_53_threads),
      cmocka_unit_test(point_44_54_a_bad_gradient_and_steady_memory),
  };
  return cmocka_run_group_tests(tests, open_handle, close_handle);
}
