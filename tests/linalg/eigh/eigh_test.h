/* Shared by the tests of symmetric matrices. */
#ifndef TESTS_EIGH_TEST_H
#define TESTS_EIGH_TEST_H

#include "linalg_test.h"

enum { N = 24 };

static inline dc_spectral_options defaults(void) {
  dc_spectral_options o = DC_SPECTRAL_OPTIONS_INIT;
  return o;
}

static inline dc_status power_of(void *a, void *out, int64_t n, int32_t dtype, double power, dc_spectral_options *o,
                                 dc_spectral_info *info) {
  dc_tensor ta = matrix(a, dtype, n, n), to = matrix(out, dtype, n, n);
  return dc_matrix_power(linalg, &ta, power, o, &to, info, sizeof *info);
}

static inline void spread_spectrum(double *a, int64_t n, uint64_t seed) {
  double values[64];
  for (int64_t i = 0; i < n; i++) {
    values[i] = pow(10, -4.0 * (double)i / (double)n);
  }
  with_spectrum(a, n, values, seed);
}

#endif
