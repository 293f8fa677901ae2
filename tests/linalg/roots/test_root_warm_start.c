/* Inverse roots from an earlier basis: point 21 of the second-order conformance list. */
#include "eigh_test.h"

/* The tolerance alone decides whether an earlier matrix's basis is accepted; the root is right either way. */
static void test_21_warm_start(void **state) {
  (void)state;
  double a[N * N], changed[N * N], basis[N * N] = {0}, kept[N * N], x[N * N], fresh[N * N];
  spread_spectrum(a, N, 21);
  dc_tensor ta = matrix(a, DC_FLOAT64, N, N), tb = matrix(basis, DC_FLOAT64, N, N), tx = matrix(x, DC_FLOAT64, N, N),
            tc = matrix(changed, DC_FLOAT64, N, N), tf = matrix(fresh, DC_FLOAT64, N, N);
  dc_spectral_options o = defaults();
  dc_spectral_info info = {0};
  o.tolerance = 1e-2; /* the basis is zero and not orthonormal, so it is rejected */
  OK(dc_matrix_inverse_root(linalg, &ta, 4, &o, &tb, &tx, &info, sizeof info));
  assert_int_not_equal(info.path, DC_PATH_WARM);
  memcpy(kept, basis, sizeof basis);
  double previous = 0;
  for (int step = 1; step <= 6; step++) { /* A + t G with growing t: the criterion grows, the error below it */
    double *g = doubles(N * N, 99), t = pow(10, step - 7);
    for (int64_t i = 0; i < N * N; i++) {
      double sum = 0;
      for (int64_t k = 0; k < N; k++) {
        sum += g[i / N * N + k] * g[i % N * N + k];
      }
      changed[i] = a[i] + t * sum * 1e-4;
    }
    free(g);
    memcpy(basis, kept, sizeof basis);
    o.tolerance = 1e300;
    OK(dc_matrix_inverse_root(linalg, &tc, 4, &o, &tb, &tx, &info, sizeof info));
    assert_int_equal(info.path, DC_PATH_WARM);
    assert_memory_equal(basis, kept, sizeof basis);
    OK(dc_matrix_power(linalg, &tc, -0.25, NULL, &tf, NULL, 0));
    double largest = 0;
    for (int64_t i = 0; i < N * N; i++) {
      largest = fmax(largest, fabs(fresh[i]));
    }
    assert_true(largest_gap(x, fresh, N * N) <= largest * (info.change + 1e-10));
    assert_true(info.change > previous);
    previous = info.change;
    o.tolerance = info.change / 2;
    OK(dc_matrix_inverse_root(linalg, &tc, 4, &o, &tb, &tx, &info, sizeof info));
    assert_int_not_equal(info.path, DC_PATH_WARM);
    assert_true(largest_gap(x, fresh, N * N) <= largest * 1e-10);
  }
  FAILS(dc_matrix_inverse_root(linalg, &tc, 4, &o, NULL, &tx, NULL, 0), DC_E_INVALID, "needs a basis");
  FAILS(dc_matrix_inverse_root(linalg, &tc, 0, NULL, NULL, &tx, NULL, 0), DC_E_INVALID, "root = 0");
  FAILS(dc_matrix_inverse_root(linalg, &tc, 65, NULL, NULL, &tx, NULL, 0), DC_E_INVALID, "root = 65");
  o.precision = DC_FLOAT32;
  FAILS(dc_matrix_inverse_root(linalg, &tc, 4, &o, &tb, &tx, NULL, 0), DC_E_DTYPE, "basis is float64");
}

/* An inverse overflows float32, though the matrix has a float64 basis. The other matrix of the batch gets a new
 * basis. */
static void test_a_result_that_does_not_fit_leaves_the_basis(void **state) {
  (void)state;
  float a[8] = {2, 1, 1, 2, 2e-40f, 1e-40f, 1e-40f, 2e-40f}, x[8];
  double basis[8];
  dc_spectral_info info[2] = {{0}};
  dc_tensor ta = batch(a, DC_FLOAT32, 2, 2, 2), tb = batch(basis, DC_FLOAT64, 2, 2, 2),
            tx = batch(x, DC_FLOAT32, 2, 2, 2);
  for (int i = 0; i < 8; i++) {
    x[i] = 7;
    basis[i] = 7;
  }
  FAILS(dc_matrix_inverse_root(linalg, &ta, 1, NULL, &tb, &tx, info, sizeof info[0]), DC_E_NOT_FINITE,
        "the result for a[1] does not fit float32");
  assert_int_equal(info[0].status, DC_OK);
  for (int i = 0; i < 4; i++) {
    assert_true(fabs(fabs(basis[i]) - sqrt(0.5)) < 1e-12 && fabs((double)x[i] - (i % 3 == 0 ? 2 : -1) / 3.0) < 1e-6);
    assert_true(basis[4 + i] == 7 && x[4 + i] == 7);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_21_warm_start),
      cmocka_unit_test(test_a_result_that_does_not_fit_leaves_the_basis),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
