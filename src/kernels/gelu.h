/* GELU and its derivative for one element. Without contraction, the bits are the same everywhere. */
#ifndef DC_KERNELS_GELU_H
#define DC_KERNELS_GELU_H

#include "kernels/convert.h"

#define DC__ELEMENT static inline __attribute__((always_inline))

/* e^x within 2 ulp; 0 below -87.34, infinity above 88.72. Cody and Waite's reduction and Cephes' polynomial. */
DC__ELEMENT float exp_f32(float x) {
  float at = x < -88.0f ? -88.0f : x;
  at = at > 89.0f ? 89.0f : at;
  float shifted = at * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum's low bits are the nearest integer */
  float n = shifted - 12582912.0f;
  float r = at - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  /* Times 2^n: p's exponent grows by n, which is all that is left of `shifted`. Where n is 128, p is below 1. */
  float y = dc__f32_of_bits(dc__bits_of_f32(p) + (dc__bits_of_f32(shifted) << 23));
  y = x < -87.33654f ? 0.0f : y;
  return x > 88.72283f ? dc__f32_of_bits(0x7f800000u) : y;
}

/* Eigen's rational approximation; within 2 ulp. */
DC__ELEMENT float erf_f32(float x) {
  float at = x > 3.8325069f ? 3.8325069f : x;
  at = at < -3.8325069f ? -3.8325069f : at;
  float s = at * at;
  float p = -2.72614225801306e-10f;
  p = p * s + 2.77068142495902e-08f;
  p = p * s + -2.10102402082508e-06f;
  p = p * s + -5.69250639462346e-05f;
  p = p * s + -7.34990630326855e-04f;
  p = p * s + -2.95459980854025e-03f;
  p = p * s + -1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * s + -2.13374055278905e-04f;
  q = q * s + -1.68282697438203e-03f;
  q = q * s + -7.37332916720468e-03f;
  q = q * s + -1.42647390514189e-02f;
  /* Exactly 1 from there on, so that GELU of a large negative number is 0. */
  float y = x > 3.8325069f ? 1.0f : at * p / q;
  return x < -3.8325069f ? -1.0f : y;
}

#define GELU_K 0.7978845608f /* sqrt(2 / pi) */

DC__ELEMENT float gelu_tanh(float x) { /* (1 + tanh u) / 2 = 1 / (1 + e^-2u) */
  float u = GELU_K * (x + 0.044715f * x * x * x);
  return x / (1.0f + exp_f32(-2.0f * u));
}
DC__ELEMENT float gelu_erf(float x) {
  return 0.5f * x * (1.0f + erf_f32(x * 0.70710678f));
}
/* Beyond 20 the derivative is 1 or 0, and squares would overflow. */
DC__ELEMENT float clamp20(float x) {
  float y = x > 20.0f ? 20.0f : x;
  return y < -20.0f ? -20.0f : y;
}
DC__ELEMENT float gelu_tanh_slope(float a) {
  float x = clamp20(a);
  float u = GELU_K * (x + 0.044715f * x * x * x);
  float s = 1.0f / (1.0f + exp_f32(-2.0f * u));
  return s + x * (2.0f * s * (1.0f - s)) * (GELU_K * (1.0f + 0.134145f * x * x));
}
DC__ELEMENT float gelu_erf_slope(float a) {
  float x = clamp20(a);
  return 0.5f * (1.0f + erf_f32(x * 0.70710678f)) + x * (0.39894228f * exp_f32(-0.5f * x * x));
}

#endif
