/* Point 16: failing solvers take LAPACK's place. Matrices are retried in float64, then with libdc's own solver, and the
 * path is reported. */
#include "linalg/linalg.h"
#include "linalg_test.h"

static int32_t float_calls, double_calls;
static int32_t float_info, double_info;
static bool not_a_number; /* returns info 0 and NaN as values, as OpenBLAS has done */

static void fake_sstedc(const char *compz, const int32_t *n, float *d, float *e, float *z, const int32_t *ldz,
                        float *work, const int32_t *lwork, int32_t *iwork, const int32_t *liwork, int32_t *info,
                        size_t compz_length) {
  (void)compz, (void)e, (void)ldz, (void)work, (void)lwork, (void)iwork, (void)liwork, (void)compz_length;
  float_calls++;
  for (int32_t i = 0; i < *n * *n; i++) {
    z[i] = -1; /* overwritten, as by a solver that gave up */
  }
  for (int32_t i = 0; i < *n; i++) {
    d[i] = not_a_number ? (float)NAN : 1;
  }
  *info = float_info;
}

/* It can only solve diagonal matrices, whose eigenvalues are the diagonal. */
static void fake_dstedc(const char *compz, const int32_t *n, double *d, double *e, double *z, const int32_t *ldz,
                        double *work, const int32_t *lwork, int32_t *iwork, const int32_t *liwork, int32_t *info,
                        size_t compz_length) {
  (void)compz, (void)e, (void)ldz, (void)work, (void)lwork, (void)iwork, (void)liwork, (void)compz_length;
  double_calls++;
  for (int32_t i = 0; i < *n * *n; i++) {
    z[i] = i % (*n + 1) == 0;
  }
  if (double_info != 0) {
    memset(d, 0, (size_t)*n * sizeof *d);
  }
  *info = double_info;
}

static void root_of(float *x, dc_spectral_info *info) {
  float a[9] = {1, 0, 0, 0, 16, 0, 0, 0, 81};
  dc__blas blas = {.path = "fake", .sstedc = fake_sstedc, .dstedc = fake_dstedc};
  const dc__blas *real = linalg->blas;
  dc_spectral_options o = DC_SPECTRAL_OPTIONS_INIT;
  o.precision = DC_FLOAT32;
  dc_tensor ta = matrix(a, DC_FLOAT32, 3, 3), tx = matrix(x, DC_FLOAT32, 3, 3);
  float_calls = double_calls = 0;
  linalg->blas = &blas;
  dc_status status = dc_matrix_power(linalg, &ta, 0.25, &o, &tx, info, sizeof *info);
  linalg->blas = real;
  assert_int_equal(status, DC_OK);
  const float want[9] = {1, 0, 0, 0, 2, 0, 0, 0, 3};
  for (int i = 0; i < 9; i++) {
    assert_true(fabsf(x[i] - want[i]) < 1e-6f);
  }
}

static void test_16_retried_in_float64(void **state) {
  (void)state;
  float x[9];
  dc_spectral_info info = {0};
  float_info = 5;
  double_info = 0;
  root_of(x, &info);
  assert_int_equal(info.path, DC_PATH_RETRIED);
  assert_int_equal(float_calls, 1);
  assert_int_equal(double_calls, 1);
  float_info = 0;
  not_a_number = true;
  root_of(x, &info);
  assert_int_equal(info.path, DC_PATH_RETRIED);
  not_a_number = false;
}

/* second-order: 51 */
static void test_16_plain_at_last(void **state) {
  (void)state;
  float x[9];
  dc_spectral_info info = {0};
  float_info = double_info = 7;
  root_of(x, &info);
  assert_int_equal(info.path, DC_PATH_PLAIN);
  assert_int_equal(float_calls, 1);
  assert_int_equal(double_calls, 1);
}

/* The plain solver and LAPACK, if there is one, agree in both types on spectra of all kinds. */
static void test_plain_agrees(void **state) {
  (void)state;
  enum { N = 40 };
  dc_linalg *plain = open_linalg(2, 1);
  for (int kind = 0; kind < 6; kind++) {
    double values[N], a[N * N], w[2][N], v[N * N];
    for (int64_t i = 0; i < N; i++) {
      const double all[] = {
          pow(10, -12.0 * (double)i / N), (double)(i / 8), i == 0 ? 1e6 : 1, i < 3 ? 1 : 0, 0, (double)i - 20};
      values[i] = all[kind];
    }
    with_spectrum(a, N, values, 100);
    dc_tensor ta = matrix(a, DC_FLOAT64, N, N), tv = matrix(v, DC_FLOAT64, N, N);
    dc_linalg *const handles[] = {linalg, plain};
    for (int h = 0; h < 2; h++) {
      dc_tensor tw = vector(w[h], DC_FLOAT64, N);
      OK(dc_eigh(handles[h], &ta, NULL, &tw, &tv, NULL, 0));
    }
    double largest = fmax(fabs(w[0][0]), fabs(w[0][N - 1]));
    assert_true(largest_gap(w[0], w[1], N) <= 1e-13 * largest);
  }
  dc_linalg_destroy(plain);
}

/* Householder vectors of a matrix of rank one leave rests that fall to subnormal numbers. */
static void test_plain_of_rank_one(void **state) {
  (void)state;
  enum { MOST = 128 };
  static double a[MOST * MOST], v[MOST * MOST];
  double w[MOST];
  dc_linalg *plain = open_linalg(2, 1);
  for (int64_t n = 2; n <= MOST; n += 2) {
    for (int64_t i = 0; i < n * n; i++) {
      a[i] = 1;
    }
    dc_tensor ta = matrix(a, DC_FLOAT64, n, n), tv = matrix(v, DC_FLOAT64, n, n), tw = vector(w, DC_FLOAT64, n);
    OK(dc_eigh(plain, &ta, NULL, &tw, &tv, NULL, 0));
    for (int64_t i = 0; i < n; i++) {
      assert_true(fabs(w[i] - (i < n - 1 ? 0 : (double)n)) < 1e-12);
      assert_true(fabs(fabs(v[i * n + n - 1]) - 1 / sqrt((double)n)) < 1e-13);
    }
  }
  dc_linalg_destroy(plain);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_16_retried_in_float64),
      cmocka_unit_test(test_16_plain_at_last),
      cmocka_unit_test(test_plain_agrees),
      cmocka_unit_test(test_plain_of_rank_one),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
