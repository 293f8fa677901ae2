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

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_31_nothing_negative)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
