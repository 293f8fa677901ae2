/* Symmetric matrices: points 1 to 5, 12, 13 and 20 of the second-order conformance list, in their order.
 * tests/python/test_linalg.py compares hard spectra with float64 and mpmath. */
#include <float.h>

#include "eigh_test.h"

/* A X^p = I, for spectra whose eigenvectors are in general position. */
static void test_01_inverse_roots(void **state) {
  (void)state;
  const int32_t roots[] = {1, 2, 3, 4, 8};
  double a[N * N], x[N * N], product[N * N], next[N * N];
  for (size_t r = 0; r < sizeof roots / sizeof roots[0]; r++) {
    spread_spectrum(a, N, r + 1);
    dc_tensor ta = matrix(a, DC_FLOAT64, N, N), tx = matrix(x, DC_FLOAT64, N, N);
    OK(dc_matrix_inverse_root(linalg, &ta, roots[r], NULL, NULL, &tx, NULL, 0));
    memcpy(product, a, sizeof a);
    for (int32_t i = 0; i < roots[r]; i++) {
      multiply(product, x, next, N, N, N);
      memcpy(product, next, sizeof next);
    }
    for (int64_t i = 0; i < N; i++) {
      product[i * N + i] -= 1;
    }
    memset(next, 0, sizeof next);
    assert_true(largest_gap(product, next, N * N) < 1e-9);
  }
}

static void test_02_closed_forms(void **state) {
  (void)state;
  double diagonal[9] = {16, 0, 0, 0, 81, 0, 0, 0, 1}, x[9];
  OK(power_of(diagonal, x, 3, DC_FLOAT64, -0.25, NULL, NULL));
  const double root[9] = {0.5, 0, 0, 0, 1.0 / 3, 0, 0, 0, 1};
  assert_true(largest_gap(x, root, 9) < 1e-14); /* a sum of 64 fractions */
  /* R diag(16, 1) R^T for the rotation by atan(3/4): (4/5, 3/5) */
  double turned[4] = {(16 * 16 + 9) / 25.0, 12 * 15 / 25.0, 12 * 15 / 25.0, (16 * 9 + 16) / 25.0};
  const double quarter[4] = {(0.5 * 16 + 9) / 25, 12 * -0.5 / 25, 12 * -0.5 / 25, (0.5 * 9 + 16) / 25};
  OK(power_of(turned, x, 2, DC_FLOAT64, -0.25, NULL, NULL));
  assert_true(largest_gap(x, quarter, 4) < 1e-14);
  /* The inverse of AR(1)'s Toeplitz matrix is tridiagonal. */
  double toeplitz[N * N], inverse[N * N], known[N * N] = {0}, rho = 0.5;
  for (int64_t i = 0; i < N * N; i++) {
    toeplitz[i] = pow(rho, fabs((double)(i / N - i % N)));
  }
  for (int64_t i = 0; i < N; i++) {
    known[i * N + i] = (i == 0 || i == N - 1 ? 1 : 1 + rho * rho) / (1 - rho * rho);
    if (i > 0) {
      known[i * N + i - 1] = known[(i - 1) * N + i] = -rho / (1 - rho * rho);
    }
  }
  OK(power_of(toeplitz, inverse, N, DC_FLOAT64, -1, NULL, NULL));
  assert_true(largest_gap(inverse, known, N * N) < 1e-12);
}

static void test_03_symmetric_and_consistent(void **state) {
  (void)state;
  double a[N * N], x4[N * N], x2[N * N], ax[N * N], xa[N * N], squared[N * N];
  spread_spectrum(a, N, 3);
  OK(power_of(a, x4, N, DC_FLOAT64, -0.25, NULL, NULL));
  OK(power_of(a, x2, N, DC_FLOAT64, -0.5, NULL, NULL));
  for (int64_t i = 0; i < N * N; i++) {
    assert_true(x4[i] == x4[i % N * N + i / N]);
  }
  multiply(a, x4, ax, N, N, N);
  multiply(x4, a, xa, N, N, N);
  multiply(x4, x4, squared, N, N, N);
  assert_true(largest_gap(ax, xa, N * N) < 1e-13);
  assert_true(largest_gap(squared, x2, N * N) < 1e-10);
}

/* Squares of couplings that are subnormal numbers have few digits. */
static void test_couplings_whose_squares_underflow(void **state) {
  (void)state;
  for (int32_t exponent = -600; exponent <= -400; exponent++) {
    const double r = ldexp(1, exponent);
    double a[9] = {0.5, 0.2, r, 0.2, 0.3, r / 3, r, r / 3, 1}, values[3], vectors[9], product[9];
    dc_tensor ta = matrix(a, DC_FLOAT64, 3, 3), tv = matrix(vectors, DC_FLOAT64, 3, 3);
    dc_tensor tw = vector(values, DC_FLOAT64, 3);
    OK(dc_eigh(linalg, &ta, NULL, &tw, &tv, NULL, 0));
    const double known[3] = {0.4 - sqrt(0.05), 0.4 + sqrt(0.05), 1};
    assert_true(largest_gap(values, known, 3) < 1e-15);
    const double unit[9] = {1, 0, 0, 0, 1, 0, 0, 0, 1};
    for (int64_t i = 0; i < 9; i++) {
      product[i] = 0;
      for (int64_t k = 0; k < 3; k++) {
        product[i] += vectors[k * 3 + i / 3] * vectors[k * 3 + i % 3];
      }
    }
    assert_true(largest_gap(product, unit, 9) < 1e-14);
  }
}

/* The scale ignores the triangle that is not read, and entries that cancel in the mean. */
static void test_unused_entries_of_any_size(void **state) {
  (void)state;
  const int32_t modes[] = {DC_SYMMETRY_LOWER, DC_SYMMETRY_UPPER, DC_SYMMETRY_MEAN};
  double whole[N * N], a[N * N], x[N * N], y[N * N];
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
    dc_spectral_options o = defaults();
    o.symmetry = modes[m];
    spread_spectrum(whole, N, 4);
    memcpy(a, whole, sizeof a);
    for (int64_t i = 0; i < N; i++) {
      for (int64_t j = 0; j < i; j++) {
        double *low = &a[i * N + j], *high = &a[j * N + i];
        if (modes[m] == DC_SYMMETRY_MEAN) {
          *high = -(*low = 1e250);
          whole[i * N + j] = whole[j * N + i] = 0;
        } else {
          *(modes[m] == DC_SYMMETRY_LOWER ? high : low) = 1e250;
        }
      }
    }
    OK(power_of(whole, x, N, DC_FLOAT64, -0.25, &o, NULL));
    OK(power_of(a, y, N, DC_FLOAT64, -0.25, &o, NULL));
    assert_memory_equal(x, y, sizeof x);
  }
}

static void test_04_scale_covariance(void **state) {
  (void)state;
  double a[N * N], scaled[N * N], x[N * N], y[N * N];
  dc_spectral_options o = defaults();
  o.eps_rel = 1e-6;
  spread_spectrum(a, N, 4);
  OK(power_of(a, x, N, DC_FLOAT64, -0.25, &o, NULL));
  const double scales[] = {1e-300, 1e-30, 1e-8, 1e8, 1e30, 1e300};
  for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++) {
    for (int64_t i = 0; i < N * N; i++) {
      scaled[i] = a[i] * scales[s];
    }
    OK(power_of(scaled, y, N, DC_FLOAT64, -0.25, &o, NULL));
    for (int64_t i = 0; i < N * N; i++) {
      y[i] *= pow(scales[s], 0.25);
    }
    assert_true(largest_gap(x, y, N * N) < 1e-9);
  }
}

/* Torchium's values: -I and 0 become 100 I at power -1/4 and eps 1e-8. eps is added, is a minimum, and is absolute. */
static void test_05_torchium(void **state) {
  (void)state;
  dc_spectral_options o = defaults();
  o.eps_abs = 1e-8;
  o.negative = DC_NEGATIVE_FLOOR;
  o.symmetry = DC_SYMMETRY_LOWER;
  float minus[4] = {-1, 0, 0, -1}, zero[4] = {0}, tiny[4] = {1e-30f, 0, 0, 1e-30f}, x[4];
  float *const all[] = {minus, zero, tiny};
  for (int i = 0; i < 3; i++) {
    OK(power_of(all[i], x, 2, DC_FLOAT32, -0.25, &o, NULL));
    assert_true(fabsf(x[0] - 100) < 1e-3f && fabsf(x[3] - 100) < 1e-3f && x[1] == 0 && x[2] == 0);
  }
  float huge[1] = {1e38f};
  OK(power_of(huge, x, 1, DC_FLOAT32, -0.25, &o, NULL));
  assert_true(fabsf(x[0] / 3.1622776e-10f - 1) < 1e-6f);
}

static void test_12_empty_and_one(void **state) {
  (void)state;
  dc_tensor empty = matrix(NULL, DC_FLOAT32, 0, 0), nothing = batch(NULL, DC_FLOAT32, 0, 5, 5);
  OK(dc_matrix_power(linalg, &empty, -1, NULL, &empty, NULL, 0));
  OK(dc_matrix_power(linalg, &nothing, -1, NULL, &nothing, NULL, 0));
  float one = 16, x = 7;
  OK(power_of(&one, &x, 1, DC_FLOAT32, -0.25, NULL, NULL));
  assert_true(x == 0.5f);
  one = 0;
  FAILS(power_of(&one, &x, 1, DC_FLOAT32, -0.25, NULL, NULL), DC_E_NOT_POSITIVE, "zero");
  one = -1;
  FAILS(power_of(&one, &x, 1, DC_FLOAT32, -0.25, NULL, NULL), DC_E_NOT_POSITIVE, "negative eigenvalue -1");
  one = 1e-45f; /* the least denormal */
  OK(power_of(&one, &x, 1, DC_FLOAT32, -0.25, NULL, NULL));
  assert_true(fabs((double)x / pow(1.401298464324817e-45, -0.25) - 1) < 1e-6);
  one = FLT_MAX;
  OK(power_of(&one, &x, 1, DC_FLOAT32, -0.25, NULL, NULL));
  assert_true(fabs((double)x / pow((double)FLT_MAX, -0.25) - 1) < 1e-6);
  one = 1e-30f;
  FAILS(power_of(&one, &x, 1, DC_FLOAT32, -2, NULL, NULL), DC_E_NOT_FINITE, "does not fit float32");
}

static void test_13_near_the_ends_of_the_range(void **state) {
  (void)state;
  const float scales[] = {3e38f, 1e-40f};
  for (int s = 0; s < 2; s++) {
    float a[N * N], x[N * N];
    double values[N], wide[N * N];
    for (int64_t i = 0; i < N; i++) {
      values[i] = 1 - 0.5 * (double)i / N;
    }
    with_spectrum(wide, N, values, 13);
    for (int64_t i = 0; i < N * N; i++) {
      a[i] = (float)(wide[i] * (double)scales[s]);
    }
    OK(power_of(a, x, N, DC_FLOAT32, -0.25, NULL, NULL));
    double back[N * N], once[N * N], twice[N * N], want[N * N] = {0};
    for (int64_t i = 0; i < N * N; i++) {
      once[i] = (double)x[i] * pow((double)scales[s], 0.25);
      want[i] = i % (N + 1) == 0;
    }
    multiply(once, once, twice, N, N, N);
    multiply(twice, twice, once, N, N, N);
    multiply(once, wide, back, N, N, N);
    assert_true(largest_gap(back, want, N * N) < (s == 0 ? 1e-5 : 1e-3)); /* denormals have few digits */
  }
}

static void test_20_eigenvectors(void **state) {
  (void)state;
  double values[N], a[N * N], w[N], v[N * N], product[N * N], turned[N * N], eye[N * N] = {0};
  for (int64_t i = 0; i < N; i++) {
    values[i] = i < N / 2 ? 1 : (double)(i - N); /* repeated, and negative */
    eye[i * N + i] = 1;
  }
  with_spectrum(a, N, values, 20);
  dc_tensor ta = matrix(a, DC_FLOAT64, N, N), tw = vector(w, DC_FLOAT64, N), tv = matrix(v, DC_FLOAT64, N, N);
  for (int32_t descending = 0; descending < 2; descending++) {
    dc_spectral_options o = defaults();
    dc_spectral_info info = {0};
    o.descending = descending;
    OK(dc_eigh(linalg, &ta, &o, &tw, &tv, &info, sizeof info));
    for (int64_t i = 0; i < N * N; i++) {
      turned[i] = v[i % N * N + i / N];
    }
    multiply(turned, v, product, N, N, N);
    assert_true(largest_gap(product, eye, N * N) < 1e-13);
    for (int64_t i = 0; i < N * N; i++) {
      product[i] = v[i] * w[i % N];
    }
    double again[N * N];
    multiply(product, turned, again, N, N, N);
    assert_true(largest_gap(again, a, N * N) < 1e-12);
    for (int64_t i = 1; i < N; i++) {
      assert_true(descending ? w[i] <= w[i - 1] : w[i] >= w[i - 1]);
    }
    assert_true(fabs(info.smallest + N / 2) < 1e-12 && fabs(info.largest - 1) < 1e-12);
  }
  double only[N];
  dc_tensor to = vector(only, DC_FLOAT64, N);
  OK(dc_eigh(linalg, &ta, NULL, &to, NULL, NULL, 0));
  assert_true(fabs(only[0] - w[N - 1]) < 1e-13);
  dc_tensor short_ = vector(only, DC_FLOAT64, N - 1);
  FAILS(dc_eigh(linalg, &ta, NULL, &short_, NULL, NULL, 0), DC_E_SHAPE, "values");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_01_inverse_roots),
      cmocka_unit_test(test_02_closed_forms),
      cmocka_unit_test(test_03_symmetric_and_consistent),
      cmocka_unit_test(test_couplings_whose_squares_underflow),
      cmocka_unit_test(test_unused_entries_of_any_size),
      cmocka_unit_test(test_04_scale_covariance),
      cmocka_unit_test(test_05_torchium),
      cmocka_unit_test(test_12_empty_and_one),
      cmocka_unit_test(test_13_near_the_ends_of_the_range),
      cmocka_unit_test(test_20_eigenvectors),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
