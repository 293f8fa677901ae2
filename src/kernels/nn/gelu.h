/* GELU and its derivative for one element. Without contraction, the bits are the same everywhere. */
#ifndef DC_KERNELS_GELU_H
#define DC_KERNELS_GELU_H

#include "kernels/elementwise/convert.h"
#include "kernels/nn/erf.h"

#define DC__ELEMENT static inline __attribute__((always_inline))

/* e^x within 2 ulp; 0 below -87.34, infinity above 88.72, NaN for any NaN. Cody and Waite's reduction and Cephes'
 * polynomial. */
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
  /* Times 2^n: p's exponent grows by n, the only remaining bits of `shifted`. If n is 128, p is below 1. */
  float y = dc__f32_of_bits(dc__bits_of_f32(p) + (dc__bits_of_f32(shifted) << 23));
  y = x < -87.33654f ? 0.0f : y;
  /* The sum of exponents would turn NaN into a number. */
  return !(x <= 88.72283f) ? x + dc__f32_of_bits(0x7f800000u) : y;
}

DC__ELEMENT float multiply_add(float a, float b, float c) {
  return a * b + c;
}

/* Exactly 1 or -1 beyond DC__ERF_END, so that GELU of a large negative number is 0. */
DC__ELEMENT float erf_f32(float x) {
  float at = x > DC__ERF_END ? DC__ERF_END : x;
  at = at < -DC__ERF_END ? -DC__ERF_END : at;
  float s = at * at;
  float p;
  float q;
  DC__ERF_P(p, s, multiply_add);
  DC__ERF_Q(q, s, multiply_add);
  float y = x > DC__ERF_END ? 1.0f : at * p / q;
  return x < -DC__ERF_END ? -1.0f : y;
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
