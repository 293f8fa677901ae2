/* The bodies of update.h. Included once for each instruction set, whose table's functions UPDATE names. */
#include "kernels/convert.h"
#include "kernels/table.h"
#include "kernels/update.h"

static void adamw(float *restrict w, float *restrict m, float *restrict v, float *restrict most,
                  const float *restrict g, int64_t count, const dc__adamw_factors *factors) {
  const dc__adamw_factors f = *factors;
  if (most != NULL) {
    for (int64_t i = 0; i < count; i++) {
      m[i] = dc__adamw_mean(m[i], g[i], &f);
      v[i] = dc__adamw_square(v[i], g[i], &f);
      most[i] = dc__adamw_most(most[i], v[i]);
      w[i] = dc__adamw_weight(w[i], m[i], most[i], &f);
    }
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    float mi = dc__adamw_mean(m[i], g[i], &f);
    float vi = dc__adamw_square(v[i], g[i], &f);
    m[i] = mi;
    v[i] = vi;
    w[i] = dc__adamw_weight(w[i], mi, vi, &f);
  }
}

static void sgd(float *restrict w, float *restrict b, const float *restrict g, int64_t count,
                const dc__sgd_factors *factors) {
  const dc__sgd_factors f = *factors;
  if (b == NULL) {
    for (int64_t i = 0; i < count; i++) {
      w[i] = w[i] - f.lr * dc__sgd_direction(w[i], g[i], &f);
    }
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    float d = dc__sgd_direction(w[i], g[i], &f);
    float bi = dc__sgd_momentum(b[i], d, &f);
    b[i] = bi;
    w[i] = dc__sgd_weight(w[i], d, bi, &f);
  }
}

static void scale_to(float *restrict y, const float *restrict x, int64_t count, float scale) {
  for (int64_t i = 0; i < count; i++) {
    y[i] = x[i] * scale;
  }
}

static bool all_below(const float *x, int64_t count, int32_t exponent) {
  uint32_t worst = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits = dc__size_bits(x[i]);
    worst = bits > worst ? bits : worst;
  }
  return worst < dc__size_limit(exponent);
}

static void follow(float *restrict master, const float *restrict rounded, const float *restrict w, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    master[i] = dc__followed(master[i], rounded[i], w[i]);
  }
}

const dc__update UPDATE = {adamw, sgd, scale_to, all_below, follow};
