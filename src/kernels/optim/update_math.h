/* The optimizers' arithmetic of one element: one text for every instruction set and for the kernels of devices, which
 * are compiled without contraction. */
#ifndef DC_KERNELS_UPDATE_MATH_H
#define DC_KERNELS_UPDATE_MATH_H

#include "kernels/elementwise/convert.h"

#ifdef __CUDACC__
#define DC__SQRT(x) __fsqrt_rn(x)
#define DC__SQRT_OF_F64(x) __dsqrt_rn(x)
#else
#define DC__SQRT(x) __builtin_sqrtf(x)
#define DC__SQRT_OF_F64(x) __builtin_sqrt(x)
#endif

/* x^n by squaring: the same bits everywhere, which no library's pow() guarantees. */
DC__CONVERT double dc__power(double x, int64_t n) {
  double power = 1;
  for (; n > 0; n >>= 1) {
    power = (n & 1) != 0 ? power * x : power;
    x *= x;
  }
  return power;
}

/* A step's constants of AdamW: m = beta1 m + one_minus_beta1 g; v = beta2 v + one_minus_beta2 g^2;
 * w = decay w - step_size m / (sqrt(v) inv_sqrt_bias_correction2 + eps), with the largest v so far in place of v for
 * amsgrad. */
typedef struct dc__adamw_factors {
  float beta1, one_minus_beta1;    /* beta1; 1 - beta1, negative to maximize */
  float beta2, one_minus_beta2;    /* beta2, 1 - beta2 */
  float decay;                     /* 1 - lr weight_decay */
  float step_size;                 /* lr / (1 - beta1^t) */
  float inv_sqrt_bias_correction2; /* 1 / sqrt(1 - beta2^t) */
  float eps;
} dc__adamw_factors;

/* The options that they are computed from, beside the learning rate and the step t, which counts from 1. */
typedef struct dc__adamw_rule {
  double beta1, beta2, eps, weight_decay;
  int32_t maximize;
} dc__adamw_rule;

DC__CONVERT dc__adamw_factors dc__adamw_factors_of(const dc__adamw_rule *rule, double lr, int64_t t) {
  dc__adamw_factors f;
  f.beta1 = (float)rule->beta1;
  f.one_minus_beta1 = (float)(1 - rule->beta1);
  f.one_minus_beta1 = rule->maximize ? -f.one_minus_beta1 : f.one_minus_beta1; /* m is that of the negated gradient */
  f.beta2 = (float)rule->beta2;
  f.one_minus_beta2 = (float)(1 - rule->beta2);
  f.decay = (float)(1 - lr * rule->weight_decay);
  f.step_size = (float)(lr / (1 - dc__power(rule->beta1, t)));
  f.inv_sqrt_bias_correction2 = (float)(1 / DC__SQRT_OF_F64(1 - dc__power(rule->beta2, t)));
  f.eps = (float)rule->eps;
  return f;
}

DC__CONVERT float dc__adamw_mean(float m, float g, const dc__adamw_factors *f) {
  return f->beta1 * m + f->one_minus_beta1 * g;
}
DC__CONVERT float dc__adamw_square(float v, float g, const dc__adamw_factors *f) {
  return f->beta2 * v + f->one_minus_beta2 * g * g;
}
DC__CONVERT float dc__adamw_max(float max_v, float v) {
  return v > max_v || v != v ? v : max_v;
}
DC__CONVERT float dc__adamw_weight(float w, float m, float v, const dc__adamw_factors *f) {
  return f->decay * w - f->step_size * m / (DC__SQRT(v) * f->inv_sqrt_bias_correction2 + f->eps);
}

/* A step's constants of SGD: d = sign g + weight_decay w; b = momentum b + one_minus_dampening d; w = w - lr (nesterov
 * = 0 ? b : d + nesterov b). Without momentum w = w - lr d. */
typedef struct dc__sgd_factors {
  float lr, weight_decay;
  float sign;                          /* -1: up the gradient */
  float momentum, one_minus_dampening; /* 0 and 1 in a parameter's first step */
  float nesterov;                      /* Nesterov: the momentum, else 0 */
} dc__sgd_factors;

typedef struct dc__sgd_rule {
  double momentum, dampening, weight_decay;
  int32_t nesterov, maximize;
} dc__sgd_rule;

DC__CONVERT dc__sgd_factors dc__sgd_factors_of(const dc__sgd_rule *rule, double lr, int64_t t) {
  dc__sgd_factors f;
  f.lr = (float)lr;
  f.weight_decay = (float)rule->weight_decay;
  f.sign = rule->maximize ? -1.0f : 1.0f;
  f.momentum = t > 1 ? (float)rule->momentum : 0.0f;
  f.one_minus_dampening = t > 1 ? (float)(1 - rule->dampening) : 1.0f;
  f.nesterov = rule->nesterov ? (float)rule->momentum : 0.0f;
  return f;
}

DC__CONVERT float dc__sgd_direction(float w, float g, const dc__sgd_factors *f) {
  return f->weight_decay != 0.0f ? f->sign * g + f->weight_decay * w : f->sign * g;
}
DC__CONVERT float dc__sgd_momentum(float b, float d, const dc__sgd_factors *f) {
  return f->momentum * b + f->one_minus_dampening * d;
}
DC__CONVERT float dc__sgd_weight(float w, float d, float b, const dc__sgd_factors *f) {
  return w - f->lr * (f->nesterov == 0.0f ? b : d + f->nesterov * b);
}

/* Shampoo's elementwise operations on a block: the graft's squares v = beta2 v + one_minus_beta2 g^2; the filtered
 * gradient g = inv_bias_correction1 m of m = beta1 m + one_minus_beta1 g; the graft's direction g /
 * (sqrt(inv_bias_correction2 v) + eps); momentum. */
typedef struct dc__graft_factors {
  float beta2, one_minus_beta2, inv_bias_correction2, eps;
  float beta1, one_minus_beta1, inv_bias_correction1;
  float momentum;
  int32_t nesterov;
} dc__graft_factors;

DC__CONVERT float dc__graft_square(float v, float g, const dc__graft_factors *f) {
  return f->beta2 * v + f->one_minus_beta2 * (g * g);
}
DC__CONVERT float dc__graft_exp_avg(float m, float g, const dc__graft_factors *f) {
  return f->beta1 * m + f->one_minus_beta1 * g;
}
DC__CONVERT float dc__graft_direction(float g, float v, const dc__graft_factors *f) {
  return g / (DC__SQRT(f->inv_bias_correction2 * v) + f->eps);
}
DC__CONVERT float dc__graft_momentum(float b, float u, const dc__graft_factors *f) {
  return f->momentum * b + u;
}
DC__CONVERT float dc__graft_step(float b, float u, const dc__graft_factors *f) {
  return f->nesterov ? u + f->momentum * b : b;
}

/* Loads into blocks and stores back: x = g + add w; w = decay w + add x. */
typedef struct dc__block_factors {
  float decay, add;
} dc__block_factors;

/* Those of the store to the weight, whose decay is its own. */
DC__CONVERT dc__block_factors dc__block_factors_of(double weight_decay, double lr) {
  dc__block_factors f;
  f.decay = (float)(1 - lr * weight_decay);
  f.add = (float)-lr;
  return f;
}

DC__CONVERT float dc__block_from_gradient(float g, float w, const dc__block_factors *f) {
  return f->add != 0.0f ? g + f->add * w : g;
}
DC__CONVERT float dc__block_to_weight(float w, float x, const dc__block_factors *f) {
  return f->decay * w + f->add * x;
}

/* An element's magnitude by its exponent's bits: all ones for NaN and infinity. The element is below 2^exponent if they
 * are below dc__exponent_limit(exponent). */
DC__CONVERT uint32_t dc__exponent_bits(float x) {
  return dc__bits_of_f32(x) & 0x7f800000u;
}
DC__CONVERT uint32_t dc__exponent_limit(int32_t exponent) {
  return (uint32_t)(exponent + 127) << 23;
}

/* The master of a 16-bit weight: the weight itself if the rounded master is not the weight, bit for bit. */
DC__CONVERT float dc__synced_master(float master, float rounded, float w) {
  return dc__bits_of_f32(rounded) == dc__bits_of_f32(w) ? master : w;
}

/* A step's factors, and the options that AdamW's and SGD's are computed from. */
typedef union dc__update_factors {
  dc__adamw_factors adamw;
  dc__sgd_factors sgd;
  dc__block_factors part;
  const struct dc__update_step_state *record; /* if dc__update_batch.recorded, the factors are there */
} dc__update_factors;
typedef union dc__update_rule {
  dc__adamw_rule adamw;
  dc__sgd_rule sgd;
  double weight_decay; /* STORE_BLOCK */
} dc__update_rule;

/* LOAD_BLOCK: from the gradient, and STORE_BLOCK: to the weight. */
enum dc__update_kind {
  DC__UPDATE_ADAMW,
  DC__UPDATE_SGD,
  DC__UPDATE_SCAN_OVERFLOW,
  DC__UPDATE_LOAD_BLOCK,
  DC__UPDATE_STORE_BLOCK
};

/* AdamW's, SGD's or STORE_BLOCK's. */
DC__CONVERT dc__update_factors dc__update_factors_of(int32_t kind, const dc__update_rule *rule, double lr, int64_t t) {
  dc__update_factors f;
  memset(&f, 0, sizeof f);
  if (kind == DC__UPDATE_ADAMW) {
    f.adamw = dc__adamw_factors_of(&rule->adamw, lr, t);
  } else if (kind == DC__UPDATE_STORE_BLOCK) {
    f.part = dc__block_factors_of(rule->weight_decay, lr);
  } else {
    f.sgd = dc__sgd_factors_of(&rule->sgd, lr, t);
  }
  return f;
}

/* A device's state of a parameter, if the device counts its steps. */
typedef struct dc__update_step_state {
  int64_t step;               /* steps made */
  dc__update_factors factors; /* of the latest of them */
} dc__update_step_state;

/* A device's state of an optimizer. */
typedef struct dc__update_status {
  uint64_t found;         /* by DC__UPDATE_SCAN_OVERFLOW, or DC__UPDATE_FOUND_INF */
  int64_t steps, skipped; /* steps that were made, and those that `found` prevented */
  float scale;            /* of the gradients, with the caller's loss scale */
} dc__update_status;

#define DC__UPDATE_FOUND_INF UINT64_MAX /* found by the caller */

/* The factor for gradients of a scaled loss. */
DC__CONVERT float dc__update_scale(double grad_scale, float loss_scale) {
  return (float)(grad_scale / (double)loss_scale);
}

/* A step of a few parameters on a device with memory of its own, to which all pointers refer. */
typedef struct dc__update_span {
  void *weight;
  const void *grad;
  float *master;   /* NULL: float32 weights */
  float *state[3]; /* AdamW: m, v, the largest v or NULL; SGD: b or NULL; LOAD_BLOCK: set; STORE_BLOCK: read */
  int64_t count;
  int64_t index; /* of the parameter */
  int32_t dtype, grad_dtype;
  dc__update_factors factors;
} dc__update_span;

enum { DC__UPDATE_SPANS = 8, DC__UPDATE_RECORDS = 96 };

typedef struct dc__update_batch {
  dc__update_span spans[DC__UPDATE_SPANS];
  int32_t spans_used;
  float grad_scale;
  const float *scale; /* in place of grad_scale; NULL: grad_scale */
  int32_t recorded;   /* the spans' factors are in their records */
  /* For DC__UPDATE_SCAN_OVERFLOW, which changes nothing else: *found becomes at least `indices` less the index of each
   * parameter with a scaled gradient element not below 2^exponent. The other kinds do nothing if found is not NULL and
   * *found is not 0. */
  int32_t exponent;
  int64_t indices;
  uint64_t *found;
} dc__update_batch;

/* Begins a step of a few parameters of one group: counts it and computes its factors, unless *found is not 0. found may
 * be NULL. */
typedef struct dc__update_begin {
  dc__update_step_state *records[DC__UPDATE_RECORDS];
  int32_t records_used;
  int32_t kind;
  dc__update_rule rule;
  const double *lr;
  const uint64_t *found;
  dc__update_status *status; /* counts the step; NULL if another launch does */
} dc__update_begin;

/* Reads the caller's gradient scaler before a step: status->scale = grad_scale / *loss_scale, and status->found =
 * DC__UPDATE_FOUND_INF if *found_inf is not 0, else 0. Either pointer may be NULL. */
typedef struct dc__update_read_scaler {
  dc__update_status *status;
  const float *loss_scale, *found_inf;
  double grad_scale;
} dc__update_read_scaler;

/* Sets a number of the device in stream order, without a copy that would read host memory later. */
typedef struct dc__update_set_scalar {
  double *to;
  double value;
} dc__update_set_scalar;

#endif
