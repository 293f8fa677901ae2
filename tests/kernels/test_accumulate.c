/* Accumulation: each pair of types at each instruction set level, compared with the reference. */
#include "reference.h"

static void test_pairs(void **state) {
  (void)state;
  for (size_t p = 0; p < DTYPES * DTYPES; p++) {
    int32_t to = dtypes[p / DTYPES];
    int32_t from = dtypes[p % DTYPES];
    bool wide = to == DC_FLOAT64 || from == DC_FLOAT64;
    for (size_t k = 0; k < DC__COUNT(lengths); k++) {
      int64_t count = lengths[k];
      guarded src = guarded_make(from, count, k % 5);
      guarded start = guarded_make(to, count, 0);
      guarded expected = guarded_make(to, count, 0);
      fill(src.data, from, count);
      fill(start.data, to, count);
      for (int64_t i = 0; i < count; i++) {
        put(expected.data, to, i, plus(get(start.data, to, i), get(src.data, from, i), wide));
      }
      for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
        dc__kernels_limit(level);
        guarded dst = guarded_make(to, count, (k + 3) % 7);
        memcpy(dst.data, start.data, dst.bytes);
        dc__accumulate(dst.data, to, src.data, from, count);
        assert_same(dst.data, expected.data, to, count, "dc__accumulate");
        guarded_free(&dst);
      }
      guarded_free(&src);
      guarded_free(&start);
      guarded_free(&expected);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_pairs)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
