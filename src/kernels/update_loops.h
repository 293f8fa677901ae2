/* The bodies of update.h. Included once for each instruction set, whose table's functions UPDATE names. */
#include "kernels/convert.h"
#include "kernels/table.h"
#include "kernels/update.h"

static void adamw(float *restrict w, float *restrict m, float *restrict v, float *restrict most,
                  const float *restrict g, int64_t count, const dc__adamw_factors *factors) {
  const dc__adamw_factors f = *factors;
  if (most != NULL) {
    for (int64_t i = 0; i < count; i++) {
      m[i] = f.keep_m * m[i] + f.add_m * g[i];
      v[i] = f.keep_v * v[i] + f.add_v * g[i] * g[i];
      most[i] = v[i] > most[i] || v[i] != v[i] ? v[i] : most[i];
      w[i] = f.decay * w[i] - f.step * m[i] / (__builtin_sqrtf(most[i]) * f.root + f.eps);
    }
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    float mi = f.keep_m * m[i] + f.add_m * g[i];
    float vi = f.keep_v * v[i] + f.add_v * g[i] * g[i];
    m[i] = mi;
    v[i] = vi;
    w[i] = f.decay * w[i] - f.step * mi / (__builtin_sqrtf(vi) * f.root + f.eps);
  }
}

static void sgd(float *restrict w, float *restrict b, const float *restrict g, int64_t count,
                const dc__sgd_factors *factors) {
  const dc__sgd_factors f = *factors;
  if (b == NULL) {
    for (int64_t i = 0; i < count; i++) {
      w[i] = w[i] - f.lr * (f.sign * g[i] + f.weight_decay * w[i]);
    }
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    float d = f.sign * g[i] + f.weight_decay * w[i];
    float bi = f.keep * b[i] + f.add * d;
    b[i] = bi;
    w[i] = w[i] - f.lr * (f.look == 0.0f ? bi : d + f.look * bi);
  }
}

static void scale_to(float *restrict y, const float *restrict x, int64_t count, float scale) {
  for (int64_t i = 0; i < count; i++) {
    y[i] = x[i] * scale;
  }
}

static bool all_below(const float *x, int64_t count, int32_t exponent) {
  uint32_t worst = 0; /* exponents: all ones for NaN and infinity */
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits = dc__bits_of_f32(x[i]) & 0x7f800000u;
    worst = bits > worst ? bits : worst;
  }
  return worst < (uint32_t)(exponent + 127) << 23;
}

static void follow(float *restrict master, const float *restrict rounded, const float *restrict w, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    master[i] = dc__bits_of_f32(rounded[i]) == dc__bits_of_f32(w[i]) ? master[i] : w[i];
  }
}

const dc__update UPDATE = {adamw, sgd, scale_to, all_below, follow};
