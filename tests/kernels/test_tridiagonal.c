/* The reduction to tridiagonal form: at every level its sums are those of the definition, for all lengths around a
 * vector's. Also the ends of known spectra, and sums of inverses compared with a dense solver. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"

enum { MOST = 45, LD = 48, ROWS = 7, HIGHEST_LEVEL = DC__KERNELS_LEVELS - 1 };

/* Fills with numbers that depend only on their position. */
static void fill(double *x, int64_t count, uint64_t seed) {
  for (int64_t i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    x[i] = (double)(int32_t)(seed >> 32) * 0x1p-31;
  }
}

static void assert_near(const double *got, const double *want, int64_t count, double tolerance) {
  for (int64_t i = 0; i < count; i++) {
    if (!(fabs(got[i] - want[i]) <= tolerance * (1 + fabs(want[i])))) {
      fail_msg("element %d: %.17g, must be %.17g", (int)i, got[i], want[i]);
    }
  }
}

static void test_products(void **state) {
  (void)state;
  static double a[MOST * LD], x[MOST], y[MOST], want[MOST];
  fill(a, MOST * LD, 1);
  fill(x, MOST, 2);
  for (int64_t i = 0; i < MOST; i++) {
    for (int64_t j = 0; j < i; j++) { /* whole blocks along the diagonal; entries above them must not be read */
      a[j * LD + i] = i / DC__TRIDIAGONAL_BLOCK == j / DC__TRIDIAGONAL_BLOCK ? a[i * LD + j] : NAN;
    }
  }
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (int64_t n = 1; n <= MOST; n++) {
      for (int64_t i = 0; i < n; i++) {
        want[i] = 0;
        for (int64_t j = 0; j < n; j++) {
          want[i] += (j <= i ? a[i * LD + j] : a[j * LD + i]) * x[j];
        }
      }
      dc__tridiagonal_symv(y, a, LD, x, n);
      assert_near(y, want, n, 1e-14);
    }
  }
  dc__kernels_limit(HIGHEST_LEVEL);
}

static void test_rows(void **state) {
  (void)state;
  static double rows[ROWS * LD], x[MOST], y[MOST], want[MOST], sums[ROWS], factors[ROWS];
  fill(rows, ROWS * LD, 3);
  fill(x, MOST, 4);
  fill(factors, ROWS, 5);
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (int64_t n = 0; n <= MOST; n++) {
      for (int64_t count = 0; count <= ROWS; count++) {
        double dots[ROWS] = {0};
        memcpy(y, x, sizeof y);
        memcpy(want, x, sizeof want);
        for (int64_t i = 0; i < n; i++) {
          for (int64_t k = 0; k < count; k++) {
            dots[k] += rows[k * LD + i] * x[i];
            want[i] += factors[k] * rows[k * LD + i];
          }
        }
        dc__tridiagonal_gemv(sums, rows, LD, count, x, n);
        dc__tridiagonal_gemv_t(y, rows, LD, count, factors, n);
        assert_near(sums, dots, count, 1e-14);
        assert_near(y, want, MOST, 1e-14);
      }
    }
  }
  dc__kernels_limit(HIGHEST_LEVEL);
}

/* Second differences: the eigenvalues are 2 - 2 cos(pi k / (n + 1)). */
static void test_ends(void **state) {
  (void)state;
  double d[MOST], off[MOST];
  const double pi = acos(-1);
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (int64_t n = 1; n <= MOST; n++) {
      for (int64_t i = 0; i < n; i++) {
        d[i] = 2;
        off[i] = i == 0 ? NAN : -1;
      }
      double got[2];
      const double want[2] = {2 - 2 * cos(pi / (double)(n + 1)), 2 - 2 * cos(pi * (double)n / (double)(n + 1))};
      dc__tridiagonal_eigenvalue_bounds(d, off, n, &got[0], &got[1]);
      assert_near(got, want, 2, 1e-15);
      memset(off, 0, sizeof off); /* a diagonal matrix splits completely */
      d[n / 2] = 1;
      d[0] = -3;
      dc__tridiagonal_eigenvalue_bounds(d, off, n, &got[0], &got[1]);
      const double apart[2] = {-3, n == 1 ? -3 : n == 2 ? 1 : 2};
      assert_near(got, apart, 2, 1e-15);
    }
  }
  dc__kernels_limit(HIGHEST_LEVEL);
}

/* (T + shift I) times the inverse is the identity; the weights select one shift, and then all of them. */
static void test_inverses(void **state) {
  (void)state;
  enum { SHIFTS = DC__TRIDIAGONAL_SHIFTS };
  static double f[MOST * MOST], sum[MOST * MOST], scratch[DC__TRIDIAGONAL_SCRATCH(MOST)];
  double d[MOST], off[MOST], shifts[SHIFTS], weights[SHIFTS];
  fill(off, MOST, 6);
  for (int64_t k = 0; k < SHIFTS; k++) {
    shifts[k] = (double)k / 16;
  }
  for (int64_t i = 0; i < MOST; i++) {
    d[i] = 2 + (i % 3 == 0 ? 1e3 : 0); /* entries far from the diagonal are negligible */
  }
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (int64_t n = 1; n <= MOST; n += n < 18 ? 1 : 9) {
      memset(sum, 0, sizeof sum);
      for (int64_t k = 0; k < SHIFTS; k++) {
        memset(weights, 0, sizeof weights);
        weights[k] = 1;
        dc__tridiagonal_shifted_inverses(f, d, off, n, shifts, weights, scratch);
        for (int64_t i = 0; i < n; i++) {
          for (int64_t j = 0; j <= i; j++) {
            sum[i * n + j] += (double)(k + 1) * f[i * n + j];
          }
          for (int64_t j = 0; j < n; j++) {
#define ENTRY(i, j) (j <= (i) ? f[(i)*n + j] : f[j * n + (i)])
            double product = (d[i] + shifts[k]) * ENTRY(i, j) + (i > 0 ? off[i] * ENTRY(i - 1, j) : 0) +
                             (i + 1 < n ? off[i + 1] * ENTRY(i + 1, j) : 0);
#undef ENTRY
            const double want = i == j ? 1 : 0;
            assert_near(&product, &want, 1, 1e-13);
          }
        }
      }
      for (int64_t k = 0; k < SHIFTS; k++) {
        weights[k] = (double)(k + 1);
      }
      dc__tridiagonal_shifted_inverses(f, d, off, n, shifts, weights, scratch);
      for (int64_t i = 0; i < n; i++) {
        assert_near(f + i * n, sum + i * n, i + 1, 1e-13);
      }
    }
  }
  dc__kernels_limit(HIGHEST_LEVEL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_products),
      cmocka_unit_test(test_rows),
      cmocka_unit_test(test_ends),
      cmocka_unit_test(test_inverses),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
