/* Shared by the tests of symmetric matrices on the device. */
#ifndef TESTS_EIGH_PAIR_H
#define TESTS_EIGH_PAIR_H

#include "device_pair.h"

#ifdef CUDASIM_TSAN /* it makes kernels slow, and fewer cases show the same barriers */
enum { EVERY = 3, SIZE = 12, FAILING = 12 };
#else
enum { EVERY = 1, SIZE = 35, FAILING = 1 };
#endif

enum { KINDS = 4, MANY = 34 };

static inline dc_spectral_options defaults(void) {
  dc_spectral_options o = DC_SPECTRAL_OPTIONS_INIT;
  return o;
}

/* Positive semidefinite matrices of different scales. */
static inline double *spectrum_pair(int64_t count, int64_t n) {
  double *a = calloc((size_t)(count * n * n) + 1, sizeof *a), *values = calloc((size_t)n + 1, sizeof *values);
  for (int64_t b = 0; b < count; b++) {
    for (int64_t i = 0; i < n; i++) {
      const double all[KINDS] = {pow(10, -5.0 * (double)i / (double)n), pow((double)(i + 1), -2), i < 5 ? 1 : 0,
                                 1 + (double)i};
      values[i] = ldexp(all[b % KINDS], (int)(b % 7) - 2);
    }
    with_spectrum(a + b * n * n, n, values, 17 + (uint64_t)b);
  }
  free(values);
  return a;
}

static inline void compare_info(dc_spectral_info info[2][40], int64_t count, double largest) {
  for (int64_t i = 0; i < count; i++) {
    const dc_spectral_info *a = &info[0][i], *b = &info[1][i];
    const double size = fmax(fabs(a->largest), fabs(a->smallest));
    assert_int_equal(a->status, b->status);
    assert_int_equal(a->path, b->path);
    assert_true(a->asymmetry == b->asymmetry);
    assert_true(fabs(a->epsilon - b->epsilon) <= largest * a->epsilon);
    assert_true(fabs(a->largest - b->largest) <= largest * size && fabs(a->smallest - b->smallest) <= largest * size);
  }
}

static dc_spectral_info info[2][40];

static inline double *host_copy(const tensor_pair *w) {
  char *raw = calloc(1, w->bytes + 1);
  double *values = calloc((size_t)w->count + 1, sizeof *values);
  copy(raw, w->data[1], w->bytes);
  dc__cast(values, DC_FLOAT64, raw, w->t[0].dtype, w->t[0].dtype == DC_FLOAT64 ? 0 : w->count);
  if (w->t[0].dtype == DC_FLOAT64) {
    memcpy(values, raw, w->bytes);
  }
  free(raw);
  return values;
}

#endif
