/* Orthogonal factors computed only with products: point 22 of the second-order conformance list. */
#include "linalg_test.h"

/* Fills a [rows, cols] matrix, rows > cols, whose columns are orthogonal with known lengths, its singular values. */
static void with_singular_values(double *a, int64_t rows, int64_t cols, const double *values) {
  double *square = calloc((size_t)(rows * rows), sizeof *square), *w = calloc((size_t)rows, sizeof *w),
         *v = calloc((size_t)(rows * rows), sizeof *v);
  for (int64_t i = 0; i < rows; i++) {
    w[i] = (double)i;
  }
  with_spectrum(square, rows, w, 22);
  dc_tensor ts = matrix(square, DC_FLOAT64, rows, rows), tw = vector(w, DC_FLOAT64, rows),
            tv = matrix(v, DC_FLOAT64, rows, rows);
  OK(dc_eigh(linalg, &ts, NULL, &tw, &tv, NULL, 0));
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < cols; j++) {
      a[i * cols + j] = v[i * rows + j] * values[j];
    }
  }
  free(square);
  free(w);
  free(v);
}

static void test_22_orthogonal_bands(void **state) {
  (void)state;
  enum { ROWS = 40, COLS = 12 };
  double a[ROWS * COLS], x[ROWS * COLS], values[COLS], gram[COLS * COLS], w[COLS], norm = 0;
  for (int64_t j = 0; j < COLS; j++) { /* from 1 down to 6e-3, which is above 5e-3 of the Frobenius norm */
    values[j] = pow(10, -2.2 * (double)j / COLS);
    norm += values[j] * values[j];
  }
  assert_true(values[COLS - 1] / sqrt(norm) > 5e-3);
  with_singular_values(a, ROWS, COLS, values);
  const struct {
    int32_t polynomial, steps;
    double low, high;
  } bands[] = {{DC_ORTHOGONAL_EXPRESS, 0, 1 - 1e-12, 1 + 1e-12},
               {DC_ORTHOGONAL_EXPRESS, 5, 0.84, 1.13},
               {DC_ORTHOGONAL_EXPRESS, 12, 1 - 1e-12, 1 + 1e-12},
               {DC_ORTHOGONAL_MUON, 0, 0.68, 1.16}};
  dc_tensor ta = matrix(a, DC_FLOAT64, ROWS, COLS), tx = matrix(x, DC_FLOAT64, ROWS, COLS);
  for (size_t band = 0; band < 4; band++) {
    OK(dc_orthogonalize(linalg, &ta, bands[band].polynomial, bands[band].steps, &tx));
    for (int64_t i = 0; i < COLS * COLS; i++) {
      gram[i] = 0;
      for (int64_t k = 0; k < ROWS; k++) {
        gram[i] += x[k * COLS + i / COLS] * x[k * COLS + i % COLS];
      }
    }
    dc_tensor tg = matrix(gram, DC_FLOAT64, COLS, COLS), tw = vector(w, DC_FLOAT64, COLS);
    OK(dc_eigh(linalg, &tg, NULL, &tw, NULL, NULL, 0));
    assert_true(sqrt(w[0]) > bands[band].low && sqrt(w[COLS - 1]) < bands[band].high);
  }
}

static void test_22_shapes_and_bad_values(void **state) {
  (void)state;
  enum { ROWS = 9, COLS = 5, COUNT = 3 };
  double *a = doubles(COUNT * ROWS * COLS, 5), tall[COUNT * ROWS * COLS], lying[COUNT * ROWS * COLS], one[9] = {0};
  dc_tensor ta = batch(a, DC_FLOAT64, COUNT, ROWS, COLS), tt = batch(tall, DC_FLOAT64, COUNT, ROWS, COLS),
            turned = batch(a, DC_FLOAT64, COUNT, COLS, ROWS), tl = batch(lying, DC_FLOAT64, COUNT, COLS, ROWS);
  const int64_t strides[3] = {ROWS * COLS, 1, COLS};
  turned.strides = strides;
  OK(dc_orthogonalize(linalg, &ta, DC_ORTHOGONAL_EXPRESS, 0, &tt));
  OK(dc_orthogonalize(linalg, &turned, DC_ORTHOGONAL_EXPRESS, 0, &tl));
  for (int64_t i = 0; i < COUNT * ROWS * COLS; i++) { /* the same bits, transposed */
    int64_t in = i % (ROWS * COLS);
    assert_true(tall[i] == lying[i - in + in % COLS * ROWS + in / COLS]);
  }
  dc_tensor rank_one = matrix(one, DC_FLOAT64, 3, 3), to = matrix(tall, DC_FLOAT64, 3, 3);
  OK(dc_orthogonalize(linalg, &rank_one, DC_ORTHOGONAL_EXPRESS, 0, &to)); /* zeros */
  for (int i = 0; i < 9; i++) {
    assert_true(tall[i] == 0);
    one[i] = (i / 3 + 1) * (i % 3 - 1) * 1e200; /* u v^T, whose squares overflow float64 */
  }
  OK(dc_orthogonalize(linalg, &rank_one, DC_ORTHOGONAL_EXPRESS, 0, &to));
  for (int i = 0; i < 9; i++) {
    assert_true(fabs(tall[i] - (i / 3 + 1) * (i % 3 - 1) / sqrt(14.0 * 2)) < 1e-13);
  }
  one[4] = INFINITY;
  double before = tall[0];
  FAILS(dc_orthogonalize(linalg, &rank_one, DC_ORTHOGONAL_MUON, 0, &to), DC_E_NOT_FINITE, "[1, 1] of matrix 0");
  assert_true(tall[0] == before);
  FAILS(dc_orthogonalize(linalg, &rank_one, 2, 0, &to), DC_E_INVALID, "polynomial = 2");
  FAILS(dc_orthogonalize(linalg, &rank_one, 0, 65, &to), DC_E_INVALID, "steps = 65");
  dc_tensor none = matrix(NULL, DC_FLOAT64, 0, 3);
  OK(dc_orthogonalize(linalg, &none, 0, 0, &none));
  free(a);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_22_orthogonal_bands),
      cmocka_unit_test(test_22_shapes_and_bad_values),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
