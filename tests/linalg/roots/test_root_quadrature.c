/* Inverse roots without a decomposition: the sum of fractions behind them, and the result for spectra of all kinds, at
 * all sizes around a panel's. Also the matrices that are left to the eigensolver. */
#include "linalg/eigh/eigh.h"
#include "linalg_test.h"

/* second-order: 18 */
static void test_fractions(void **state) {
  (void)state;
  double shifts[DC__TRIDIAGONAL_SHIFTS], weights[DC__TRIDIAGONAL_SHIFTS];
  for (int32_t root = 1; root <= DC__MAX_QUADRATURE_ROOT; root++) {
    dc__quadrature_rule rule = {0};
    dc__quadrature_init(&rule, root);
    for (double least = 1; least >= 1e-12; least /= 8) {
      dc__quadrature_partial_fractions(&rule, least, shifts, weights);
      for (int step = 0; step <= 50; step++) {
        double x = pow(least, step / 50.0);
        double sum = 0;
        for (int64_t k = 0; k < DC__TRIDIAGONAL_SHIFTS; k++) {
          assert_true(weights[k] >= 0 && shifts[k] >= 0);
          sum += weights[k] / (shifts[k] + x);
        }
        double error = fabs(sum * pow(x, 1.0 / root) - 1);
        if (!(error <= (least >= 1e-10 ? 1e-12 : 2e-11))) {
          fail_msg("root %d, least %g, x %g: relative error %g", (int)root, least, x, error);
        }
      }
    }
  }
}

/* |X^p A - I| for the computed root of A, whose spectrum is the first n of values. */
static void check_root(int64_t n, const double *values, int32_t root, double tolerance) {
  size_t bytes = (size_t)(n * n) * sizeof(double);
  double *a = malloc(bytes), *x = malloc(bytes), *power = malloc(bytes), *next = malloc(bytes);
  with_spectrum(a, n, values, (uint64_t)n);
  dc_tensor ta = matrix(a, DC_FLOAT64, n, n), tx = matrix(x, DC_FLOAT64, n, n);
  dc_spectral_options o = DC_SPECTRAL_OPTIONS_INIT;
  dc_spectral_info info;
  OK(dc_matrix_inverse_root(linalg, &ta, root, &o, NULL, &tx, &info, sizeof info));
  assert_int_equal(info.path, DC_PATH_FRESH);
  double least = INFINITY, max_value = 0;
  for (int64_t i = 0; i < n; i++) {
    least = fmin(least, values[i]);
    max_value = fmax(max_value, values[i]);
  }
  assert_true(fabs(info.smallest - least) <= 1e-13 * max_value && fabs(info.largest - max_value) <= 1e-13 * max_value);
  memcpy(power, a, bytes);
  for (int32_t p = 0; p < root; p++) {
    multiply(x, power, next, n, n, n);
    double *swap = power;
    power = next;
    next = swap;
  }
  for (int64_t i = 0; i < n; i++) {
    power[i * n + i] -= 1;
    for (int64_t j = 0; j < n; j++) {
      assert_true(x[i * n + j] == x[j * n + i]);
    }
  }
  memset(next, 0, bytes);
  double gap = largest_gap(power, next, n * n);
  if (!(gap <= tolerance * max_value / least)) {
    fail_msg("n %d, root %d: |X^p A - I| is %g", (int)n, (int)root, gap);
  }
  free(a);
  free(x);
  free(power);
  free(next);
}

/* second-order: 1, 18 */
static void test_sizes(void **state) {
  (void)state;
  const int64_t sizes[] = {1, 2, 3, 7, 8, 9, 16, 17, 18, 33, 48, 49, 50, 97, 129, 130, 200, 257};
  for (size_t s = 0; s < DC__COUNT(sizes); s++) {
    int64_t n = sizes[s];
    double values[300];
    for (int64_t i = 0; i < n; i++) {
      values[i] = pow(10, -3.0 * (double)i / (double)n);
    }
    check_root(n, values, 4, 1e-13);
  }
}

/* second-order: 1, 18 */
static void test_spectra(void **state) {
  (void)state;
  enum { N = 60 };
  for (int kind = 0; kind < 6; kind++) {
    double values[N];
    for (int64_t i = 0; i < N; i++) {
      const double all[] = {1,
                            (double)(1 + i / 8),
                            i == 0 ? 1e6 : 1,
                            i < 5 ? 1 : 1e-6,
                            1e300 / (double)(1 + i),
                            1e-200 * (double)(1 + i)};
      values[i] = all[kind];
    }
    for (int32_t root = 1; root <= 8; root++) {
      check_root(N, values, root, 1e-13);
    }
  }
}

/* A matrix of rank 3 whose other eigenvalues rounding to float32 has made negative: they count as zero, as defined. */
static void test_negative_rounding(void **state) {
  (void)state;
  enum { N = 50 };
  double values[N] = {0}, wide[N * N], want[N * N], x[N * N];
  float a[N * N];
  values[0] = 1;
  values[1] = 0.5;
  values[2] = 0.25;
  with_spectrum(wide, N, values, 3);
  for (int64_t i = 0; i < N * N; i++) {
    a[i] = (float)wide[i];
    wide[i] = (double)a[i];
  }
  double vectors[N * N], scaled[N * N];
  dc_tensor ta = matrix(wide, DC_FLOAT64, N, N), tw = vector(values, DC_FLOAT64, N);
  dc_tensor tv = matrix(vectors, DC_FLOAT64, N, N);
  OK(dc_eigh(linalg, &ta, NULL, &tw, &tv, NULL, 0));
  assert_true(values[0] < -1e-10);
  for (int64_t i = 0; i < N; i++) {
    for (int64_t j = 0; j < N; j++) {
      scaled[j * N + i] = vectors[i * N + j] * pow(fmax(values[j], 0) + 1e-8, -0.25);
    }
  }
  multiply(vectors, scaled, want, N, N, N);
  dc_spectral_options o = DC_SPECTRAL_OPTIONS_INIT;
  o.eps_abs = 1e-8;
  o.precision = DC_FLOAT64;
  float narrow[N * N];
  dc_tensor tf = matrix(a, DC_FLOAT32, N, N), tx = matrix(narrow, DC_FLOAT32, N, N);
  OK(dc_matrix_inverse_root(linalg, &tf, 4, &o, NULL, &tx, NULL, 0));
  for (int64_t i = 0; i < N * N; i++) {
    x[i] = (double)narrow[i];
  }
  assert_true(largest_gap(x, want, N * N) <= 1e-5);
}

/* One matrix at a time on two threads, several at once, and on one thread: the bits are the same. */
static void check_threads(int32_t dtype) {
  enum { N = 150, COUNT = 3 };
  size_t bytes = N * N * dc_dtype_size(dtype);
  double *wide = malloc(N * N * sizeof *wide);
  char *a = malloc(COUNT * bytes), *x = malloc(2 * COUNT * bytes);
  double values[N];
  for (int64_t m = 0; m < COUNT; m++) {
    for (int64_t i = 0; i < N; i++) {
      values[i] = (double)(1 + (i + m) % 7);
    }
    with_spectrum(wide, N, values, (uint64_t)m);
    dc__cast(a + (size_t)m * bytes, dtype, wide, DC_FLOAT64, N * N);
  }
  dc_linalg *one = open_linalg(1, 0);
  dc_tensor ta = batch(a, dtype, COUNT, N, N), tx = batch(x, dtype, COUNT, N, N);
  OK(dc_matrix_inverse_root(linalg, &ta, 2, NULL, NULL, &tx, NULL, 0));
  for (int64_t m = 0; m < COUNT; m++) {
    dc_tensor tm = matrix(a + (size_t)m * bytes, dtype, N, N);
    dc_tensor to = matrix(x + (size_t)(COUNT + m) * bytes, dtype, N, N);
    OK(dc_matrix_inverse_root(m == 0 ? one : linalg, &tm, 2, NULL, NULL, &to, NULL, 0));
  }
  assert_memory_equal(x, x + COUNT * bytes, COUNT * bytes);
  dc_linalg_destroy(one);
  free(wide);
  free(a);
  free(x);
}

static void test_threads(void **state) {
  (void)state;
  check_threads(DC_FLOAT64);
  check_threads(DC_FLOAT32);
}

/* second-order: 18 */
/* The back-transformation in float32 loses little. It is in float64 if that is requested, or if the root's eigenvalues
 * are far apart. */
static void test_narrow(void **state) {
  (void)state;
  enum { N = 130 };
  double values[N], wide[N * N], want[N * N];
  float a[N * N], x[N * N];
  for (int far = 0; far < 2; far++) {
    for (int64_t i = 0; i < N; i++) {
      values[i] = pow(far ? 1e-4 : 1e-3, (double)i / (N - 1));
    }
    with_spectrum(wide, N, values, 9);
    dc__cast(a, DC_FLOAT32, wide, DC_FLOAT64, N * N);
    dc__cast(wide, DC_FLOAT64, a, DC_FLOAT32, N * N);
    dc_tensor tw = matrix(wide, DC_FLOAT64, N, N), twant = matrix(want, DC_FLOAT64, N, N);
    dc_tensor ta = matrix(a, DC_FLOAT32, N, N), tx = matrix(x, DC_FLOAT32, N, N);
    dc_spectral_options o = DC_SPECTRAL_OPTIONS_INIT;
    o.symmetry = DC_SYMMETRY_LOWER;
    OK(dc_matrix_inverse_root(linalg, &tw, 2, &o, NULL, &twant, NULL, 0));
    for (o.precision = DC_DTYPE_NONE;; o.precision = DC_FLOAT64) {
      OK(dc_matrix_inverse_root(linalg, &ta, 2, &o, NULL, &tx, NULL, 0));
      double apart = 0, norm = 0;
      for (int64_t i = 0; i < N * N; i++) {
        apart += pow((double)x[i] - want[i], 2);
        norm += pow(want[i], 2);
      }
      double error = sqrt(apart / norm);
      bool narrow = o.precision == DC_DTYPE_NONE && far == 0;
      assert_true(narrow ? error > 1e-7 && error < 1.5e-6 : error < 6e-8);
      if (o.precision == DC_FLOAT64) {
        break;
      }
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_fractions),         cmocka_unit_test(test_sizes),   cmocka_unit_test(test_spectra),
      cmocka_unit_test(test_negative_rounding), cmocka_unit_test(test_threads), cmocka_unit_test(test_narrow),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
