/* Bags of embeddings, group norms, norms that cancel: points 31, 34 and 35 of the second-order conformance list. A bag
 * is compared with an embedding whose delta is written out, a group norm with its definition. */
#include "linalg_test.h"

enum { SAMPLES = 4, T = 3, ROWS = 6, D = 5, WEIGHTS = ROWS * D };

/* Bags with a row twice, with padding, of padding alone. */
static const int64_t ids[SAMPLES * T] = {1, 1, 3, 0, 5, 2, 0, 0, 0, 4, 4, 4};

static double share_of(int32_t kind, int64_t sample) {
  int64_t count = 0;
  for (int64_t t = 0; t < T; t++) {
    count += ids[sample * T + t] != 0;
  }
  return kind == DC_SAMPLE_BAG_SUM || count == 0 ? 1 : 1 / (double)count;
}

static void bags(int32_t kind) {
  double *delta = doubles(SAMPLES * D, 7), spread[SAMPLES * T * D], w[2][SAMPLES * WEIGHTS], q[2][SAMPLES],
         sum[2][WEIGHTS], factors[SAMPLES] = {1, 0.5, 2, 0};
  int64_t index[SAMPLES * T];
  memcpy(index, ids, sizeof ids);
  for (int64_t i = 0; i < SAMPLES * T * D; i++) {
    int64_t sample = i / (T * D);
    spread[i] = delta[sample * D + i % D] * share_of(kind, sample);
  }
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.rows = ROWS;
  layer.padding_row = 1;
  dc_tensor x = matrix(index, DC_INT64, SAMPLES, T), tf = vector(factors, DC_FLOAT64, SAMPLES);
  for (int bag = 0; bag < 2; bag++) {
    dc_tensor d = bag ? matrix(delta, DC_FLOAT64, SAMPLES, D) : batch(spread, DC_FLOAT64, SAMPLES, T, D);
    dc_tensor tw = batch(w[bag], DC_FLOAT64, SAMPLES, ROWS, D), tq = vector(q[bag], DC_FLOAT64, SAMPLES),
              ts = matrix(sum[bag], DC_FLOAT64, ROWS, D);
    layer.kind = bag ? kind : DC_SAMPLE_EMBEDDING;
    OK(dc_per_sample_grads(linalg, &layer, &x, &d, &tw, NULL));
    OK(dc_per_sample_norms(linalg, &layer, &x, &d, DC_PART_WEIGHT, 0, &tq));
    OK(dc_clipped_grad_sum(linalg, &layer, &x, &d, &tf, 0, &ts, NULL));
  }
  assert_true(largest_gap(w[0], w[1], SAMPLES * WEIGHTS) < 1e-15);
  assert_true(largest_gap(q[0], q[1], SAMPLES) < 1e-14 && q[1][2] == 0);
  assert_true(largest_gap(sum[0], sum[1], WEIGHTS) < 1e-15);
  dc_tensor cube = batch(index, DC_INT64, 2, 2, T), d = batch(delta, DC_FLOAT64, 2, 2, D),
            tq = vector(q[0], DC_FLOAT64, 2);
  FAILS(dc_per_sample_norms(linalg, &layer, &cube, &d, 1, 0, &tq), DC_E_SHAPE, "must have 2 for bags");
  dc_tensor empty = matrix(NULL, DC_INT64, SAMPLES, 0), rows = matrix(delta, DC_FLOAT64, SAMPLES, D),
            all = vector(q[0], DC_FLOAT64, SAMPLES);
  OK(dc_per_sample_norms(linalg, &layer, &empty, &rows, DC_PART_WEIGHT, 0, &all));
  assert_true(q[0][0] == 0 && q[0][3] == 0);
  free(delta);
}

static void test_34_bags(void **state) {
  (void)state;
  bags(DC_SAMPLE_BAG_SUM);
  bags(DC_SAMPLE_BAG_MEAN);
}

/* groups = channels is instance norm, groups = 1 layer norm over all but the samples. */
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

/* Positions that cancel: the gradient is zero, or as good as that, and its square by way of the products of positions
 * is a small difference of large numbers. */
static void test_31_nothing_negative(void **state) {
  (void)state;
  enum { SIZE = 64, PLACES = 6 };
  float x[PLACES * SIZE], d[PLACES * SIZE], square = 7;
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.kind = DC_SAMPLE_LINEAR;
  dc_tensor tx = batch(x, DC_FLOAT32, 1, PLACES, SIZE), td = batch(d, DC_FLOAT32, 1, PLACES, SIZE),
            tq = vector(&square, DC_FLOAT32, 1);
  for (uint64_t seed = 0; seed < 50; seed++) {
    uint64_t state_ = seed;
    double whole = 0;
    for (int64_t i = 0; i < SIZE; i++) {
      float a = (float)number(&state_), b = (float)number(&state_);
      for (int64_t p = 0; p < PLACES; p++) { /* weights 1, 1, -2, 1, 1, -2 */
        x[p * SIZE + i] = a;
        d[p * SIZE + i] = p % 3 == 2 ? -2 * b : b;
      }
      whole += (double)(a * a);
    }
    OK(dc_per_sample_norms(linalg, &layer, &tx, &td, DC_PART_WEIGHT | DC_PART_BIAS, 0, &tq));
    assert_true(square >= 0 && (double)square < 1e-4 * whole * whole);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_31_nothing_negative), cmocka_unit_test(test_34_bags),
                                     cmocka_unit_test(test_35_group_norms)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
