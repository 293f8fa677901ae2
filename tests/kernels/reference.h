/* The results that the kernels must give, computed one element at a time and by other means: 16-bit types by arithmetic
 * in double, not on bits. Also arrays with random and difficult values between guard bytes. */
#ifndef DC_TESTS_KERNELS_REFERENCE_H
#define DC_TESTS_KERNELS_REFERENCE_H

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"

enum { GUARD = 64, DTYPES = 7, HIGHEST_LEVEL = DC__KERNELS_LEVELS - 1 };

static const int32_t dtypes[DTYPES] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16, DC_INT8, DC_INT32, DC_INT64};
static const int64_t lengths[] = {0, 1, 2, 7, 15, 16, 17, 31, 33, 1000, 4097};

/* An element of any type; f holds floats, i integers. */
typedef struct value {
  double f;
  int64_t i;
  bool is_float;
} value;

static inline uint64_t random_bits(void) {
  static uint64_t state = 0x9e3779b97f4a7c15u;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state * 0x2545f4914f6cdd1du;
}

/* ---- 16-bit types: `fraction` bits after the point, exponents from `least` on ---- */

static inline double value_of_half(uint16_t bits, int fraction, int least) {
  int field = (bits & 0x7fff) >> fraction;
  int mantissa = bits & ((1 << fraction) - 1);
  double x = 0;
  if (field == (1 << (15 - fraction)) - 1) {
    x = mantissa != 0 ? (double)NAN : (double)INFINITY;
  } else if (field == 0) {
    x = ldexp(mantissa, least - fraction);
  } else {
    x = ldexp(mantissa + (1 << fraction), least + field - 1 - fraction);
  }
  return (bits & 0x8000) != 0 ? -x : x;
}

static inline uint16_t half_of_value(double x, int fraction, int least) {
  int infinite = ((1 << (15 - fraction)) - 1) << fraction;
  int sign = signbit(x) ? 0x8000 : 0;
  double a = fabs(x);
  if (isnan(x)) {
    return (uint16_t)(sign | infinite | (1 << (fraction - 1)));
  }
  if (isinf(x) || x == 0) {
    return (uint16_t)(sign | (x == 0 ? 0 : infinite));
  }
  int exponent = 0;
  frexp(a, &exponent); /* a in [2^(exponent-1), 2^exponent) */
  int unit = (exponent - 1 > least ? exponent - 1 : least) - fraction;
  double rounded = nearbyint(ldexp(a, -unit)); /* to nearest even; at most 2^(fraction+1) */
  int bits = (int)rounded + ((unit - (least - fraction)) << fraction);
  return (uint16_t)(sign | (bits < infinite ? bits : infinite));
}

/* ---- elements ---- */

static inline value get(const void *array, int32_t dtype, int64_t i) {
  const char *at = (const char *)array + (size_t)i * dc_dtype_size(dtype);
  value v = {0, 0, dc__dtype_is_float(dtype)};
  float f = 0;
  uint16_t half = 0;
  int8_t i8 = 0;
  int32_t i32 = 0;
  switch (dtype) {
    case DC_FLOAT32:
      memcpy(&f, at, sizeof f);
      v.f = (double)f;
      break;
    case DC_FLOAT64:
      memcpy(&v.f, at, sizeof v.f);
      break;
    case DC_FLOAT16:
      memcpy(&half, at, sizeof half);
      v.f = value_of_half(half, 10, -14);
      break;
    case DC_BFLOAT16:
      memcpy(&half, at, sizeof half);
      v.f = value_of_half(half, 7, -126);
      break;
    case DC_INT8:
      memcpy(&i8, at, sizeof i8);
      v.i = i8;
      break;
    case DC_INT32:
      memcpy(&i32, at, sizeof i32);
      v.i = i32;
      break;
    default:
      memcpy(&v.i, at, sizeof v.i);
  }
  return v;
}

static inline int64_t integer_of(double x, int64_t low, int64_t high) {
  x = trunc(x);
  if (isnan(x)) {
    return 0;
  }
  return x <= (double)low ? low : x >= (double)high ? high : (int64_t)x;
}

/* dst[i] = (dtype)v */
static inline void put(void *array, int32_t dtype, int64_t i, value v) {
  char *at = (char *)array + (size_t)i * dc_dtype_size(dtype);
  float f = v.is_float ? (float)v.f : (float)v.i;
  double d = v.is_float ? v.f : (double)v.i;
  uint16_t half = 0;
  int8_t i8 = v.is_float ? (int8_t)integer_of(v.f, INT8_MIN, INT8_MAX) : (int8_t)v.i;
  int32_t i32 = v.is_float ? (int32_t)integer_of(v.f, INT32_MIN, INT32_MAX) : (int32_t)v.i;
  int64_t i64 = v.is_float ? integer_of(v.f, INT64_MIN, INT64_MAX) : v.i;
  switch (dtype) {
    case DC_FLOAT32:
      memcpy(at, &f, sizeof f);
      break;
    case DC_FLOAT64:
      memcpy(at, &d, sizeof d);
      break;
    case DC_FLOAT16:
      half = half_of_value((double)f, 10, -14);
      memcpy(at, &half, sizeof half);
      break;
    case DC_BFLOAT16:
      half = half_of_value((double)f, 7, -126);
      memcpy(at, &half, sizeof half);
      break;
    case DC_INT8:
      memcpy(at, &i8, sizeof i8);
      break;
    case DC_INT32:
      memcpy(at, &i32, sizeof i32);
      break;
    default:
      memcpy(at, &i64, sizeof i64);
  }
}

/* a + b in float64 if `wide`, otherwise in float32; integers wrap in 64 bits. */
static inline value plus(value a, value b, bool wide) {
  value sum = {0, 0, a.is_float || b.is_float};
  if (!sum.is_float) {
    sum.i = (int64_t)((uint64_t)a.i + (uint64_t)b.i);
  } else if (wide) {
    sum.f = (a.is_float ? a.f : (double)a.i) + (b.is_float ? b.f : (double)b.i);
  } else {
    float x = a.is_float ? (float)a.f : (float)a.i;
    float y = b.is_float ? (float)b.f : (float)b.i;
    sum.f = (double)(x + y);
  }
  return sum;
}

/* Whether the bits are the same. Two NaNs count as the same, since C does not define their bits after arithmetic. */
static inline bool same(const void *a, const void *b, int32_t dtype, int64_t i) {
  size_t size = dc_dtype_size(dtype);
  if (memcmp((const char *)a + (size_t)i * size, (const char *)b + (size_t)i * size, size) == 0) {
    return true;
  }
  return dc__dtype_is_float(dtype) && isnan(get(a, dtype, i).f) && isnan(get(b, dtype, i).f);
}

static inline void assert_same(const void *a, const void *b, int32_t dtype, int64_t count, const char *what) {
  for (int64_t i = 0; i < count; i++) {
    if (!same(a, b, dtype, i)) {
      value x = get(a, dtype, i);
      value y = get(b, dtype, i);
      fail_msg("%s: level %d, element %" PRId64 " of %" PRId64 ": %a %" PRId64 " is not %a %" PRId64, what,
               (int)dc__kernels_level(), i, count, x.f, x.i, y.f, y.i);
    }
  }
}

/* ---- arrays ---- */

/* Random bits, small numbers for sums, and the edge values of every type. */
static inline void fill(void *array, int32_t dtype, int64_t count) {
  static const double edges[] = {0.0,
                                 -0.0,
                                 0.5,
                                 -0.5,
                                 1.5,
                                 2.5,
                                 127.5,
                                 -128.5,
                                 65504.0,
                                 65519.99,
                                 65520.0,
                                 -65536.0,
                                 6e4,
                                 0x1p-24,
                                 0x1p-25,
                                 0x1.8p-25,
                                 0x1p-14,
                                 0x1p-126,
                                 0x1p-133,
                                 0x1.8p-134,
                                 0x1p-149,
                                 0x1.fffffep127,
                                 0x1.ffp127,
                                 0x1p31,
                                 -0x1p31,
                                 2147483647.0,
                                 0x1p63,
                                 -0x1p63,
                                 0x1.fffffffffffffp62,
                                 1e300,
                                 (double)INFINITY,
                                 -(double)INFINITY,
                                 (double)NAN};
  size_t size = dc_dtype_size(dtype);
  for (int64_t i = 0; i < count; i++) {
    uint64_t bits = random_bits();
    uint64_t kind = bits >> 61;
    if (kind < 3) {
      memcpy((char *)array + (size_t)i * size, &bits, size);
    } else if (kind < 6) {
      put(array, dtype, i, (value){(double)(int32_t)bits * 0x1p-24, 0, true});
    } else {
      put(array, dtype, i, (value){edges[bits % DC__COUNT(edges)], 0, true});
    }
  }
}

/* count elements, `shift` bytes behind an aligned address, with guard bytes on both sides. */
typedef struct guarded {
  unsigned char *block;
  void *data;
  size_t bytes;
} guarded;

static inline guarded guarded_make(int32_t dtype, int64_t count, size_t shift) {
  guarded g = {NULL, NULL, (size_t)count * dc_dtype_size(dtype)};
  g.block = malloc(g.bytes + 2 * GUARD + shift);
  assert_non_null(g.block);
  memset(g.block, 0xa5, g.bytes + 2 * GUARD + shift);
  g.data = g.block + GUARD + shift;
  return g;
}

static inline void guarded_free(guarded *g) {
  for (unsigned char *p = g->block; p < (unsigned char *)g->data; p++) {
    assert_int_equal(*p, 0xa5);
  }
  for (size_t i = 0; i < GUARD; i++) {
    assert_int_equal(((unsigned char *)g->data)[g->bytes + i], 0xa5);
  }
  free(g->block);
}

#endif
