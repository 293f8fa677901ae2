/* Shared by the tests of second-order operators: a handle, tensors, matrices with known spectra. */
#ifndef LINALG_TEST_H
#define LINALG_TEST_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dc_api.h"

static dc_device *device;
static dc_linalg *linalg; /* with two threads */

static inline dc_linalg *open_linalg(int32_t threads, int32_t plain) {
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  dc_linalg *made;
  options.threads = threads;
  options.plain = plain;
  assert_int_equal(dc_linalg_create(device, &options, &made), DC_OK);
  return made;
}

static inline int set_up(void **state) {
  (void)state;
  if (dc_device_open("cpu", NULL, &device) != DC_OK) {
    return -1;
  }
  linalg = open_linalg(2, 0);
  return 0;
}

static inline int tear_down(void **state) {
  (void)state;
  dc_linalg_destroy(linalg);
  dc_device_destroy(device);
  return 0;
}

/* A contiguous tensor of up to four dimensions. Its shape is in a ring buffer that a few calls do not overrun. */
static inline dc_tensor tensor_of(void *data, int32_t dtype, int32_t ndim, int64_t a, int64_t b, int64_t c, int64_t d) {
  static _Thread_local int64_t shapes[64][4];
  static _Thread_local int next;
  int64_t *shape = shapes[next++ % 64];
  const int64_t lengths[4] = {a, b, c, d};
  memcpy(shape, lengths, sizeof lengths);
  dc_tensor t = DC_TENSOR_INIT;
  t.data = data;
  t.shape = shape;
  t.ndim = ndim;
  t.dtype = dtype;
  return t;
}

static inline dc_tensor vector(void *data, int32_t dtype, int64_t n) {
  return tensor_of(data, dtype, 1, n, 0, 0, 0);
}

static inline dc_tensor matrix(void *data, int32_t dtype, int64_t rows, int64_t cols) {
  return tensor_of(data, dtype, 2, rows, cols, 0, 0);
}

static inline dc_tensor batch(void *data, int32_t dtype, int64_t count, int64_t rows, int64_t cols) {
  return tensor_of(data, dtype, 3, count, rows, cols, 0);
}

/* Numbers in [-1, 1), the same in every run. */
static inline double number(uint64_t *seed) {
  *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (double)(int64_t)(*seed >> 32) / 2147483648.0 - 1;
}

static inline double *doubles(int64_t count, uint64_t seed) {
  double *x = calloc((size_t)count + 1, sizeof *x);
  for (int64_t i = 0; i < count; i++) {
    x[i] = number(&seed);
  }
  return x;
}

/* Q diag(values) Q^T with Q a product of n reflections: symmetric to the last bit. */
static inline void with_spectrum(double *a, int64_t n, const double *values, uint64_t seed) {
  double *v = doubles(n, 0), *p = doubles(n, 0);
  memset(a, 0, (size_t)(n * n) * sizeof *a);
  for (int64_t i = 0; i < n; i++) {
    a[i * n + i] = values[i];
  }
  for (int64_t round = 0; round < 8 && n > 1; round++) {
    double vv = 0, vp = 0;
    for (int64_t i = 0; i < n; i++) {
      v[i] = number(&seed);
      vv += v[i] * v[i];
    }
    for (int64_t i = 0; i < n; i++) {
      p[i] = 0;
      for (int64_t j = 0; j < n; j++) {
        p[i] += a[i * n + j] * v[j] * 2 / vv;
      }
      vp += v[i] * p[i];
    }
    for (int64_t i = 0; i < n; i++) {
      for (int64_t j = 0; j <= i; j++) {
        a[i * n + j] += 2 * vp / vv * v[i] * v[j] - v[i] * p[j] - p[i] * v[j];
        a[j * n + i] = a[i * n + j];
      }
    }
  }
  free(v);
  free(p);
}

static inline void multiply(const double *a, const double *b, double *c, int64_t m, int64_t k, int64_t n) {
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j < n; j++) {
      double sum = 0;
      for (int64_t p = 0; p < k; p++) {
        sum += a[i * k + p] * b[p * n + j];
      }
      c[i * n + j] = sum;
    }
  }
}

static inline double largest_gap(const double *a, const double *b, int64_t count) {
  double gap = 0;
  for (int64_t i = 0; i < count; i++) {
    double now = fabs(a[i] - b[i]);
    gap = now > gap || now != now ? now : gap;
  }
  return gap;
}

#define OK(call)                                                             \
  do {                                                                       \
    if ((call) != DC_OK) {                                                   \
      fail_msg("%s:%d: %s: %s", __FILE__, __LINE__, #call, dc_last_error()); \
    }                                                                        \
  } while (0)

/* The call must fail with this status and a text that has this fragment. */
#define FAILS(call, status, text)                                                                         \
  do {                                                                                                    \
    dc_status status_ = (call);                                                                           \
    if (status_ != (status) || strstr(dc_last_error(), (text)) == NULL) {                                 \
      fail_msg("%s:%d: %s: %s: %s", __FILE__, __LINE__, #call, dc_status_name(status_), dc_last_error()); \
    }                                                                                                     \
  } while (0)

#endif
