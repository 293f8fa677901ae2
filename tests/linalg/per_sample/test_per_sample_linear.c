/* Norms of linear layers whose positions cancel: point 31 of the second-order conformance list. */
#include "linalg_test.h"

/* Positions cancel, so the gradient is zero or nearly so. Computed from products of positions, its square is a small
 * difference of large numbers. */
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

static void test_outputs_over_inputs(void **state) {
  (void)state;
  double x[40] = {0};
  dc_sample_layer layer = {.struct_size = sizeof layer, .kind = DC_SAMPLE_LINEAR};
  dc_tensor in = matrix(x, DC_FLOAT64, 3, 2), out = matrix(x + 6, DC_FLOAT64, 3, 2), w = batch(x, DC_FLOAT64, 3, 2, 2),
            b = matrix(x + 4, DC_FLOAT64, 3, 2), n = vector(x + 11, DC_FLOAT64, 3),
            sum = matrix(x + 12, DC_FLOAT64, 2, 2), n2 = vector(x + 11, DC_FLOAT64, 2);
  FAILS(dc_per_sample_grads(linalg, &layer, &in, &out, &w, NULL), DC_E_INVALID, "weight, which is written, overlaps x");
  FAILS(dc_per_sample_grads(linalg, &layer, &in, &out, NULL, &b), DC_E_INVALID, "bias, which is written, overlaps x");
  FAILS(dc_per_sample_norms(linalg, &layer, &in, &out, 3, 1, &n), DC_E_INVALID,
        "squares, which is written, overlaps d");
  FAILS(dc_clipped_grad_sum(linalg, &layer, &in, &out, NULL, 0, NULL, &n2), DC_E_INVALID, "bias, which is written");
  n.data = x + 15;
  FAILS(dc_clipped_grad_sum(linalg, &layer, &in, &out, &n, 0, &sum, NULL), DC_E_INVALID, "overlaps factors");
  dc_tensor shifted = vector(x + 14, DC_FLOAT64, 3);
  FAILS(dc_clip_factors(linalg, &n, 1, &shifted), DC_E_INVALID, "factors, which is written, overlaps squares");
  OK(dc_clip_factors(linalg, &n, 1, &n));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_31_nothing_negative),
      cmocka_unit_test(test_outputs_over_inputs),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
