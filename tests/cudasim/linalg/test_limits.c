/* Matrices beyond the number of blocks that a grid has on an axis, on the device against the CPU. */
#include "device_pair.h"

/* The left factor has more rows than a grid has blocks on its second axis; the right one has one element. */
static void test_nearest_of_many_rows(void **state) {
  (void)state;
  enum { ROWS = 66000 };
  double *values = doubles(ROWS, 5), residual[2] = {7, 7};
  tensor_pair x = matrix_pair(values, DC_FLOAT64, -1, ROWS, 1), a = matrix_pair(NULL, DC_FLOAT64, -1, ROWS, 1),
              b = matrix_pair(NULL, DC_FLOAT64, -1, 1, 1);
  BOTH(dc_kron_nearest(linalg_of(k), &x.t[k], &a.t[k], &b.t[k], &residual[k]));
  assert_int_equal(cpu_text[0], 0);
  assert_true(relative_gap(&a) <= 1e-9 && relative_gap(&b) <= 1e-9 && fabs(residual[0] - residual[1]) <= 1e-9);
  free_pair(&x), free_pair(&a), free_pair(&b);
  free(values);
}

int main(void) {
  const struct CMUnitTest tests[] = {TEST(test_nearest_of_many_rows)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
