/* The optimizers' elementwise work: every level gives the bits of plain C, wherever an element lies; numbers that are
 * not finite are found at every place. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"

enum { MOST = 301, HIGHEST_LEVEL = 3 };

static float g[MOST];

typedef struct results {
  float w[5][MOST], m[MOST], v[MOST], most[MOST], b[MOST], scaled[MOST], followed[MOST];
} results;

/* Numbers that are a function of the place alone. */
static void fill(float *x, int64_t count, uint64_t seed) {
  for (int64_t i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    x[i] = (float)(int32_t)(seed >> 32) * 0x1p-31f;
  }
}

static void compute(results *r, int64_t from, int64_t n) {
  const dc__adamw_factors adamw = {0.9f, 0.1f, 0.999f, 0.001f, 0.9999f, 1e-2f, 1.01f, 1e-8f};
  const dc__sgd_factors sgd = {.lr = 0.1f, .weight_decay = 0.01f, .sign = 1, .keep = 0.9f, .add = 0.5f, .look = 0.9f};
  dc__sgd_factors plain = sgd;
  plain.look = 0;
  memset(r, 0, sizeof *r);
  for (int64_t i = 0; i < 5; i++) {
    fill(r->w[i], MOST, (uint64_t)i);
  }
  fill(r->m, MOST, 11);
  fill(r->v, MOST, 12);
  for (int64_t i = 0; i < MOST; i++) {
    r->v[i] = fabsf(r->v[i]);
  }
  fill(g, MOST, 13);
  dc__update_adamw(r->w[0] + from, r->m + from, r->v + from, NULL, g + from, n, &adamw);
  dc__update_adamw(r->w[1] + from, r->m + from, r->v + from, r->most + from, g + from, n, &adamw);
  dc__update_sgd(r->w[2] + from, NULL, g + from, n, &sgd);
  dc__update_sgd(r->w[3] + from, r->b + from, g + from, n, &sgd);
  dc__update_sgd(r->w[4] + from, r->b + from, g + from, n, &plain);
  dc__update_scale(r->scaled + from, g + from, n, 0.3f);
  memcpy(r->followed, r->w[0], sizeof r->followed);
  r->followed[MOST / 2] = 5;
  dc__update_follow(r->followed + from, r->w[0] + from, r->w[1] + from, n);
}

static void test_levels(void **state) {
  (void)state;
  static const int64_t counts[] = {1, 7, 8, 15, 16, 17, 64, 127, 129, MOST};
  static results plain, fast;
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    for (size_t c = 0; c < DC__COUNT(counts); c++) {
      dc__kernels_limit(0);
      compute(&plain, 0, counts[c]);
      dc__kernels_limit(level);
      compute(&fast, 0, counts[c]);
      assert_memory_equal(&plain, &fast, sizeof plain);
    }
    compute(&plain, 0, MOST);
    for (int64_t from = 1; from < 40; from += 3) { /* the same elements elsewhere in a vector */
      compute(&fast, from, MOST - from - 5);
      for (int64_t i = 0; i < 5; i++) {
        assert_memory_equal(plain.w[i] + from, fast.w[i] + from, (size_t)(MOST - from - 5) * sizeof(float));
      }
    }
  }
}

static void test_finite(void **state) {
  (void)state;
  static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
  float x[100];
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (int64_t n = 0; n <= 100; n++) {
      for (int64_t i = 0; i < n; i++) {
        x[i] = i % 2 == 0 ? 3.4e38f : -1e-45f;
      }
      assert_true(dc__update_below(x, n, 128));
      for (int64_t i = 0; i < n; i += 7) {
        float kept = x[i];
        x[i] = bad[i % 4];
        assert_false(dc__update_below(x, n, 128));
        x[i] = kept;
      }
    }
  }
}

static void test_definition(void **state) {
  (void)state;
  const dc__adamw_factors f = {0.5f, 0.25f, 0.75f, 0.5f, 0.5f, 2, 4, 1};
  float w = 8, m = 4, v = 8, most = 16, g0 = 2;
  dc__update_adamw(&w, &m, &v, NULL, &g0, 1, &f);
  assert_true(m == 2.5f && v == 8 && fabsf(w - (4 - 5 / (sqrtf(8) * 4 + 1))) < 1e-6f);
  w = 8;
  dc__update_adamw(&w, &m, &v, &most, &g0, 1, &f);
  assert_true(m == 1.75f && most == 16 && fabsf(w - (4 - 3.5f / 17)) < 1e-6f);
  v = NAN;
  dc__update_adamw(&w, &m, &v, &most, &g0, 1, &f);
  assert_true(isnan(most)); /* a NaN is not lost */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_levels),
      cmocka_unit_test(test_finite),
      cmocka_unit_test(test_definition),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
