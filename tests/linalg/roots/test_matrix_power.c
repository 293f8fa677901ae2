/* Powers of symmetric matrices: points 6 to 8 of the second-order conformance list. */
#include "eigh_test.h"

static void test_06_powers(void **state) {
  (void)state;
  double a[N * N], x[N * N], y[N * N], again[N * N];
  spread_spectrum(a, N, 6);
  OK(power_of(a, x, N, DC_FLOAT64, 0, NULL, NULL));
  for (int64_t i = 0; i < N * N; i++) {
    assert_true(fabs(x[i] - (i % (N + 1) == 0)) < 1e-13);
  }
  OK(power_of(a, x, N, DC_FLOAT64, 2, NULL, NULL));
  multiply(a, a, y, N, N, N);
  assert_true(largest_gap(x, y, N * N) < 1e-13);
  OK(power_of(a, x, N, DC_FLOAT64, 0.7, NULL, NULL));
  OK(power_of(a, y, N, DC_FLOAT64, 0.3, NULL, NULL));
  multiply(x, y, again, N, N, N);
  assert_true(largest_gap(again, a, N * N) < 1e-13);
  FAILS(power_of(a, x, N, DC_FLOAT64, NAN, NULL, NULL), DC_E_INVALID, "power = nan");
  FAILS(power_of(a, x, N, DC_FLOAT64, INFINITY, NULL, NULL), DC_E_INVALID, "power = inf");
}

static void test_07_rank_deficient(void **state) {
  (void)state;
  double values[N] = {4, 1}, a[N * N], x[N * N], ax[N * N], axa[N * N];
  dc_spectral_options o = defaults();
  dc_spectral_info info = {0};
  with_spectrum(a, N, values, 7);
  memset(x, 0x5a, sizeof x);
  o.rank_rtol = -1;
  OK(power_of(a, x, N, DC_FLOAT64, -1, &o, &info));
  multiply(a, x, ax, N, N, N);
  multiply(ax, a, axa, N, N, N);
  assert_true(largest_gap(axa, a, N * N) < 1e-12); /* Moore-Penrose */
  o.eps_abs = 1e-6;
  FAILS(power_of(a, x, N, DC_FLOAT64, -1, &o, &info), DC_E_INVALID, "needs eps_abs = eps_rel = 0");
  o.rank_rtol = 0;
  OK(power_of(a, x, N, DC_FLOAT64, -1, &o, &info));
  assert_true(info.epsilon == 1e-6);
  double zero[4] = {0};
  FAILS(power_of(zero, x, 2, DC_FLOAT64, -1, NULL, NULL), DC_E_NOT_POSITIVE, "eigenvalue of zero");
}

static void test_08_negative_eigenvalues(void **state) {
  (void)state;
  double values[N], a[N * N], x[N * N], before[N * N];
  dc_spectral_options o = defaults();
  o.eps_rel = 1e-6;
  for (int64_t i = 0; i < N; i++) {
    values[i] = 1;
  }
  values[0] = -1e-15;
  with_spectrum(a, N, values, 8);
  OK(power_of(a, x, N, DC_FLOAT64, -0.5, &o, NULL));
  values[0] = -0.1;
  with_spectrum(a, N, values, 8);
  memcpy(before, x, sizeof x);
  FAILS(power_of(a, x, N, DC_FLOAT64, -0.5, &o, NULL), DC_E_NOT_POSITIVE, "negative eigenvalue -0.1");
  assert_memory_equal(x, before, sizeof x);
  o.negative = DC_NEGATIVE_CLAMP;
  OK(power_of(a, x, N, DC_FLOAT64, -0.5, &o, NULL));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_06_powers),
      cmocka_unit_test(test_07_rank_deficient),
      cmocka_unit_test(test_08_negative_eigenvalues),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
