/* Floating-point exceptions trap in this process (traps_on.c), as in hosts of Free Pascal. Documented infinities and
 * NaN must not end it, the caller's environment is restored after each call, and the library's threads have no
 * traps. */
#define _GNU_SOURCE
#include <fenv.h>

#include "layer.h"

enum { N = 8 };

static dc_device *device;
static dc_linalg *linalg;
static double a[N * N], out[N * N];
static float weight[N * N], grad[N * N];
static const int64_t square[2] = {N, N}, side = N;

static int traps(void) {
  return fegetexcept();
}

/* After a call the same traps are set, and no exception is flagged that would trap. */
#define KEPT(call)                                                                             \
  do {                                                                                         \
    const int set = traps();                                                                   \
    feclearexcept(FE_ALL_EXCEPT);                                                              \
    call;                                                                                      \
    assert_int_equal(traps(), set);                                                            \
    assert_int_equal(set == 0 ? 0 : fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW), 0); \
  } while (0)

static dc_tensor matrix(void *data, int32_t dtype) {
  dc_tensor t = DC_TENSOR_INIT;
  t.data = data;
  t.shape = square;
  t.ndim = 2;
  t.dtype = dtype;
  return t;
}

static int set_up(void **state) {
  (void)state;
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  options.threads = 2;
  return dc_device_open("cpu", NULL, &device) != DC_OK || dc_linalg_create(device, &options, &linalg) != DC_OK;
}

static int tear_down(void **state) {
  (void)state;
  dc_linalg_destroy(linalg);
  dc_device_destroy(device);
  return 0;
}

/* ---- the caller's traps and the library's ---- */

static void note(void *user) {
  *(int *)user = traps();
}

static void test_functions_of_the_caller_see_none(void **state) {
  (void)state;
  dc_stream *stream;
  const int before = traps();
  int here = -1, there = -1;
  OK(dc_stream_create(device, &stream));
  KEPT(dc_stream_call(NULL, note, &here));
  KEPT(dc_stream_call(stream, note, &there));
  OK(dc_stream_synchronize(stream, 0));
  dc_stream_destroy(stream);
  assert_int_equal(here, 0);
  assert_int_equal(there, 0);
  assert_int_equal(traps(), before);
}

/* Exception flags that the caller has set stay set, and so does its rounding mode. */
static void test_the_environment_is_kept(void **state) {
  (void)state;
  dc_tensor ta = matrix(a, DC_FLOAT64), to = matrix(out, DC_FLOAT64);
  a[3] = (double)NAN;
  fesetround(FE_DOWNWARD);
  feclearexcept(FE_ALL_EXCEPT);
  feraiseexcept(FE_INEXACT);
  assert_int_equal(dc_orthogonalize(linalg, &ta, 0, 0, &to), DC_E_NOT_FINITE);
  assert_int_equal(fetestexcept(FE_INEXACT), FE_INEXACT);
  assert_int_equal(fegetround(), FE_DOWNWARD);
  fesetround(FE_TONEAREST);
  a[3] = 0;
}

/* ---- infinities and NaN ---- */

static void test_matrices(void **state) {
  (void)state;
  static const double values[] = {NAN, INFINITY, -INFINITY, 1e308, -1, 0};
  dc_tensor ta = matrix(a, DC_FLOAT64), to = matrix(out, DC_FLOAT64),
            te = {sizeof te, out, &side, NULL, 1, DC_FLOAT64, NULL};
  for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
    memset(a, 0, sizeof a);
    a[0] = a[N + 1] = values[i];
    a[N * N - 1] = 1e308;
    double residual;
    KEPT(dc_eigh(linalg, &ta, NULL, &te, NULL, NULL, 0));
    KEPT(dc_matrix_power(linalg, &ta, 0.5, NULL, &to, NULL, 0));
    KEPT(dc_matrix_power(linalg, &ta, values[i], NULL, &to, NULL, 0));
    KEPT(dc_matrix_inverse_root(linalg, &ta, 4, NULL, NULL, &to, NULL, 0));
    KEPT(dc_matrix_inverse_root_newton(linalg, &ta, 4, NULL, &to, NULL, 0));
    KEPT(dc_orthogonalize(linalg, &ta, 0, 0, &to));
    KEPT(dc_kron_apply(linalg, &ta, &ta, &ta, &to));
    KEPT(dc_kron_solve(linalg, &ta, &te, &ta, &te, values[i], &ta, &to));
    KEPT(dc_batch_matmul(linalg, &ta, &ta, values[i], 1, &to));
    double small[4];
    const int64_t two[2] = {2, 2}, four[2] = {N / 2, N / 2};
    dc_tensor ts = {.struct_size = sizeof ts, .data = small, .shape = two, .ndim = 2, .dtype = DC_FLOAT64};
    dc_tensor tf = {.struct_size = sizeof tf, .data = out, .shape = four, .ndim = 2, .dtype = DC_FLOAT64};
    KEPT(dc_kron_nearest(linalg, &ta, &tf, &ts, &residual));
  }
}

/* Makes an optimizer of each kind, with one option set to `value`. */
static dc_status make_optimizer(int kind, double value, dc_optimizer **optimizer) {
  dc_adamw_options adamw = DC_ADAMW_OPTIONS_INIT;
  dc_sgd_options sgd = DC_SGD_OPTIONS_INIT;
  dc_muon_options muon = DC_MUON_OPTIONS_INIT;
  dc_shampoo_options shampoo = DC_SHAMPOO_OPTIONS_INIT;
  dc_soap_options soap = DC_SOAP_OPTIONS_INIT;
  dc_kfac_options kfac = DC_KFAC_OPTIONS_INIT;
  adamw.beta1 = sgd.momentum = muon.momentum = shampoo.beta1 = soap.beta1 = kfac.momentum = value;
  adamw.eps = -1; /* 0 / 0 where a gradient is 0 */
  switch (kind) {
    case 0:
      return dc_adamw_create(linalg, &adamw, optimizer);
    case 1:
      return dc_sgd_create(linalg, &sgd, optimizer);
    case 2:
      return dc_muon_create(linalg, NULL, &muon, optimizer);
    case 3:
      return dc_shampoo_create(linalg, NULL, &shampoo, optimizer);
    case 4:
      return dc_soap_create(linalg, NULL, &soap, optimizer);
    default:
      return dc_kfac_create(linalg, NULL, &kfac, optimizer);
  }
}

static void test_optimizers(void **state) {
  (void)state;
  static const float values[] = {0, NAN, INFINITY, 3e38f, 1e-40f};
  dc_tensor w = matrix(weight, DC_FLOAT32), g = matrix(grad, DC_FLOAT32);
  for (int kind = 0; kind < 6; kind++) {
    dc_optimizer *optimizer;
    KEPT(make_optimizer(kind, (double)NAN, &optimizer));
    assert_null(optimizer);
    OK(make_optimizer(kind, 0.5, &optimizer));
    OK(dc_optimizer_add_param(optimizer, 0, square, 2, 0, N * N, DC_FLOAT32, NULL));
    KEPT(dc_optimizer_set_lr(optimizer, 0, (double)NAN));
    KEPT(dc_optimizer_step(optimizer, &w, &g, sizeof w, 1, (double)NAN));
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
      memset(grad, 0, sizeof grad);
      grad[5] = values[i];
      KEPT(dc_optimizer_step(optimizer, &w, &g, sizeof w, 1, 2));
    }
    dc_optimizer_destroy(optimizer);
  }
}

/* Masks of -infinity on some or all keys, finite masks that absorb all scores, and inputs that overflow. */
static void test_the_layer(void **state) {
  (void)state;
  static const float masks[] = {-INFINITY, -3.4e38f, -1e4f, NAN};
  static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT16, DC_BFLOAT16};
  for (size_t i = 0; i < 3 * sizeof masks / sizeof *masks; i++) {
    dc_layer_config c = small_config();
    c.dtype = dtypes[i % 3];
    c.normalize_invertible = 1;
    rig r = make_rig(c, 2, 19);
    bind_rig(&r);
    float mask[2 * 19] = {0};
    const int64_t shape[2] = {2, 19};
    dc_tensor m = {.struct_size = sizeof m, .data = mask, .shape = shape, .ndim = 2, .dtype = DC_FLOAT32};
    for (int j = 0; j < 19; j++) {
      mask[j / 3 * 3] = mask[19 + j] = masks[i / 3];
    }
    r.call.mask = &m;
    KEPT(forward(&r));
    KEPT(backward(&r));
    memset(r.x.t.data, 0x7b, r.x.bytes); /* near the largest number of the type */
    KEPT(forward(&r));
    KEPT(backward(&r));
    free_rig(&r);
  }
  dc_layer *layer;
  dc_layer_config c = small_config();
  c.hidden_dropout_ratio = (double)NAN;
  KEPT(dc_layer_create(device, &c, &layer));
  assert_null(layer);
}

/* Gradients that are not finite, and numbers that overflow the bucket's type. */
static void test_gradients(void **state) {
  (void)state;
  dc_context *context;
  dc_config config = DC_CONFIG_INIT;
  config.check_finite = 1;
  float shard[N] = {1e30f, NAN}, sum[N], value[N] = {1e30f, INFINITY, NAN};
  const int64_t id = 1;
  dc_tensor s = {.struct_size = sizeof s, .data = shard, .shape = &side, .ndim = 1, .dtype = DC_FLOAT32}, t = s, g = s,
            full = DC_TENSOR_INIT;
  t.data = sum;
  g.data = value;
  OK(dc_context_create(device, NULL, &context));
  KEPT(dc_init(context, NULL, &config, 64));
  KEPT(dc_register_z3_param(context, id, &side, 1, &s, &t, 0, DC_FLOAT16));
  KEPT(dc_register_graph_z3(context, 1, &id, 1));
  KEPT(dc_allgather_param(context, NULL, 1, id, DC_FLOAT16, &full));
  KEPT(dc_wait_allgather(context, NULL, 1, id));
  KEPT(dc_release_param(context, NULL, 1, id, 1));
  KEPT(dc_start_backward(context, 1));
  KEPT(dc_reduce_grad(context, &g, 1, id));
  KEPT(dc_end_backward(context, 1, 0));
  int32_t finite = 1;
  OK(dc_context_grads_finite(context, &finite, NULL));
  assert_int_equal(finite, 0);
  KEPT(dc_context_destroy(context));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_functions_of_the_caller_see_none),
      cmocka_unit_test(test_the_environment_is_kept),
      cmocka_unit_test(test_matrices),
      cmocka_unit_test(test_optimizers),
      cmocka_unit_test(test_the_layer),
      cmocka_unit_test(test_gradients),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
