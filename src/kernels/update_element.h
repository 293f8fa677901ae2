/* The optimizers' arithmetic of one element: one text for every instruction set and for the kernels of devices, which
 * are compiled without contraction. */
#ifndef DC_KERNELS_UPDATE_ELEMENT_H
#define DC_KERNELS_UPDATE_ELEMENT_H

#include "kernels/convert.h"

#ifdef __CUDACC__
#define DC__SQRT(x) __fsqrt_rn(x)
#define DC__SQRT_OF_F64(x) __dsqrt_rn(x)
#else
#define DC__SQRT(x) __builtin_sqrtf(x)
#define DC__SQRT_OF_F64(x) __builtin_sqrt(x)
#endif

/* x^n by squaring: the same bits wherever it is computed, which no library's pow() promises. */
DC__CONVERT double dc__power(double x, int64_t n) {
  double power = 1;
  for (; n > 0; n >>= 1) {
    power = (n & 1) != 0 ? power * x : power;
    x *= x;
  }
  return power;
}

/* A step's constants of AdamW: m = keep_m m + add_m g; v = keep_v v + add_v g^2;
 * w = decay w - step m / (sqrt(v) root + eps), with the largest v so far in place of v for amsgrad. */
typedef struct dc__adamw_factors {
  float keep_m, add_m; /* beta1, 1 - beta1 */
  float keep_v, add_v; /* beta2, 1 - beta2 */
  float decay;         /* 1 - lr weight_decay */
  float step;          /* lr / (1 - beta1^t) */
  float root;          /* 1 / sqrt(1 - beta2^t) */
  float eps;
} dc__adamw_factors;

/* What they are made of beside the learning rate and the step t, from 1. */
typedef struct dc__adamw_rule {
  double beta1, beta2, eps, weight_decay;
  int32_t maximize;
} dc__adamw_rule;

DC__CONVERT dc__adamw_factors dc__adamw_factors_of(const dc__adamw_rule *rule, double lr, int64_t t) {
  dc__adamw_factors f;
  f.keep_m = (float)rule->beta1;
  f.add_m = (float)(1 - rule->beta1);
  f.add_m = rule->maximize ? -f.add_m : f.add_m; /* m is that of the gradient turned round */
  f.keep_v = (float)rule->beta2;
  f.add_v = (float)(1 - rule->beta2);
  f.decay = (float)(1 - lr * rule->weight_decay);
  f.step = (float)(lr / (1 - dc__power(rule->beta1, t)));
  f.root = (float)(1 / DC__SQRT_OF_F64(1 - dc__power(rule->beta2, t)));
  f.eps = (float)rule->eps;
  return f;
}

DC__CONVERT float dc__adamw_mean(float m, float g, const dc__adamw_factors *f) {
  return f->keep_m * m + f->add_m * g;
}
DC__CONVERT float dc__adamw_square(float v, float g, const dc__adamw_factors *f) {
  return f->keep_v * v + f->add_v * g * g;
}
DC__CONVERT float dc__adamw_most(float most, float v) {
  return v > most || v != v ? v : most;
}
DC__CONVERT float dc__adamw_weight(float w, float m, float v, const dc__adamw_factors *f) {
  return f->decay * w - f->step * m / (DC__SQRT(v) * f->root + f->eps);
}

/* A step's constants of SGD: d = sign g + weight_decay w; b = keep b + add d; w = w - lr (look = 0 ? b : d + look b).
 * Without momentum w = w - lr d. */
typedef struct dc__sgd_factors {
  float lr, weight_decay;
  float sign;      /* -1: up the gradient */
  float keep, add; /* momentum, 1 - dampening; 0 and 1 in a parameter's first step */
  float look;      /* Nesterov: the momentum, else 0 */
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
  f.keep = t > 1 ? (float)rule->momentum : 0.0f;
  f.add = t > 1 ? (float)(1 - rule->dampening) : 1.0f;
  f.look = rule->nesterov ? (float)rule->momentum : 0.0f;
  return f;
}

DC__CONVERT float dc__sgd_direction(float w, float g, const dc__sgd_factors *f) {
  return f->sign * g + f->weight_decay * w;
}
DC__CONVERT float dc__sgd_momentum(float b, float d, const dc__sgd_factors *f) {
  return f->keep * b + f->add * d;
}
DC__CONVERT float dc__sgd_weight(float w, float d, float b, const dc__sgd_factors *f) {
  return w - f->lr * (f->look == 0.0f ? b : d + f->look * b);
}

/* What Shampoo does with single elements of a block: its graft's squares v = keep_v v + add_v g^2, the filtered
 * gradient g = whole_m m of m = keep_m m + add_m g, the graft's direction g / (sqrt(whole_v v) + eps), and momentum. */
typedef struct dc__graft_factors {
  float keep_v, add_v, whole_v, eps;
  float keep_m, add_m, whole_m;
  float momentum;
  int32_t nesterov;
} dc__graft_factors;

DC__CONVERT float dc__graft_square(float v, float g, const dc__graft_factors *f) {
  return f->keep_v * v + f->add_v * (g * g);
}
DC__CONVERT float dc__graft_mean(float m, float g, const dc__graft_factors *f) {
  return f->keep_m * m + f->add_m * g;
}
DC__CONVERT float dc__graft_direction(float g, float v, const dc__graft_factors *f) {
  return g / (DC__SQRT(f->whole_v * v) + f->eps);
}
DC__CONVERT float dc__graft_momentum(float b, float u, const dc__graft_factors *f) {
  return f->momentum * b + u;
}
DC__CONVERT float dc__graft_step(float b, float u, const dc__graft_factors *f) {
  return f->nesterov ? u + f->momentum * b : b;
}

/* The way into blocks and back: x = g + add w; w = keep w + add x. */
typedef struct dc__part_factors {
  float keep, add;
} dc__part_factors;

/* Those of the weight's way, whose decay is its own. */
DC__CONVERT dc__part_factors dc__part_factors_of(double weight_decay, double lr) {
  dc__part_factors f;
  f.keep = (float)(1 - lr * weight_decay);
  f.add = (float)-lr;
  return f;
}

DC__CONVERT float dc__part_of_gradient(float g, float w, const dc__part_factors *f) {
  return f->add != 0.0f ? g + f->add * w : g;
}
DC__CONVERT float dc__part_to_weight(float w, float x, const dc__part_factors *f) {
  return f->keep * w + f->add * x;
}

/* What of an element says how large it is: all ones for NaN and infinity; below 2^exponent where it is below the
 * second. */
DC__CONVERT uint32_t dc__size_bits(float x) {
  return dc__bits_of_f32(x) & 0x7f800000u;
}
DC__CONVERT uint32_t dc__size_limit(int32_t exponent) {
  return (uint32_t)(exponent + 127) << 23;
}

/* The master of a 16-bit weight: the weight itself where it is not what the master is rounded to, bit for bit. */
DC__CONVERT float dc__followed(float master, float rounded, float w) {
  return dc__bits_of_f32(rounded) == dc__bits_of_f32(w) ? master : w;
}

/* What a step multiplies with, and what AdamW's and SGD's are made of. */
typedef union dc__update_factors {
  dc__adamw_factors adamw;
  dc__sgd_factors sgd;
  dc__part_factors part;
  const struct dc__update_record *record; /* dc__update_batch.recorded: they are there */
} dc__update_factors;
typedef union dc__update_rule {
  dc__adamw_rule adamw;
  dc__sgd_rule sgd;
  double weight_decay; /* GIVE */
} dc__update_rule;

/* TAKE: of the gradient, and GIVE: to the weight, by way of blocks. */
enum dc__update_kind { DC__UPDATE_ADAMW, DC__UPDATE_SGD, DC__UPDATE_BELOW, DC__UPDATE_TAKE, DC__UPDATE_GIVE };

/* AdamW's, SGD's or GIVE's. */
DC__CONVERT dc__update_factors dc__update_factors_of(int32_t kind, const dc__update_rule *rule, double lr, int64_t t) {
  dc__update_factors f;
  memset(&f, 0, sizeof f);
  if (kind == DC__UPDATE_ADAMW) {
    f.adamw = dc__adamw_factors_of(&rule->adamw, lr, t);
  } else if (kind == DC__UPDATE_GIVE) {
    f.part = dc__part_factors_of(rule->weight_decay, lr);
  } else {
    f.sgd = dc__sgd_factors_of(&rule->sgd, lr, t);
  }
  return f;
}

/* What a device with memory of its own keeps of a parameter whose steps it counts. */
typedef struct dc__update_record {
  int64_t step;               /* steps made */
  dc__update_factors factors; /* of the latest of them */
} dc__update_record;

/* What it keeps of an optimizer. */
typedef struct dc__update_look {
  uint64_t found;         /* by DC__UPDATE_BELOW, or DC__UPDATE_TOLD */
  int64_t steps, skipped; /* steps that were made, and those that `found` kept from it */
  float scale;            /* of the gradients, where the caller's loss scale is in it */
} dc__update_look;

#define DC__UPDATE_TOLD UINT64_MAX /* the caller has found it */

/* What gradients of a loss that was scaled are multiplied with. */
DC__CONVERT float dc__update_scale(double grad_scale, float loss_scale) {
  return (float)(grad_scale / (double)loss_scale);
}

/* A step of a few parameters on a device with memory of its own, which all pointers are of. */
typedef struct dc__update_span {
  void *weight;
  const void *grad;
  float *master;   /* NULL: float32 weights */
  float *state[3]; /* AdamW: m, v, the largest v or NULL; SGD: b or NULL; TAKE: set; GIVE: read */
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
  const float *scale; /* in place of grad_scale; NULL: that */
  int32_t recorded;   /* the spans' factors are in their records */
  /* DC__UPDATE_BELOW, which changes nothing else: *found becomes at least `indices` less the index of a parameter whose
   * scaled gradient has an element that is not below 2^exponent. The others, if it is not NULL: nothing happens unless
   * it is 0. */
  int32_t exponent;
  int64_t indices;
  uint64_t *found;
} dc__update_batch;

/* Begins a step of a few parameters, of one group: counts it and computes its factors, unless found, which may be NULL,
 * is not 0. */
typedef struct dc__update_begin {
  dc__update_record *records[DC__UPDATE_RECORDS];
  int32_t records_used;
  int32_t kind;
  dc__update_rule rule;
  const double *lr;
  const uint64_t *found;
  dc__update_look *tally; /* counts the step; NULL: another launch does */
} dc__update_begin;

/* Reads what the caller says of a step, before it begins: look->scale = grad_scale / *loss_scale, look->found =
 * DC__UPDATE_TOLD if *found_inf is not 0, else 0. A NULL one says nothing. */
typedef struct dc__update_heed {
  dc__update_look *look;
  const float *loss_scale, *found_inf;
  double grad_scale;
} dc__update_heed;

/* Sets a number of the device's in the order of its stream, without a copy that would read the host's memory later. */
typedef struct dc__update_number {
  double *to;
  double value;
} dc__update_number;

#endif
