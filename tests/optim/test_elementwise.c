/* AdamW and SGD compared with their definitions in float64; parts, threads and instruction sets; 16-bit types; groups.
 * Numbers in names are points of the second-order conformance list. tests/torch/optim/test_optim.py compares with
 * PyTorch. */
#include "optim_test.h"
#include "support/steps.h"

static bundle a, b;

/* ---- definitions ---- */

typedef struct oracle {
  double w, m, v, largest;
} oracle;

static void adamw_oracle(oracle *x, double g, int t, double lr, const dc_adamw_options *o) {
  double b1 = o->beta1 == 0 ? 0.9 : o->beta1 < 0 ? 0 : o->beta1;
  double b2 = o->beta2 == 0 ? 0.999 : o->beta2 < 0 ? 0 : o->beta2;
  double eps = o->eps == 0 ? 1e-8 : o->eps < 0 ? 0 : o->eps;
  g = o->maximize == 1 ? -g : g;
  x->m = b1 * x->m + (1 - b1) * g;
  x->v = b2 * x->v + (1 - b2) * g * g;
  x->largest = fmax(x->largest, x->v);
  double v = o->amsgrad == 1 ? x->largest : x->v;
  x->w = (1 - lr * o->weight_decay) * x->w - lr / (1 - pow(b1, t)) * x->m / (sqrt(v) / sqrt(1 - pow(b2, t)) + eps);
}

static void sgd_oracle(oracle *x, double g, int t, double lr, const dc_sgd_options *o) {
  g = (o->maximize == 1 ? -g : g) + o->weight_decay * x->w;
  x->m = t == 1 ? g : o->momentum * x->m + (1 - o->dampening) * g;
  x->w -= lr * (o->momentum == 0 ? g : o->nesterov == 1 ? g + o->momentum * x->m : x->m);
}

enum { N = 1000, STEPS = 50 };

/* Compares 50 steps with the definition; some gradients are zero. */
static void compare(bundle *x, const dc_adamw_options *adamw, const dc_sgd_options *sgd) {
  static oracle want[N];
  add(x, 0, N, 0, N);
  for (int i = 0; i < N; i++) {
    want[i] = (oracle){.w = (double)x->weight[0][i]};
  }
  for (int t = 1; t <= STEPS; t++) {
    double lr = 1e-2 / t;
    fill_grads(x, t, 0);
    OK(dc_optimizer_set_lr(x->optimizer, 0, lr));
    OK(step(x));
    for (int i = 0; i < N; i++) {
      if (adamw != NULL) {
        adamw_oracle(&want[i], (double)x->grad[0][i], t, lr, adamw);
      } else {
        sgd_oracle(&want[i], (double)x->grad[0][i], t, lr, sgd);
      }
    }
  }
  for (int i = 0; i < N; i++) {
    assert_true(fabs((double)x->weight[0][i] - want[i].w) <= 4e-6 * fmax(1, fabs(want[i].w)));
  }
  assert_int_equal(steps_of(x->optimizer), STEPS);
  dc_optimizer_destroy(x->optimizer);
}

static void test_43_adamw_definition(void **state) {
  (void)state;
  for (int i = 0; i < 6; i++) {
    dc_adamw_options o = DC_ADAMW_OPTIONS_INIT;
    o.weight_decay = i == 1 ? 0.1 : 0;
    o.amsgrad = i == 2;
    o.maximize = i == 3;
    o.beta1 = i == 4 ? -1 : i == 1 ? 0.5 : 0;
    o.beta2 = i == 5 ? 0.9 : 0;
    o.eps = i == 5 ? 1e-3 : 0;
    make_adamw(&a, &o);
    compare(&a, &o, NULL);
  }
}

static void test_43_sgd_definition(void **state) {
  (void)state;
  for (int i = 0; i < 6; i++) {
    dc_sgd_options o = DC_SGD_OPTIONS_INIT;
    o.momentum = i >= 2 ? 0.9 : 0;
    o.dampening = i == 3 ? 0.5 : 0;
    o.weight_decay = i == 1 || i == 4 ? 0.1 : 0;
    o.nesterov = i == 4;
    o.maximize = i == 5;
    make_sgd(&a, &o);
    compare(&a, NULL, &o);
  }
}

/* ---- the same bits ---- */

/* An element's result does not depend on the partition of its parameter, on its neighbours or on the threads. */
static void test_parts(void **state) {
  (void)state;
  static const int64_t cuts[] = {0, 1, 3, 1027, 1028, 17500, 33000, 33333};
  dc_adamw_options o = DC_ADAMW_OPTIONS_INIT;
  o.weight_decay = 0.01;
  make_adamw(&a, &o);
  add(&a, 0, 33333, 0, 33333);
  for (int t = 1; t <= 3; t++) {
    fill_grads(&a, t, 0);
    OK(step(&a));
  }
  for (size_t c = 0; c + 1 < sizeof cuts / sizeof *cuts; c++) {
    int64_t count = cuts[c + 1] - cuts[c];
    dc_linalg *alone = open_linalg(1, 0);
    make_adamw(&b, &o);
    dc_optimizer_destroy(b.optimizer);
    OK(dc_adamw_create(alone, &o, &b.optimizer));
    dc_linalg_destroy(alone); /* the optimizer stays usable */
    add(&b, 0, 33333, cuts[c], count);
    for (int t = 1; t <= 3; t++) {
      fill_grads(&b, t, cuts[c]);
      OK(step(&b));
    }
    assert_memory_equal(b.weight[0], a.weight[0] + cuts[c], (size_t)count * sizeof(float));
    dc_optimizer_destroy(b.optimizer);
  }
  dc_optimizer_destroy(a.optimizer);
}

/* Memory may begin at any address. */
static void test_any_address(void **state) {
  (void)state;
  static char weight[4 * 100 + 1], grad[4 * 100 + 1];
  make_adamw(&a, NULL);
  add(&a, 0, 100, 0, 100);
  fill_grads(&a, 1, 0);
  memcpy(weight + 1, a.weight[0], 400);
  memcpy(grad + 1, a.grad[0], 400);
  OK(step(&a));
  make_adamw(&b, NULL);
  add(&b, 0, 100, 0, 100);
  b.weights[0].data = weight + 1;
  b.grads[0].data = grad + 1;
  OK(step(&b));
  assert_memory_equal(weight + 1, a.weight[0], 400);
  dc_optimizer_destroy(a.optimizer);
  dc_optimizer_destroy(b.optimizer);
}

/* ---- 16-bit types ---- */

static uint16_t bf16(float x) { /* the tests' numbers are neither NaN nor near infinity */
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float widened(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* bfloat16 weights are their rounded float32 copy, which follows the same steps as float32 weights. */
static void test_master(void **state) {
  (void)state;
  enum { COUNT = 3000 };
  static uint16_t halves[COUNT], grads[COUNT];
  int64_t n = COUNT;
  make_adamw(&a, NULL);
  add(&a, 0, n, 0, n);
  make_adamw(&b, NULL);
  OK(dc_optimizer_add_param(b.optimizer, 0, &n, 1, 0, n, DC_BFLOAT16, NULL));
  dc_tensor w = vector(halves, DC_BFLOAT16, n), g = vector(grads, DC_BFLOAT16, n);
  for (int i = 0; i < COUNT; i++) {
    halves[i] = bf16(a.weight[0][i]);
    a.weight[0][i] = widened(halves[i]);
  }
  for (int t = 1; t <= 30; t++) {
    fill_grads(&a, t, 0);
    for (int i = 0; i < COUNT; i++) {
      grads[i] = bf16(a.grad[0][i]);
      a.grad[0][i] = widened(grads[i]) * 0.25f;
    }
    if (t == 20) { /* the caller changes a weight */
      a.weight[0][5] = 0.75f;
      halves[5] = bf16(0.75f);
    }
    OK(step(&a));
    OK(dc_optimizer_step(b.optimizer, &w, &g, sizeof w, 1, 0.25));
    for (int i = 0; i < COUNT; i++) {
      assert_int_equal(halves[i], bf16(a.weight[0][i]));
    }
  }
  b.count = 1;
  assert_memory_equal(piece(&b, 0, "master"), a.weight[0], sizeof(float) * COUNT);
  assert_memory_equal(piece(&b, 0, "exp_avg_sq"), piece(&a, 0, "exp_avg_sq"), sizeof(float) * COUNT);
  dc_optimizer_destroy(a.optimizer);
  dc_optimizer_destroy(b.optimizer);
}

/* ---- groups, skipped and empty parameters ---- */

static void test_groups(void **state) {
  (void)state;
  dc_adamw_options o = DC_ADAMW_OPTIONS_INIT;
  make_adamw(&a, NULL);
  o.weight_decay = 0.5;
  OK(dc_adamw_set_group(a.optimizer, 1, &o));
  OK(dc_optimizer_set_lr(a.optimizer, 0, 0));
  OK(dc_optimizer_set_lr(a.optimizer, 1, 0.5));
  add(&a, 0, 5, 0, 5);
  add(&a, 1, 5, 0, 5);
  o.amsgrad = 1;
  OK(dc_adamw_set_group(a.optimizer, 1, &o)); /* allowed, since there is no state yet */
  o.amsgrad = 0;
  OK(dc_adamw_set_group(a.optimizer, 1, &o));
  float before[5];
  memcpy(before, a.weight[0], sizeof before);
  float second = a.weight[1][0];
  a.grad[1][0] = 0;
  OK(step(&a));
  assert_memory_equal(a.weight[0], before, sizeof before); /* lr = 0 */
  assert_true(a.weight[1][0] == 0.75f * second);           /* only weight decay */
  o.amsgrad = 1;                                           /* would need state that this group's parameters lack */
  FAILS(dc_adamw_set_group(a.optimizer, 1, &o), DC_E_INVALID, "group 1 has a state: amsgrad must stay as it is");
  dc_optimizer_destroy(a.optimizer);
}

static void test_skipped_and_empty(void **state) {
  (void)state;
  make_adamw(&a, NULL);
  add(&a, 0, 3, 0, 3);
  add(&a, 0, 0, 0, 0);
  add(&a, 0, 10, 10, 0);
  add(&a, 0, 1, 0, 1);
  a.weights[1].data = a.grads[1].data = NULL;
  fill_grads(&a, 1, 0);
  const dc_tensor grad = a.grads[0], none = DC_TENSOR_INIT;
  float before[3];
  memcpy(before, a.weight[0], sizeof before);
  a.grads[0] = none;
  OK(step(&a));
  assert_memory_equal(a.weight[0], before, sizeof before);
  assert_true(piece(&a, 0, "exp_avg")[0] == 0);
  a.grads[0] = grad;
  OK(step(&a));
  /* A parameter's first step has length lr, even if it comes late. */
  assert_true(fabs(fabs((double)(a.weight[0][0] - before[0])) - 1e-3) < 1e-6);
  dc_tensor view = DC_TENSOR_INIT;
  for (int64_t i = 0; i < 4; i++) {
    OK(dc_optimizer_get_state(a.optimizer, i, "step", &view));
    assert_int_equal(view.ndim, 0);
    assert_int_equal(*(int64_t *)view.data, i == 0 ? 1 : 2);
  }
  assert_int_equal(steps_of(a.optimizer), 2);
  dc_optimizer_destroy(a.optimizer);
}

/* ---- gradients that are not finite ---- */

static void test_44_not_finite(void **state) {
  (void)state;
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  dc_adamw_options o = DC_ADAMW_OPTIONS_INIT;
  o.check_finite = 1;
  make_adamw(&a, &o);
  add(&a, 0, 100, 0, 100);
  add(&a, 0, 30000, 0, 30000);
  fill_grads(&a, 1, 0);
  OK(step(&a));
  memcpy(b.weight, a.weight, sizeof a.weight);
  float m = piece(&a, 0, "exp_avg")[3];
  for (int i = 0; i < 3; i++) {
    a.grad[1][29999] = bad[i];
    FAILS(step(&a), DC_E_NOT_FINITE, "grads[1]");
    assert_memory_equal(a.weight, b.weight, sizeof a.weight);
    assert_true(piece(&a, 0, "exp_avg")[3] == m);
    assert_int_equal(steps_of(a.optimizer), 1);
  }
  a.grad[1][29999] = 3e38f;
  FAILS(dc_optimizer_step(a.optimizer, a.weights, a.grads, sizeof(dc_tensor), 2, 2), DC_E_NOT_FINITE, "grads[1]");
  a.grad[0][99] = NAN; /* the first such parameter is named */
  FAILS(step(&a), DC_E_NOT_FINITE, "grads[0]");
  fill_grads(&a, 2, 0);
  OK(step(&a));
  dc_optimizer_destroy(a.optimizer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_43_adamw_definition),
      cmocka_unit_test(test_43_sgd_definition),
      cmocka_unit_test(test_parts),
      cmocka_unit_test(test_any_address),
      cmocka_unit_test(test_master),
      cmocka_unit_test(test_groups),
      cmocka_unit_test(test_skipped_and_empty),
      cmocka_unit_test(test_44_not_finite),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
