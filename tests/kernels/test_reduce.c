/* The reduction over ranks: its order, rounding and division, at each level compared with the reference. */
#include "reference.h"

enum { MOST = 256 };

/* The documented tree: neighbours are paired level by level, and a single last one moves up. */
static value reference_tree(value *v, int32_t n, int32_t dtype) {
  while (n > 1) {
    int32_t half = n / 2;
    for (int32_t k = 0; k < half; k++) {
      v[k] = plus(v[2 * k], v[2 * k + 1], dtype == DC_FLOAT64);
    }
    if (n % 2 == 1) {
      v[half] = v[n - 1];
    }
    n = half + n % 2;
  }
  return v[0];
}

static void reference_reduce(void *dst, int32_t to, const void *const *src, int32_t n, int32_t from, int64_t count,
                             bool mean, bool accumulate) {
  for (int64_t i = 0; i < count; i++) {
    value v[MOST];
    for (int32_t k = 0; k < n; k++) {
      v[k] = get(src[k], from, i);
    }
    value r = reference_tree(v, n, from);
    if (mean && from == DC_FLOAT64) {
      r.f = r.f / (double)n;
    } else if (mean) {
      r.f = (double)((float)r.f / (float)n);
    }
    if (!r.is_float) {
      int64_t own = 0; /* wraps in the element type */
      put(&own, from, 0, r);
      r = get(&own, from, 0);
    }
    value old = get(dst, to, i);
    put(dst, to, i, r);
    if (accumulate) {
      put(dst, to, i, plus(old, get(dst, to, i), to == DC_FLOAT64));
    }
  }
}

static void check(int32_t to, int32_t from, int32_t n, int64_t count, size_t shift, bool mean, bool accumulate) {
  guarded blocks[MOST];
  const void *src[MOST];
  for (int32_t k = 0; k < n; k++) {
    blocks[k] = guarded_make(from, count, (shift + (size_t)k) % 4);
    fill(blocks[k].data, from, count);
    src[k] = blocks[k].data;
  }
  guarded start = guarded_make(to, count, 0);
  guarded expected = guarded_make(to, count, 0);
  fill(start.data, to, count);
  memcpy(expected.data, start.data, start.bytes);
  reference_reduce(expected.data, to, src, n, from, count, mean, accumulate);
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    guarded dst = guarded_make(to, count, shift);
    memcpy(dst.data, start.data, dst.bytes);
    dc__reduce(&(dc__reduction){.dst = dst.data,
                                .src = src,
                                .count = count,
                                .dst_dtype = to,
                                .src_dtype = from,
                                .n = n,
                                .mean = mean,
                                .accumulate = accumulate});
    char what[96];
    snprintf(what, sizeof what, "dc__reduce %s <- %d x %s, mean %d, accumulate %d", dc_dtype_name(to), (int)n,
             dc_dtype_name(from), (int)mean, (int)accumulate);
    assert_same(dst.data, expected.data, to, count, what);
    guarded_free(&dst);
  }
  for (int32_t k = 0; k < n; k++) {
    guarded_free(&blocks[k]);
  }
  guarded_free(&start);
  guarded_free(&expected);
}

static void test_pairs(void **state) {
  (void)state;
  for (size_t p = 0; p < DTYPES * DTYPES; p++) {
    int32_t to = dtypes[p / DTYPES];
    int32_t from = dtypes[p % DTYPES];
    for (int32_t flags = 0; flags < 4; flags++) {
      bool mean = (flags & 1) != 0 && dc__dtype_is_float(from);
      for (int32_t n = 1; n <= 9; n++) {
        check(to, from, n, 97, (size_t)n % 3, mean, (flags & 2) != 0);
      }
    }
  }
}

static void test_lengths(void **state) {
  (void)state;
  static const int32_t pairs[][2] = {{DC_FLOAT32, DC_FLOAT32},   {DC_FLOAT32, DC_BFLOAT16}, {DC_FLOAT32, DC_FLOAT16},
                                     {DC_BFLOAT16, DC_BFLOAT16}, {DC_FLOAT16, DC_FLOAT16},  {DC_BFLOAT16, DC_FLOAT32},
                                     {DC_FLOAT64, DC_FLOAT64},   {DC_INT32, DC_INT8}};
  for (size_t p = 0; p < DC__COUNT(pairs); p++) {
    for (size_t k = 0; k < DC__COUNT(lengths); k++) {
      bool mean = dc__dtype_is_float(pairs[p][1]);
      check(pairs[p][0], pairs[p][1], 3, lengths[k], k % 8, mean, true);
      check(pairs[p][0], pairs[p][1], 4, lengths[k], k % 8, mean, false);
    }
  }
}

static void test_many_ranks(void **state) {
  (void)state;
  for (int32_t n = 2; n <= MOST; n += n < 66 || n == 255 ? 1 : 21) {
    check(DC_FLOAT32, DC_FLOAT32, n, 70, 0, true, false);
    check(DC_BFLOAT16, DC_BFLOAT16, n, 600, 0, true, true);
    check(DC_INT64, DC_INT64, n, 33, 0, false, true);
  }
}

static void test_order(void **state) {
  (void)state;
  /* 2^24 absorbs a 1 that is added alone, but not two that are added together. */
  const float big = 0x1p24f;
  const float ranks[5] = {big, 1, 1, 1, 1};
  const void *src[5];
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    float in[5][32];
    float out[32];
    for (int32_t k = 0; k < 5; k++) {
      for (int32_t i = 0; i < 32; i++) {
        in[k][i] = ranks[k];
      }
      src[k] = in[k];
    }
    dc__reduction r = {.dst = out, .src = src, .count = 32, .dst_dtype = DC_FLOAT32, .src_dtype = DC_FLOAT32, .n = 3};
    dc__reduce(&r);
    assert_true(out[0] == big && out[31] == big); /* (b+1)+1 */
    r.n = 4;
    dc__reduce(&r);
    assert_true(out[0] == big + 2 && out[31] == big + 2); /* (b+1)+(1+1) */
    r.n = 5;
    dc__reduce(&r);
    assert_true(out[0] == big + 4 && out[31] == big + 4); /* ((b+1)+(1+1))+1, to even */
  }
}

static void test_mean_of_large_halves(void **state) {
  (void)state;
  uint16_t in[4][40];
  uint16_t out[40];
  const void *src[4];
  for (int32_t k = 0; k < 4; k++) {
    for (int64_t i = 0; i < 40; i++) {
      put(in[k], DC_FLOAT16, i, (value){6e4, 0, true});
    }
    src[k] = in[k];
  }
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    dc__reduction r = {
        .dst = out, .src = src, .count = 40, .dst_dtype = DC_FLOAT16, .src_dtype = DC_FLOAT16, .n = 4, .mean = true};
    dc__reduce(&r);
    assert_memory_equal(out, in[0], sizeof out);
    r.mean = false;
    dc__reduce(&r);
    assert_true(isinf(get(out, DC_FLOAT16, 0).f) && isinf(get(out, DC_FLOAT16, 39).f));
  }
}

static void test_in_place(void **state) {
  (void)state;
  enum { LENGTH = 1337 };
  for (size_t t = 0; t < DTYPES; t++) {
    int32_t dtype = dtypes[t];
    bool mean = dc__dtype_is_float(dtype);
    for (int32_t n = 1; n <= 12; n++) {
      guarded blocks[12];
      const void *src[12];
      guarded expected = guarded_make(dtype, LENGTH, 0);
      for (int32_t k = 0; k < n; k++) {
        blocks[k] = guarded_make(dtype, LENGTH, 0);
        fill(blocks[k].data, dtype, LENGTH);
        src[k] = blocks[k].data;
      }
      reference_reduce(expected.data, dtype, src, n, dtype, LENGTH, mean, false);
      guarded kept = guarded_make(dtype, LENGTH, 0);
      memcpy(kept.data, src[n / 2], kept.bytes);
      for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
        dc__kernels_limit(level);
        void *dst = blocks[n / 2].data;
        memcpy(dst, kept.data, kept.bytes);
        dc__reduce(&(dc__reduction){
            .dst = dst, .src = src, .count = LENGTH, .dst_dtype = dtype, .src_dtype = dtype, .n = n, .mean = mean});
        assert_same(dst, expected.data, dtype, LENGTH, "dc__reduce in place");
      }
      for (int32_t k = 0; k < n; k++) {
        guarded_free(&blocks[k]);
      }
      guarded_free(&expected);
      guarded_free(&kept);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_pairs),
      cmocka_unit_test(test_lengths),
      cmocka_unit_test(test_many_ranks),
      cmocka_unit_test(test_order),
      cmocka_unit_test(test_mean_of_large_halves),
      cmocka_unit_test(test_in_place),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
