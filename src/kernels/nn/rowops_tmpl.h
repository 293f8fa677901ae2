/* The bodies of rowops.h. Included once for each instruction set, whose table ROWOPS names. */
#include "kernels/dispatch.h"
#include "kernels/elementwise/convert.h"
#include "kernels/gemm/gemm.h"
#include "kernels/nn/gelu.h"
#include "kernels/nn/rowops.h"

#define DC__INLINE static inline __attribute__((always_inline))

static void row_gelu(float *y, const float *x, int64_t count, int32_t form) {
  if (form == DC__GELU_ERF) {
    for (int64_t i = 0; i < count; i++) {
      y[i] = gelu_erf(x[i]);
    }
  } else {
    for (int64_t i = 0; i < count; i++) {
      y[i] = gelu_tanh(x[i]);
    }
  }
}

static void row_gelu_backward(float *g, const float *x, int64_t count, int32_t form) {
  if (form == DC__GELU_ERF) {
    for (int64_t i = 0; i < count; i++) {
      g[i] *= gelu_erf_slope(x[i]);
    }
  } else {
    for (int64_t i = 0; i < count; i++) {
      g[i] *= gelu_tanh_slope(x[i]);
    }
  }
}

/* Sums run in LANES lanes, which are added as a tree. */
enum { LANES = 16 };

DC__INLINE float row_tree_sum(float *lane) {
  for (int32_t width = LANES / 2; width > 0; width /= 2) {
    for (int32_t j = 0; j < width; j++) {
      lane[j] += lane[j + width];
    }
  }
  return lane[0];
}

/* The sum over i of `expression`. */
#define SUM(result, count, expression)           \
  do {                                           \
    float lane[LANES] = {0};                     \
    int64_t at = 0;                              \
    for (; at + LANES <= (count); at += LANES) { \
      for (int64_t j = 0; j < LANES; j++) {      \
        const int64_t i = at + j;                \
        lane[j] += (expression);                 \
      }                                          \
    }                                            \
    for (int64_t i = at; i < (count); i++) {     \
      lane[i - at] += (expression);              \
    }                                            \
    (result) = row_tree_sum(lane);               \
  } while (0)

/* The second pass removes the first mean's rounding: a row of equal values has that mean, and variance 0. A variance
 * that is NaN stays NaN; one that overflows makes rstd 0. */
static void row_moments(const float *x, int64_t count, float eps, float *mean, float *rstd) {
  float sum;
  float squares;
  SUM(sum, count, x[i]);
  const float m = sum / (float)count;
  SUM(sum, count, x[i] - m);
  SUM(squares, count, (x[i] - m) * (x[i] - m));
  const float off = sum / (float)count;
  const float variance = squares / (float)count - off * off;
  *mean = m + off;
  *rstd = 1.0f / __builtin_sqrtf((variance < 0.0f ? 0.0f : variance) + eps);
}

static void row_normalize(float *y, const float *x, const float *gamma, const float *beta, int64_t count, float mean,
                          float rstd) {
  if (gamma == NULL) {
    for (int64_t i = 0; i < count; i++) {
      y[i] = (x[i] - mean) * rstd;
    }
  } else {
    for (int64_t i = 0; i < count; i++) {
      y[i] = (x[i] - mean) * rstd * gamma[i] + beta[i];
    }
  }
}

static void row_normalize_backward(float *dx, const float *dy, const float *xhat, const float *gamma, int64_t count,
                                   float rstd) {
  float sum;
  float dot;
  SUM(sum, count, dy[i] * gamma[i]);
  SUM(dot, count, dy[i] * gamma[i] * xhat[i]);
  sum = sum / (float)count;
  dot = dot / (float)count;
  for (int64_t i = 0; i < count; i++) {
    dx[i] = rstd * (dy[i] * gamma[i] - sum - xhat[i] * dot);
  }
}

static float row_max(const float *x, int64_t count) {
  float lane[LANES];
  for (int64_t j = 0; j < LANES; j++) {
    lane[j] = -__builtin_inff();
  }
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) {
    for (int64_t j = 0; j < LANES; j++) {
      lane[j] = x[at + j] > lane[j] ? x[at + j] : lane[j];
    }
  }
  for (int64_t i = at; i < count; i++) {
    lane[0] = x[i] > lane[0] ? x[i] : lane[0];
  }
  float max = lane[0];
  for (int64_t j = 1; j < LANES; j++) {
    max = lane[j] > max ? lane[j] : max;
  }
  return max;
}

static float row_exp(float *x, int64_t count, float shift) {
  float sum;
  SUM(sum, count, x[i] = exp_f32(x[i] - shift));
  return sum;
}

static void row_exp_scaled(float *x, int64_t count, float shift, float scale) {
  for (int64_t i = 0; i < count; i++) {
    x[i] = exp_f32(x[i] - shift) * scale;
  }
}

static void row_softmax_backward(float *dp, float *p, const float *m, int64_t count, float delta) {
  if (m == NULL) {
    for (int64_t i = 0; i < count; i++) {
      dp[i] = p[i] * (dp[i] - delta);
    }
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    dp[i] = p[i] * (dp[i] * m[i] - delta);
    p[i] *= m[i];
  }
}

static float row_dot(const float *x, const float *y, int64_t count) {
  float sum;
  SUM(sum, count, x[i] * y[i]);
  return sum;
}

static void row_scale(float *x, int64_t count, float scale) {
  for (int64_t i = 0; i < count; i++) {
    x[i] *= scale;
  }
}

static void row_add(float *x, const float *y, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    x[i] += y[i];
  }
}

static void row_multiply(float *x, const float *y, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    x[i] *= y[i];
  }
}

/* The 16-bit draws of Philox at the counters (block, row, plane, 0) to (block + LANES - 1, row, plane, 0), in order. */
#ifdef __AVX2__
#include "kernels/x86/nn/philox_vector.h"
#else
static void philox_lanes(uint16_t *random_bits, uint32_t block, uint32_t row, uint32_t plane, const uint32_t *key) {
  for (uint32_t j = 0; j < LANES; j++) {
    uint32_t words[4];
    dc__philox(words, (uint32_t[4]){block + j, row, plane, 0}, key);
    for (uint32_t w = 0; w < 4; w++) {
      random_bits[8 * j + 2 * w] = (uint16_t)words[w];
      random_bits[8 * j + 2 * w + 1] = (uint16_t)(words[w] >> 16);
    }
  }
}
#endif

static void row_dropout(float *m, int64_t count, int64_t first, uint32_t row, uint32_t plane,
                        const dc__dropout *dropout) {
  const uint32_t threshold = dropout->threshold;
  const float scale = dropout->scale;
  for (int64_t at = 0; at < count; at += 8 * LANES) {
    uint16_t random_bits[8 * LANES];
    philox_lanes(random_bits, (uint32_t)((first + at) / 8), row, plane, dropout->key);
    int64_t part = count - at < 8 * LANES ? count - at : 8 * LANES;
    for (int64_t j = 0; j < part; j++) {
      m[at + j] = random_bits[j] < threshold ? 0.0f : scale;
    }
  }
}

const dc__rowops ROWOPS = {
    .gelu = row_gelu,
    .gelu_backward = row_gelu_backward,
    .moments = row_moments,
    .normalize = row_normalize,
    .normalize_backward = row_normalize_backward,
    .max = row_max,
    .exp = row_exp,
    .exp_scaled = row_exp_scaled,
    .softmax_backward = row_softmax_backward,
    .dot = row_dot,
    .scale = row_scale,
    .add = row_add,
    .multiply = row_multiply,
    .dropout = row_dropout,
};
