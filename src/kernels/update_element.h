/* The optimizers' arithmetic of one element: one text for every instruction set and for the kernels of devices, which
 * are compiled without contraction. */
#ifndef DC_KERNELS_UPDATE_ELEMENT_H
#define DC_KERNELS_UPDATE_ELEMENT_H

#include "kernels/convert.h"

#ifdef __CUDACC__
#define DC__SQRT(x) __fsqrt_rn(x)
#else
#define DC__SQRT(x) __builtin_sqrtf(x)
#endif

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

/* A step of a few parameters on a device with memory of its own, which all pointers are of. */
typedef struct dc__update_span {
  void *weight;
  const void *grad;
  float *master;   /* NULL: float32 weights */
  float *state[3]; /* AdamW: m, v, the largest v or NULL; SGD: b or NULL; TAKE: set; GIVE: read */
  int64_t count;
  int64_t index; /* of the parameter */
  int32_t dtype, grad_dtype;
  union {
    dc__adamw_factors adamw;
    dc__sgd_factors sgd;
    dc__part_factors part;
  } factors;
} dc__update_span;

/* TAKE: of the gradient, and GIVE: to the weight, by way of blocks. */
enum dc__update_kind { DC__UPDATE_ADAMW, DC__UPDATE_SGD, DC__UPDATE_BELOW, DC__UPDATE_TAKE, DC__UPDATE_GIVE };
enum { DC__UPDATE_SPANS = 8 };

typedef struct dc__update_batch {
  dc__update_span spans[DC__UPDATE_SPANS];
  int32_t spans_used;
  float grad_scale;
  /* DC__UPDATE_BELOW, which changes nothing else: *found becomes at least `indices` less the index of a parameter whose
   * scaled gradient has an element that is not below 2^exponent. */
  int32_t exponent;
  int64_t indices;
  uint64_t *found;
} dc__update_batch;

#endif
