/* GELU and its derivative for one element, in kernels: kernels/nn/gelu.h within rounding, by the device's own power of
 * two and reciprocal, which are within 2 ulp and a few instructions. Contraction is explicit, so the bits are the same
 * in every kernel. */
#ifndef DC_KERNELS_CUDA_GELU_H
#define DC_KERNELS_CUDA_GELU_H

#include <math.h>

#include "kernels/cuda/gpu.h"
#include "kernels/nn/erf.h"

namespace {

constexpr float GELU_K = 0.7978845608f; /* sqrt(2 / pi) */

/* 1 / (1 + e^-2u), u = K (x + 0.044715 x^3): half of 1 + tanh u. */
DC_DEVICE float gelu_share(float x) {
  const float power = x * fmaf(-2 * DC_LOG2_E * GELU_K * 0.044715f, x * x, -2 * DC_LOG2_E * GELU_K);
  return dc_reciprocal(1.0f + dc_exp2(power));
}

/* Exactly 1 and -1 beyond the end, so that GELU of a large negative number is 0. */
DC_DEVICE float gelu_erf_f32(float x) {
  const float at = fminf(fmaxf(x, -DC__ERF_END), DC__ERF_END), s = at * at;
  float p, q;
  DC__ERF_P(p, s, fmaf);
  DC__ERF_Q(q, s, fmaf);
  const float y = at * p * dc_reciprocal(q);
  return fabsf(x) > DC__ERF_END ? copysignf(1.0f, x) : x != x ? x : y;
}

DC_DEVICE float gelu(float x, bool erf) {
  return erf ? 0.5f * x * (1.0f + gelu_erf_f32(x * 0.70710678f)) : x * gelu_share(x);
}

/* Beyond 20 the derivative is 1 or 0, and squares would overflow. */
DC_DEVICE float gelu_slope(float a, bool erf) {
  const float x = a != a ? a : fminf(fmaxf(a, -20.0f), 20.0f);
  if (erf) {
    const float density = 0.39894228f * dc_exp2(-0.5f * DC_LOG2_E * x * x);
    return fmaf(x, density, 0.5f * (1.0f + gelu_erf_f32(x * 0.70710678f)));
  }
  const float s = gelu_share(x);
  return fmaf(x * (2.0f * s * (1.0f - s)), GELU_K * fmaf(0.134145f, x * x, 1.0f), s);
}

}  // namespace

#endif
