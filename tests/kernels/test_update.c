/* The optimizers' elementwise work: every level has the bits of the definition, whatever an element's position and
 * type. Numbers that are not finite are found at every position. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"

enum { MOST = 301, HIGHEST_LEVEL = DC__KERNELS_LEVELS - 1 };

static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT16, DC_BFLOAT16};

/* Numbers that depend only on their position. Some are special in one of the types: not finite, subnormal, halfway
 * between two 16-bit numbers, or too large. */
static float number(int64_t i, uint64_t seed) {
  static const float special[] = {NAN,      INFINITY, -INFINITY,   0.0f,        -0.0f,          1e-45f,
                                  -1e-39f,  0x1p-24f, 0x1p-25f,    6e-8f,       65519.0f,       65520.0f,
                                  3.39e38f, 3.4e38f,  1.00390625f, 1.01171875f, 1.00048828125f, -1.00146484375f};
  seed = (seed + (uint64_t)i * 2654435761u) * 6364136223846793005u + 1442695040888963407u;
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return seed >> 60 == 0 ? special[(seed >> 32) % DC__COUNT(special)] : (float)(int32_t)(seed >> 32) * 0x1p-31f;
}

static void put(void *array, int32_t dtype, int64_t i, float x) {
  if (dtype == DC_FLOAT32) {
    ((dc__f32 *)array)[i] = x;
  } else {
    ((dc__half *)array)[i] = dtype == DC_FLOAT16 ? dc__f16_of_f32(x) : dc__bf16_of_f32(x);
  }
}

static float get(const void *array, int32_t dtype, int64_t i) {
  if (dtype == DC_FLOAT32) {
    return ((const dc__f32 *)array)[i];
  }
  const uint16_t half = ((const dc__half *)array)[i];
  return dtype == DC_FLOAT16 ? dc__f32_of_f16(half) : dc__f32_of_bf16(half);
}

/* A span's memory. Weights and gradients begin `shift` bytes behind a multiple of 64. */
typedef struct arrays {
  _Alignas(64) char weight[MOST * 4 + 64];
  _Alignas(64) char grad[MOST * 4 + 64];
  float master[MOST], state[3][MOST];
} arrays;

typedef struct plan {
  int32_t kind, dtype, grad_dtype, states;
  float scale;
  size_t shift;
  dc__update_factors factors;
} plan;

static dc__update_span span_of(const plan *p, arrays *a) {
  dc__update_span s = {.weight = a->weight + p->shift,
                       .grad = a->grad + p->shift,
                       .master = p->dtype == DC_FLOAT32 ? NULL : a->master,
                       .count = MOST,
                       .dtype = p->dtype,
                       .grad_dtype = p->grad_dtype,
                       .factors = p->factors};
  for (int32_t k = 0; k < p->states; k++) {
    s.state[k] = a->state[k];
  }
  return s;
}

/* Weights are rounded from their masters, except every fifth, which the caller has changed. */
static void fill(const plan *p, arrays *a) {
  memset(a, 0, sizeof *a);
  for (int64_t i = 0; i < MOST; i++) {
    a->master[i] = number(i, 1);
    put(a->weight + p->shift, p->dtype, i, i % 5 == 0 ? number(i, 2) : a->master[i]);
    put(a->grad + p->shift, p->grad_dtype, i, number(i, 3));
    for (int64_t k = 0; k < 3; k++) {
      a->state[k][i] = k == 0 ? number(i, 4) : fabsf(number(i, (uint64_t)(4 + k)));
    }
  }
}

static float adamw(const dc__adamw_factors *f, const dc__update_span *s, int64_t i, float w, float g) {
  float m = s->state[0][i] = dc__adamw_mean(s->state[0][i], g, f);
  float v = s->state[1][i] = dc__adamw_square(s->state[1][i], g, f);
  if (s->state[2] != NULL) {
    v = s->state[2][i] = dc__adamw_max(s->state[2][i], v);
  }
  return dc__adamw_weight(w, m, v, f);
}

static float sgd(const dc__sgd_factors *f, const dc__update_span *s, int64_t i, float w, float g) {
  const float d = dc__sgd_direction(w, g, f);
  if (s->state[0] == NULL) {
    return w - f->lr * d;
  }
  s->state[0][i] = dc__sgd_momentum(s->state[0][i], d, f);
  return dc__sgd_weight(w, d, s->state[0][i], f);
}

/* One element's step, as defined. */
static void define(const plan *p, const dc__update_span *s, int64_t i) {
  const float g = get(s->grad, s->grad_dtype, i) * p->scale;
  float w = get(s->weight, s->dtype, i);
  if (s->master != NULL) {
    char rounded[4];
    put(rounded, s->dtype, 0, s->master[i]);
    w = dc__synced_master(s->master[i], get(rounded, s->dtype, 0), w);
  }
  w = p->kind == DC__UPDATE_ADAMW ? adamw(&p->factors.adamw, s, i, w, g) : sgd(&p->factors.sgd, s, i, w, g);
  if (s->master != NULL) {
    s->master[i] = w;
  }
  put(s->weight, s->dtype, i, w);
}

/* Whether the bits are the same. Of NaNs only that both are NaN, since two operands may give different ones. */
static bool same(float x, float y) {
  return dc__bits_of_f32(x) == dc__bits_of_f32(y) || (isnan(x) && isnan(y));
}

static void check_same(const plan *p, const dc__update_span *x, const dc__update_span *y) {
  for (int64_t i = 0; i < MOST; i++) {
    assert_true(same(get(x->weight, p->dtype, i), get(y->weight, p->dtype, i)));
    assert_true(x->master == NULL || same(x->master[i], y->master[i]));
    for (int32_t k = 0; k < p->states; k++) {
      assert_true(same(x->state[k][i], y->state[k][i]));
    }
  }
}

static void check_plan(const plan *p) {
  static const int64_t counts[] = {1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129, 192, MOST};
  static arrays want, got;
  for (size_t c = 0; c < DC__COUNT(counts); c++) {
    const int64_t from = c % 2 == 0 ? 0 : MOST - counts[c]; /* the same elements at other positions in a vector */
    const dc__update_span x = span_of(p, &want), y = span_of(p, &got);
    fill(p, &want);
    fill(p, &got);
    for (int64_t i = from; i < from + counts[c]; i++) {
      define(p, &x, i);
    }
    dc__update_cpu(p->kind, &y, from, counts[c], p->scale);
    check_same(p, &x, &y);
  }
}

/* AdamW without and with amsgrad; SGD without and with momentum, and with Nesterov's. */
static const plan plans[] = {
    {.kind = DC__UPDATE_ADAMW,
     .states = 2,
     .factors.adamw = {0.9f, 0.1f, 0.999f, 0.001f, 0.9999f, 1e-2f, 1.01f, 1e-8f}},
    {.kind = DC__UPDATE_ADAMW, .states = 3, .factors.adamw = {0.9f, -0.1f, 0.99f, 0.01f, 1, 1e-2f, 1.01f, 0}},
    {.kind = DC__UPDATE_SGD, .states = 0, .factors.sgd = {0.1f, 0.01f, 1, 0, 1, 0}},
    {.kind = DC__UPDATE_SGD, .states = 1, .factors.sgd = {0.1f, 0.01f, -1, 0.9f, 0.5f, 0}},
    {.kind = DC__UPDATE_SGD, .states = 1, .factors.sgd = {0.1f, 0, 1, 0.9f, 1, 0.9f}},
};

static void test_levels(void **state) {
  (void)state;
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (size_t n = 0; n < DC__COUNT(plans) * 9 * 2 * 2; n++) {
      plan p = plans[n % DC__COUNT(plans)];
      const size_t rest = n / DC__COUNT(plans);
      p.dtype = dtypes[rest % 3];
      p.grad_dtype = dtypes[rest / 3 % 3];
      p.scale = rest / 9 % 2 == 0 ? 1 : 0.3f;
      p.shift = rest / 18 == 0 ? 0 : 3; /* not a multiple of an element's size */
      check_plan(&p);
    }
  }
}

static void test_conversions(void **state) {
  (void)state;
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (size_t d = 0; d < DC__COUNT(dtypes); d++) {
      char from[MOST * 4];
      float read[MOST], master[MOST];
      for (int64_t i = 0; i < MOST; i++) {
        put(from, dtypes[d], i, number(i, 5));
        master[i] = number(i, i % 3 == 0 ? 6 : 5);
      }
      dc__update_read(read, from, dtypes[d], MOST, 0.3f);
      for (int64_t i = 0; i < MOST; i++) {
        assert_true(same(read[i], get(from, dtypes[d], i) * 0.3f));
      }
      for (int64_t i = 0; i < MOST && dtypes[d] != DC_FLOAT32; i++) {
        float own = number(i, i % 3 == 0 ? 6 : 5);
        char rounded[4];
        put(rounded, dtypes[d], 0, own);
        read[i] = dc__synced_master(own, get(rounded, dtypes[d], 0), get(from, dtypes[d], i));
      }
      if (dtypes[d] != DC_FLOAT32) {
        dc__update_sync_master(master, from, dtypes[d], MOST);
        assert_memory_equal(master, read, sizeof master);
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
      assert_true(dc__update_is_below(x, n, 128));
      for (int64_t i = 0; i < n; i += 7) {
        float kept = x[i];
        x[i] = bad[i % 4];
        assert_false(dc__update_is_below(x, n, 128));
        x[i] = kept;
      }
    }
  }
}

static void test_definition(void **state) {
  (void)state;
  float w = 8, m = 4, v = 8, most = 16, g = 2;
  dc__update_span s = {.weight = &w,
                       .grad = &g,
                       .state = {&m, &v},
                       .dtype = DC_FLOAT32,
                       .grad_dtype = DC_FLOAT32,
                       .factors.adamw = {0.5f, 0.25f, 0.75f, 0.5f, 0.5f, 2, 4, 1}};
  dc__update_cpu(DC__UPDATE_ADAMW, &s, 0, 1, 1);
  assert_true(m == 2.5f && v == 8 && fabsf(w - (4 - 5 / (sqrtf(8) * 4 + 1))) < 1e-6f);
  w = 8;
  s.state[2] = &most;
  dc__update_cpu(DC__UPDATE_ADAMW, &s, 0, 1, 1);
  assert_true(m == 1.75f && most == 16 && fabsf(w - (4 - 3.5f / 17)) < 1e-6f);
  v = NAN;
  dc__update_cpu(DC__UPDATE_ADAMW, &s, 0, 1, 1);
  assert_true(isnan(most)); /* a NaN must be kept */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_levels),
      cmocka_unit_test(test_conversions),
      cmocka_unit_test(test_finite),
      cmocka_unit_test(test_definition),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
