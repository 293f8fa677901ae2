/* Bags of embeddings: point 34 of the second-order conformance list. A bag must equal an embedding with the delta
 * repeated for each index. */
#include "linalg_test.h"

enum { SAMPLES = 4, T = 3, ROWS = 6, D = 5, WEIGHTS = ROWS * D };

/* Bags that have a row twice, have padding, or are all padding. */
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
  layer.has_padding_row = 1;
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

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_34_bags)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
