/* Group norms compared with their definition: point 35 of the second-order conformance list. */
#include "linalg_test.h"

/* groups = channels is instance norm; groups = 1 is layer norm over all dimensions but the samples. */
static void group_norm(int64_t n, int64_t c, int64_t p, int32_t groups, double eps) {
  double *x = doubles(n * c * p, 35), *delta = doubles(n * c * p, 36), want[64] = {0}, w[64], b[64], q[8], sum[16];
  int64_t width = c / groups * p;
  double bias[64] = {0}, squares[8] = {0}, total[16] = {0};
  for (int64_t i = 0; i < n * c * p; i++) {
    double mean = 0, square = 0;
    for (int64_t j = i / width * width; j < (i / width + 1) * width; j++) {
      mean += x[j] / (double)width;
    }
    for (int64_t j = i / width * width; j < (i / width + 1) * width; j++) {
      square += pow(x[j] - mean, 2) / (double)width;
    }
    want[i / p] += delta[i] * (x[i] - mean) / sqrt(square + eps);
    bias[i / p] += delta[i];
  }
  for (int64_t i = 0; i < n * c; i++) {
    squares[i / c] += want[i] * want[i] + bias[i] * bias[i];
    total[i % c] += want[i];
  }
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.kind = DC_SAMPLE_GROUP_NORM;
  layer.groups = groups;
  layer.eps = eps;
  dc_tensor tx = batch(x, DC_FLOAT64, n, c, p), td = batch(delta, DC_FLOAT64, n, c, p),
            tw = matrix(w, DC_FLOAT64, n, c), tb = matrix(b, DC_FLOAT64, n, c), tq = vector(q, DC_FLOAT64, n),
            ts = vector(sum, DC_FLOAT64, c);
  OK(dc_per_sample_grads(linalg, &layer, &tx, &td, &tw, &tb));
  OK(dc_per_sample_norms(linalg, &layer, &tx, &td, DC_PART_WEIGHT | DC_PART_BIAS, 0, &tq));
  OK(dc_clipped_grad_sum(linalg, &layer, &tx, &td, NULL, 0, &ts, NULL));
  assert_true(largest_gap(w, want, n * c) < 1e-13 && largest_gap(b, bias, n * c) < 1e-13);
  assert_true(largest_gap(q, squares, n) < 1e-12 && largest_gap(sum, total, c) < 1e-13);
  layer.groups = (int32_t)c + 1;
  FAILS(dc_per_sample_norms(linalg, &layer, &tx, &td, 1, 0, &tq), DC_E_INVALID, "groups");
  free(x);
  free(delta);
}

static void test_35_group_norms(void **state) {
  (void)state;
  group_norm(3, 6, 4, 2, 1e-5);
  group_norm(3, 6, 4, 6, 1e-5);
  group_norm(2, 4, 1, 2, 0.1);
  group_norm(2, 3, 5, 1, 0);
  group_norm(2, 3, 0, 3, 1e-5);
}

static void test_features_of_one(void **state) {
  (void)state;
  double x[] = {1, 2, 3, 4, 5, 6}, d[] = {1, 1, 1, 1, 1, 1}, norms[3];
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.kind = DC_SAMPLE_RMS_NORM;
  layer.features = 1;
  dc_tensor tx = matrix(x, DC_FLOAT64, 3, 2), td = matrix(d, DC_FLOAT64, 3, 2), tn = vector(norms, DC_FLOAT64, 3);
  /* x is not [3, 1] */
  FAILS(dc_per_sample_norms(linalg, &layer, &tx, &td, 1, 0, &tn), DC_E_INVALID, "features = 1");
  dc_tensor no_x = matrix(NULL, DC_FLOAT64, 3, 0), no_d = no_x;
  FAILS(dc_per_sample_norms(linalg, &layer, &no_x, &no_d, 1, 0, &tn), DC_E_INVALID, "features = 1");
  dc_tensor one = batch(x, DC_FLOAT64, 3, 2, 1), one_d = batch(d, DC_FLOAT64, 3, 2, 1);
  OK(dc_per_sample_norms(linalg, &layer, &one, &one_d, 1, 0, &tn));
  assert_true(norms[0] == 4 && norms[1] == 4 && norms[2] == 4); /* x-hat is 1: two positions, squared */
}

/* The workspace has exactly the bytes that a query returned, for numbers of rows that end anywhere in a cache line. */
static void test_the_queried_workspace_is_enough(void **state) {
  (void)state;
  enum { MOST = 17, WIDTH = 2, GUARD = 64 };
  double *x = doubles(MOST * WIDTH, 37), weight[WIDTH];
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.kind = DC_SAMPLE_LAYER_NORM;
  layer.eps = 1e-5;
  for (int64_t rows = 1; rows <= MOST; rows++) {
    int64_t bytes;
    dc_tensor tx = batch(x, DC_FLOAT64, 1, rows, WIDTH), tw = matrix(weight, DC_FLOAT64, 1, WIDTH);
    OK(dc_linalg_begin_query(linalg));
    OK(dc_per_sample_grads(linalg, &layer, &tx, &tx, &tw, NULL));
    OK(dc_linalg_end_query(linalg, &bytes));
    unsigned char *memory = aligned_alloc(64, (size_t)bytes + GUARD);
    memset(memory, 0x77, (size_t)bytes + GUARD);
    OK(dc_linalg_set_workspace(linalg, memory, bytes));
    OK(dc_per_sample_grads(linalg, &layer, &tx, &tx, &tw, NULL));
    OK(dc_linalg_set_workspace(linalg, NULL, 0));
    for (int64_t i = 0; i < GUARD; i++) {
      assert_int_equal(memory[bytes + i], 0x77);
    }
    free(memory);
  }
  free(x);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_35_group_norms), cmocka_unit_test(test_features_of_one),
                                     cmocka_unit_test(test_the_queried_workspace_is_enough)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
