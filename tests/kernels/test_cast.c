/* Casts: all 16-bit numbers, and each pair of types at each instruction set level, compared with the reference. */
#include "reference.h"

static void test_all_halves(void **state) {
  (void)state;
  static uint16_t halves[65536];
  static float floats[65536];
  static uint16_t back[65536];
  for (int32_t i = 0; i < 65536; i++) {
    halves[i] = (uint16_t)i;
  }
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (int32_t k = 0; k < 2; k++) {
      int32_t dtype = k == 0 ? DC_FLOAT16 : DC_BFLOAT16;
      dc__cast(floats, DC_FLOAT32, halves, dtype, 65536);
      dc__cast(back, dtype, floats, DC_FLOAT32, 65536);
      for (int32_t i = 0; i < 65536; i++) {
        double expected = get(halves, dtype, i).f;
        uint16_t quiet = k == 0 ? 0x0200 : 0x0040;
        if (isnan(expected)) {
          assert_true(isnan(floats[i]));
          assert_int_equal(back[i], i | quiet);
        } else {
          assert_true((double)floats[i] == expected && !signbit(floats[i]) == !signbit(expected));
          assert_int_equal(back[i], i);
        }
      }
    }
  }
}

/* Every float32 at which rounding to 16 bits changes, and its neighbours. */
static void test_all_ties(void **state) {
  (void)state;
  static float floats[3 * 65536];
  static uint16_t got[3 * 65536];
  for (int32_t k = 0; k < 2; k++) {
    int32_t dtype = k == 0 ? DC_FLOAT16 : DC_BFLOAT16;
    int64_t count = 0;
    for (int32_t i = 0; i < 0x7fff; i++) {
      uint16_t pair[2] = {(uint16_t)i, (uint16_t)(i + 1)};
      float tie = (float)((get(pair, dtype, 0).f + get(pair, dtype, 1).f) / 2);
      if (isfinite(tie)) {
        floats[count++] = nextafterf(tie, 0);
        floats[count++] = i % 2 == 0 ? tie : -tie;
        floats[count++] = nextafterf(tie, INFINITY);
      }
    }
    for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
      dc__kernels_limit(level);
      dc__cast(got, dtype, floats, DC_FLOAT32, count);
      for (int64_t i = 0; i < count; i++) {
        uint16_t expected = 0;
        put(&expected, dtype, 0, (value){(double)floats[i], 0, true});
        assert_int_equal(got[i], expected);
      }
    }
  }
}

static void test_pairs(void **state) {
  (void)state;
  for (size_t p = 0; p < DTYPES * DTYPES; p++) {
    int32_t to = dtypes[p / DTYPES];
    int32_t from = dtypes[p % DTYPES];
    for (size_t k = 0; k < DC__COUNT(lengths); k++) {
      int64_t count = lengths[k];
      guarded src = guarded_make(from, count, k % 5);
      guarded expected = guarded_make(to, count, 0);
      guarded plain = guarded_make(to, count, 0);
      fill(src.data, from, count);
      for (int64_t i = 0; i < count; i++) {
        put(expected.data, to, i, get(src.data, from, i));
      }
      dc__kernels_limit(0);
      dc__cast(plain.data, to, src.data, from, count);
      assert_same(plain.data, expected.data, to, count, "dc__cast");
      for (int32_t level = 1; level <= HIGHEST_LEVEL; level++) {
        dc__kernels_limit(level);
        guarded dst = guarded_make(to, count, (k + 3) % 7);
        dc__cast(dst.data, to, src.data, from, count);
        assert_memory_equal(dst.data, plain.data, dst.bytes);
        guarded_free(&dst);
      }
      guarded_free(&src);
      guarded_free(&expected);
      guarded_free(&plain);
    }
  }
}

static void test_out_of_range(void **state) {
  (void)state;
  const float src[] = {300.7f, -300.7f, NAN, INFINITY, -INFINITY, 1e30f, -0.9f, 127.9f};
  const int8_t expected8[] = {127, -128, 0, 127, -128, 127, 0, 127};
  const int64_t expected64[] = {300, -300, 0, INT64_MAX, INT64_MIN, INT64_MAX, 0, 127};
  int8_t got8[8];
  int64_t got64[8];
  dc__cast(got8, DC_INT8, src, DC_FLOAT32, 8);
  dc__cast(got64, DC_INT64, src, DC_FLOAT32, 8);
  assert_memory_equal(got8, expected8, sizeof got8);
  assert_memory_equal(got64, expected64, sizeof got64);
  const int64_t wide[] = {256 + 5, -129, INT64_MIN};
  const int8_t low[] = {5, 127, 0};
  dc__cast(got8, DC_INT8, wide, DC_INT64, 3);
  assert_memory_equal(got8, low, 3);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_all_halves),
      cmocka_unit_test(test_all_ties),
      cmocka_unit_test(test_pairs),
      cmocka_unit_test(test_out_of_range),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
