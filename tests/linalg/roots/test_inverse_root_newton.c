/* Inverse roots computed only with products: points 17 and 18 of the second-order conformance list. */
#include "linalg_test.h"

enum { N = 48 };

static dc_iteration_options with_eps(double eps_rel) {
  dc_iteration_options o = DC_ITERATION_OPTIONS_INIT;
  o.eps_rel = eps_rel;
  return o;
}

/* Spectra whose smallest eigenvalues are near zero or zero. */
static void spectrum(int kind, double *a) {
  double values[N];
  for (int64_t i = 0; i < N; i++) {
    const double all[] = {pow(10, -8.0 * (double)i / N), pow((double)(i + 1), -2), i < N / 8 ? 1 : 0,
                          (double)(i / 8 + 1), 1};
    values[i] = all[kind];
  }
  with_spectrum(a, N, values, 17);
}

/* The root by eigenvectors in float64, with the iteration's epsilon. */
static void oracle(const double *a, int32_t root, double epsilon, double *x) {
  dc_spectral_options o = DC_SPECTRAL_OPTIONS_INIT;
  o.eps_abs = epsilon;
  dc_tensor ta = matrix((void *)(uintptr_t)a, DC_FLOAT64, N, N), tx = matrix(x, DC_FLOAT64, N, N);
  OK(dc_matrix_power(linalg, &ta, -1 / (double)root, &o, &tx, NULL, 0));
}

static double relative(const double *x, const double *want) {
  double apart = 0, whole = 0;
  for (int64_t i = 0; i < N * N; i++) {
    apart += (x[i] - want[i]) * (x[i] - want[i]);
    whole += want[i] * want[i];
  }
  return sqrt(apart / whole);
}

static void test_17_18_newton_is_the_root(void **state) {
  (void)state;
  double a[N * N], x[N * N], want[N * N];
  float narrow[N * N], root[N * N];
  dc_tensor ta = matrix(a, DC_FLOAT64, N, N), tx = matrix(x, DC_FLOAT64, N, N), tn = matrix(narrow, DC_FLOAT32, N, N),
            tr = matrix(root, DC_FLOAT32, N, N);
  const int32_t roots[] = {1, 2, 3, 4, 8};
  for (int kind = 0; kind < 5; kind++) {
    spectrum(kind, a);
    for (int64_t i = 0; i < N * N; i++) {
      narrow[i] = (float)a[i];
    }
    for (size_t r = 0; r < 5; r++) {
      dc_iteration_info info = {0};
      dc_iteration_options o = with_eps(1e-6);
      OK(dc_matrix_inverse_root_newton(linalg, &ta, roots[r], &o, &tx, &info, sizeof info));
      assert_true(info.iterations >= 2 && info.iterations <= 40 && info.status == DC_OK);
      assert_true(info.residual <= 16 * 2.3e-16 * (info.bound + info.epsilon) / info.epsilon * 1.01);
      oracle(a, roots[r], info.epsilon, want);
      assert_true(relative(x, want) < 1e-9);
      o = with_eps(1e-3); /* float32 has enough digits for it */
      OK(dc_matrix_inverse_root_newton(linalg, &tn, roots[r], &o, &tr, &info, sizeof info));
      oracle(a, roots[r], info.epsilon, want);
      for (int64_t i = 0; i < N * N; i++) {
        x[i] = (double)root[i];
      }
      assert_true(relative(x, want) < 2e-4);
    }
  }
}

/* An epsilon far below a well-conditioned matrix's rounding error costs no digits. An eigenvalue that small still has
 * its root. */
static void test_tiny_epsilons(void **state) {
  (void)state;
  double a[N * N], x[N * N], want[N * N], values[N];
  float narrow[N * N], root[N * N], apart[4] = {1, 0, 0, 1e-20f}, roots[4];
  dc_tensor tn = matrix(narrow, DC_FLOAT32, N, N), tr = matrix(root, DC_FLOAT32, N, N),
            td = matrix(apart, DC_FLOAT32, 2, 2), ts = matrix(roots, DC_FLOAT32, 2, 2);
  dc_iteration_options o = with_eps(1e-30);
  for (int64_t i = 0; i < N; i++) {
    values[i] = pow(10, -(double)i / (N - 1));
  }
  with_spectrum(a, N, values, 17);
  for (int64_t i = 0; i < N * N; i++) {
    narrow[i] = (float)a[i];
  }
  for (int32_t r = 1; r <= 8; r *= 2) {
    OK(dc_matrix_inverse_root_newton(linalg, &tn, r, &o, &tr, NULL, 0));
    oracle(a, r, 0, want);
    for (int64_t i = 0; i < N * N; i++) {
      x[i] = (double)root[i];
    }
    assert_true(relative(x, want) < 1e-5);
    OK(dc_matrix_inverse_root_newton(linalg, &td, r, &o, &ts, NULL, 0));
    assert_true(fabs((double)roots[3] / pow(1e-20, -1 / (double)r) - 1) < 1e-4 && fabs((double)roots[0] - 1) < 1e-4);
  }
}

static void test_17_what_does_not_converge(void **state) {
  (void)state;
  double a[N * N], x[N * N], best[N * N], values[N];
  dc_tensor ta = matrix(a, DC_FLOAT64, N, N), tx = matrix(x, DC_FLOAT64, N, N), tb = matrix(best, DC_FLOAT64, N, N);
  dc_iteration_info info = {0}, all = {0};
  spectrum(0, a);
  dc_iteration_options o = with_eps(1e-6);
  OK(dc_matrix_inverse_root_newton(linalg, &ta, 4, &o, &tx, &all, sizeof all));
  double before = 2;
  for (int32_t most = 1; most < all.iterations - 2; most++) { /* too few: returns the best so far, closer each time */
    o.iterations = most;
    FAILS(dc_matrix_inverse_root_newton(linalg, &ta, 4, &o, &tb, &info, sizeof info), DC_E_NOT_CONVERGED,
          most == 1 ? "after 1 iteration |X^4 (A + epsilon I) - I| is" : "iterations |X^4 (A + epsilon I) - I| is");
    assert_int_equal(info.iterations, most);
    double now = relative(best, x);
    assert_true(now < before);
    before = now;
  }
  o.iterations = 0;
  o.residual = all.residual / 4; /* rounding does not allow this residual */
  FAILS(dc_matrix_inverse_root_newton(linalg, &ta, 4, &o, &tb, &info, sizeof info), DC_E_NOT_CONVERGED, "is");
  assert_memory_equal(best, x, sizeof x);
  for (int64_t i = 0; i < N; i++) { /* a negative eigenvalue: it stops when the distance grows by more than a fifth */
    values[i] = i == 5 ? -0.1 : 1;
  }
  with_spectrum(a, N, values, 3);
  o.residual = 0;
  FAILS(dc_matrix_inverse_root_newton(linalg, &ta, 4, &o, &tb, &info, sizeof info), DC_E_NOT_CONVERGED,
        "positive semidefinite?");
  assert_true(info.iterations < 10);
  for (int64_t i = 0; i < N * N; i++) {
    assert_true(isfinite(best[i]));
  }
}

/* One bad matrix in a batch. The bits of the others are the same alone, in a batch, and with any number of threads. */
static void test_17_batches(void **state) {
  (void)state;
  enum { COUNT = 4 };
  double *a = calloc(COUNT * N * N, sizeof *a), *x = calloc(COUNT * N * N, sizeof *x), alone[N * N];
  dc_iteration_info info[COUNT];
  for (int kind = 0; kind < COUNT; kind++) {
    spectrum(kind, a + kind * N * N);
  }
  a[N * N + 5] = NAN;
  dc_tensor ta = batch(a, DC_FLOAT64, COUNT, N, N), tx = batch(x, DC_FLOAT64, COUNT, N, N);
  dc_iteration_options o = with_eps(1e-4);
  FAILS(dc_matrix_inverse_root_newton(linalg, &ta, 4, &o, &tx, info, sizeof info[0]), DC_E_NOT_FINITE, "a[1]");
  assert_true(x[N * N] == 0 && info[1].status == DC_E_NOT_FINITE);
  dc_linalg *five = open_linalg(5, 0);
  for (int i = 0; i < COUNT; i++) {
    dc_tensor one = matrix(a + i * N * N, DC_FLOAT64, N, N), to = matrix(alone, DC_FLOAT64, N, N);
    if (i != 1) {
      assert_int_equal(info[i].status, DC_OK);
      OK(dc_matrix_inverse_root_newton(five, &one, 4, &o, &to, NULL, 0));
      assert_memory_equal(alone, x + i * N * N, sizeof alone);
    }
  }
  dc_linalg_destroy(five);
  dc_tensor first = matrix(a, DC_FLOAT64, N, N), to = matrix(alone, DC_FLOAT64, N, N);
  dc_iteration_options none = DC_ITERATION_OPTIONS_INIT;
  FAILS(dc_matrix_inverse_root_newton(linalg, &first, 4, &none, &to, NULL, 0), DC_E_INVALID, "one must be > 0");
  FAILS(dc_matrix_inverse_root_newton(linalg, &first, 4, NULL, &to, NULL, 0), DC_E_INVALID, "one must be > 0");
  FAILS(dc_matrix_inverse_root_newton(linalg, &first, 0, &o, &to, NULL, 0), DC_E_INVALID, "root = 0");
  FAILS(dc_matrix_inverse_root_newton(linalg, &first, 4, &o, &to, info, 8), DC_E_INVALID, "info_size = 8");
  o.iterations = -1;
  FAILS(dc_matrix_inverse_root_newton(linalg, &first, 4, &o, &to, NULL, 0), DC_E_INVALID, "options.iterations = -1");
  memset(a, 0, N * N * sizeof *a); /* zeros: a relative epsilon adds nothing */
  o = with_eps(1e-4);
  FAILS(dc_matrix_inverse_root_newton(linalg, &first, 4, &o, &to, NULL, 0), DC_E_NOT_POSITIVE, "eigenvalue of zero");
  o.eps_abs = 1e-8;
  OK(dc_matrix_inverse_root_newton(linalg, &first, 4, &o, &to, NULL, 0));
  assert_true(fabs(alone[0] - 100) < 1e-10 && alone[1] == 0);
  free(a);
  free(x);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_17_18_newton_is_the_root),
      cmocka_unit_test(test_tiny_epsilons),
      cmocka_unit_test(test_17_what_does_not_converge),
      cmocka_unit_test(test_17_batches),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
