/* The rows of the transformer layer: every level has the bits of plain C, which is close to float64. Philox gives its
 * authors' numbers. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"

enum { MOST = 301, HIGHEST_LEVEL = DC__KERNELS_LEVELS - 1 };

static float x[MOST], z[MOST];

static void fill(float scale) {
  uint64_t seed = 7;
  for (int32_t i = 0; i < MOST; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    x[i] = scale * (float)(int32_t)(seed >> 32) * 0x1p-31f;
    z[i] = scale * (float)(int32_t)(uint32_t)seed * 0x1p-31f;
  }
}

typedef struct results {
  float gelu[2][MOST], back[2][MOST], normal[MOST], normal_back[MOST], exp[MOST], scaled[MOST], softmax_p[MOST],
      softmax_d[MOST];
  float dropout[MOST], scalars[6];
} results;

static void compute(results *r, int64_t n, float scale) {
  memset(r, 0, sizeof *r);
  fill(scale);
  for (int32_t form = 0; form < 2; form++) {
    dc__gelu(r->gelu[form], x, n, form);
    memcpy(r->back[form], z, sizeof z);
    dc__gelu_backward(r->back[form], x, n, form);
  }
  dc__row_moments(x, n, 1e-5f, &r->scalars[0], &r->scalars[1]);
  dc__row_normalize(r->normal, x, z, x, n, r->scalars[0], r->scalars[1]);
  dc__row_normalize_backward(r->normal_back, z, x, z, n, 0.7f);
  r->scalars[2] = dc__row_max(x, n);
  memcpy(r->exp, x, sizeof x);
  r->scalars[3] = dc__row_exp(r->exp, n, r->scalars[2]);
  memcpy(r->scaled, x, sizeof x);
  dc__row_exp_scaled(r->scaled, n, r->scalars[2], 1 / r->scalars[3]);
  r->scalars[4] = dc__row_dot(x, z, n);
  dc__dropout dropout = {{123, 456}, 6554, 65536.0f / 58982.0f};
  dc__dropout_row(r->dropout, n, 16, 3, 4, &dropout);
  memcpy(r->softmax_p, x, sizeof x);
  memcpy(r->softmax_d, z, sizeof z);
  dc__row_softmax_backward(r->softmax_d, r->softmax_p, r->dropout, n, 0.3f);
}

static void test_levels(void **state) {
  (void)state;
  static const int64_t counts[] = {1, 7, 15, 16, 17, 64, 127, 128, 129, 301};
  for (size_t c = 0; c < DC__COUNT(counts); c++) {
    static results plain, fast;
    for (float scale = 0.1f; scale < 200; scale *= 12) {
      dc__kernels_limit(0);
      compute(&plain, counts[c], scale);
      for (int32_t level = 1; level <= HIGHEST_LEVEL; level++) {
        dc__kernels_limit(level);
        compute(&fast, counts[c], scale);
        assert_memory_equal(&plain, &fast, sizeof plain);
      }
    }
  }
}

static void test_accuracy(void **state) {
  (void)state;
  for (double v = -86.5; v < 88; v += 0.0137) {
    float e = (float)v;
    double want = exp((double)e);
    dc__row_exp(&e, 1, 0);
    assert_true(fabs((double)e - want) <= 2e-7 * want);
  }
  for (double v = -12; v < 12; v += 0.00137) {
    float in = (float)v;
    double at = (double)in;
    for (int32_t form = 0; form < 2; form++) {
      double u = 0.7978845608 * (at + 0.044715 * at * at * at);
      double want = form == DC__GELU_ERF ? 0.5 * at * (1 + erf(at / sqrt(2.0))) : 0.5 * at * (1 + tanh(u));
      float out;
      dc__gelu(&out, &in, 1, form);
      assert_true(fabs((double)out - want) <= 4e-7 * (fabs(want) + 1) * fmax(1, fabs(at)));
    }
  }
}

static void test_specials(void **state) {
  (void)state;
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    float e[] = {-INFINITY, INFINITY, -200, 89, NAN, 0, -87.4f, 88.7f};
    dc__row_exp(e, 8, 0);
    assert_true(e[0] == 0 && e[1] == INFINITY && e[2] == 0 && e[3] == INFINITY && isnan(e[4]) && e[5] == 1);
    assert_true(e[6] == 0 && e[7] > 3e38f && e[7] < INFINITY);
    const uint32_t nans[] = {0x7fc00001, 0x7f800001, 0xffc00000, 0xffffffff,
                             0x7fffffff, 0xff800003, 0x7fc00080, 0x7fc00100};
    float n[DC__COUNT(nans)];
    memcpy(n, nans, sizeof nans);
    assert_true(isnan(dc__row_exp(n, DC__COUNT(nans), 0)));
    for (size_t i = 0; i < DC__COUNT(nans); i++) {
      assert_true(isnan(n[i]));
    }
    for (int32_t form = 0; form < 2; form++) {
      float in[] = {1e4f, -1e4f, NAN, INFINITY, 0, 3e38f, -3e38f};
      float g[] = {1, 1, 1, 1, 1, 1, 1};
      dc__gelu_backward(g, in, 7, form);
      assert_true(g[0] == 1 && fabsf(g[1]) < 1e-6f && isnan(g[2]) && g[3] == 1 && g[4] == 0.5f && g[5] == 1);
      assert_true(fabsf(g[6]) < 1e-6f);
      dc__gelu(in, in, 7, form);
      assert_true(in[0] == 1e4f && in[1] == 0 && isnan(in[2]) && in[3] == INFINITY && in[4] == 0 && in[5] == 3e38f);
    }
    assert_true(dc__row_max(e, 0) == -INFINITY);
  }
}

/* Squares that overflow float32 give no variance; the row must not look like one whose values are all equal. */
static void test_variance_without_a_number(void **state) {
  (void)state;
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    float mean, rstd;
    for (int64_t i = 0; i < MOST; i++) {
      x[i] = 1e30f + 1e27f * (float)i;
    }
    dc__row_moments(x, MOST, 1e-5f, &mean, &rstd);
    assert_true(isnan(rstd) && fabsf(mean / x[MOST / 2] - 1) < 1e-3f);
    x[MOST / 2] = NAN;
    dc__row_moments(x, MOST, 1e-5f, &mean, &rstd);
    assert_true(isnan(rstd) && isnan(mean));
    for (int64_t i = 0; i < MOST; i++) {
      x[i] = 3.7f;
    }
    dc__row_moments(x, MOST, 1e-5f, &mean, &rstd);
    assert_true(mean == 3.7f && rstd == 1.0f / sqrtf(1e-5f));
  }
}

/* kat_vectors of Random123, philox4x32 10; then positions far beyond 2^32 elements. layer: 13, 16 */
static void test_philox(void **state) {
  (void)state;
  static const uint32_t vectors[3][10] = {
      {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
      {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
      {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
       0x24126ea1}};
  for (int32_t v = 0; v < 3; v++) {
    uint32_t out[4];
    dc__philox(out, vectors[v], vectors[v] + 4);
    assert_memory_equal(out, vectors[v] + 6, sizeof out);
  }
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    dc__dropout dropout = {{0xdeadbeef, 17}, 20000, 2};
    float m[MOST];
    dc__dropout_row(m, MOST, 40, 0xffffffff, 0x80000001, &dropout);
    for (uint32_t j = 0; j < MOST; j++) {
      uint32_t out[4];
      dc__philox(out, (uint32_t[4]){(40 + j) / 8, 0xffffffff, 0x80000001, 0}, dropout.key);
      uint32_t draw = out[j % 8 / 2] >> (16 * (j % 2)) & 0xffff;
      assert_true(m[j] == (draw < 20000 ? 0 : 2));
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_levels),   cmocka_unit_test(test_accuracy),
      cmocka_unit_test(test_specials), cmocka_unit_test(test_variance_without_a_number),
      cmocka_unit_test(test_philox),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
