/* Copies, casts and sums that scan for numbers that are not finite. They have the bits of those that do not scan, and
 * report whether the result is finite, wherever such a number is. For each pair of floating-point types at each
 * level. */
#include "kernels/dispatch.h"
#include "reference.h"

static const int32_t floats[] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16};

/* The largest finite magnitudes, zeros and denormals are finite. */
static const double calm[] = {0.0, -0.0, 1.0, -2.5, 65504.0, -65504.0, 65519.0, 0x1p-24, -0x1p-149, 0x1p-133, 1e-320};

static void fill_finite(void *array, int32_t dtype, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    put(array, dtype, i, (value){calm[random_bits() % DC__COUNT(calm)], 0, true});
  }
}

static bool all_finite(const void *array, int32_t dtype, int64_t count) {
  bool finite = true;
  for (int64_t i = 0; i < count; i++) {
    finite = finite && isfinite(get(array, dtype, i).f);
  }
  return finite;
}

/* Compares with the functions that do not scan, and with the expected findings. */
static void check(int32_t to, int32_t from, int64_t count, const void *start, const void *src, bool add) {
  guarded expected = guarded_make(to, count, 0);
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    memcpy(expected.data, start, expected.bytes);
    (add ? dc__accumulate : dc__cast)(expected.data, to, src, from, count);
    guarded dst = guarded_make(to, count, (size_t)count % 7);
    memcpy(dst.data, start, dst.bytes);
    const bool finite = dc__combine(dst.data, to, src, from, count, add);
    assert_same(dst.data, expected.data, to, count, "dc__combine");
    if (finite != all_finite(expected.data, to, count)) {
      fail_msg("level %d: %s %s %s, %" PRId64 " elements: said to be %sfinite", (int)level, dc_dtype_name(to),
               add ? "+=" : "=", dc_dtype_name(from), count, finite ? "" : "not ");
    }
    guarded_free(&dst);
  }
  guarded_free(&expected);
}

static void each_pair(void (*with)(int32_t to, int32_t from, bool add)) {
  for (size_t p = 0; p < 2 * DC__COUNT(floats) * DC__COUNT(floats); p++) {
    with(floats[p / 8], floats[p / 2 % 4], p % 2 == 1);
  }
}

/* Any bits. */
static void anything(int32_t to, int32_t from, bool add) {
  for (size_t k = 0; k < DC__COUNT(lengths); k++) {
    guarded src = guarded_make(from, lengths[k], k % 5);
    guarded start = guarded_make(to, lengths[k], 0);
    fill(src.data, from, lengths[k]);
    fill(start.data, to, lengths[k]);
    check(to, from, lengths[k], start.data, src.data, add);
    guarded_free(&src);
    guarded_free(&start);
  }
}

/* A single number that is not finite, at every position of arrays whose lengths are around the widths of vectors. */
static void one_of_many(int32_t to, int32_t from, bool add) {
  static const int64_t counts[] = {1, 31, 32, 33, 64, 97};
  static const double odd[] = {(double)INFINITY, -(double)INFINITY, (double)NAN,     65519.99, 65520.0, -65536.0,
                               0x1.fefffep127,   0x1.ffp127,        -0x1.fffffep127, 0x1p128,  -1e300};
  for (size_t k = 0; k < DC__COUNT(counts); k++) {
    const int64_t count = counts[k];
    guarded src = guarded_make(from, count, k % 5);
    guarded start = guarded_make(to, count, 0);
    fill_finite(src.data, from, count);
    for (int64_t i = 0; i < count; i++) {
      put(start.data, to, i, (value){0, 0, true});
    }
    check(to, from, count, start.data, src.data, add);
    for (int64_t at = 0; at < count; at++) {
      const value was = get(src.data, from, at);
      put(src.data, from, at, (value){odd[(size_t)(at + count) % DC__COUNT(odd)], 0, true});
      check(to, from, count, start.data, src.data, add);
      put(src.data, from, at, was);
    }
    guarded_free(&src);
    guarded_free(&start);
  }
}

static void test_anything(void **state) {
  (void)state;
  each_pair(anything);
}

static void test_one_of_many(void **state) {
  (void)state;
  each_pair(one_of_many);
}

/* A sum of finite numbers that overflows is found, and so is a number in the output before the sum. */
static void test_sums(void **state) {
  (void)state;
  for (size_t k = 0; k < DC__COUNT(floats); k++) {
    static const double largest[] = {0x1.fffffep127, 0x1.fffffffffffffp1023, 65504.0, 0x1.fep127};
    const int32_t dtype = floats[k];
    char a[8 * 40] = {0}, b[8 * 40] = {0};
    for (int64_t at = 0; at < 40; at += 13) {
      put(a, dtype, at, (value){largest[k], 0, true});
      check(dtype, dtype, 40, a, b, true);
      put(b, dtype, at, (value){largest[k], 0, true});
      check(dtype, dtype, 40, a, b, true);
      put(b, dtype, at, (value){0, 0, true});
      put(a, dtype, at, (value){(double)NAN, 0, true});
      check(dtype, dtype, 40, a, b, true);
      put(a, dtype, at, (value){0, 0, true});
    }
  }
}

/* Arrays larger than the caches, at every alignment in a cache line, with such a number at either end. */
static void test_large(void **state) {
  (void)state;
  for (size_t k = 0; k < DC__COUNT(floats); k++) {
    const int32_t dtype = floats[k];
    const int64_t size = (int64_t)dc_dtype_size(dtype);
    const int64_t count = (int64_t)DC__COPY_STREAM / size + 77;
    char *src = calloc((size_t)(count + 40), (size_t)size), *dst = calloc((size_t)(count + 40), (size_t)size);
    for (int64_t i = 0; i < count * size; i++) {
      src[i] = (char)((i * 7 + i / 251) & 0x3b);
    }
    for (int64_t shift = 0; shift < 3; shift++) {
      char *d = dst + (shift == 2 ? 1 : shift * size); /* the last shift is no multiple of an element's size */
      const int64_t places[] = {-1, 0, count - 1, count / 2, count - 78};
      for (size_t p = 0; p < DC__COUNT(places); p++) {
        char was[8] = {0};
        if (places[p] >= 0) {
          memcpy(was, src + places[p] * size, (size_t)size);
          put(src, dtype, places[p], (value){-(double)INFINITY, 0, true});
        }
        dc__kernels_limit((int32_t)(p + (size_t)shift) % (HIGHEST_LEVEL + 1));
        assert_int_equal(dc__combine(d, dtype, src, dtype, count, false), places[p] < 0);
        assert_memory_equal(d, src, (size_t)(count * size));
        if (places[p] >= 0) {
          memcpy(src + places[p] * size, was, (size_t)size);
        }
      }
    }
    free(src);
    free(dst);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_anything),
      cmocka_unit_test(test_one_of_many),
      cmocka_unit_test(test_sums),
      cmocka_unit_test(test_large),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
