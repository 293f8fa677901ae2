/* Elementwise work of the optimizers on float32. One text in plain C (update_loops.h) is compiled for every instruction
 * set; without contraction, all give the same bits, and an element's do not depend on where it lies. */
#ifndef DC_KERNELS_UPDATE_H
#define DC_KERNELS_UPDATE_H

#include "base/base.h"

/* A step's constants of dc__update_adamw(). */
typedef struct dc__adamw_factors {
  float keep_m, add_m; /* beta1, 1 - beta1 */
  float keep_v, add_v; /* beta2, 1 - beta2 */
  float decay;         /* 1 - lr weight_decay */
  float step;          /* lr / (1 - beta1^t) */
  float root;          /* 1 / sqrt(1 - beta2^t) */
  float eps;
} dc__adamw_factors;

/* m = keep_m m + add_m g; v = keep_v v + add_v g^2; w = decay w - step m / (sqrt(v) root + eps), with most, the largest
 * v so far, in place of v where it is not NULL. */
void dc__update_adamw(float *w, float *m, float *v, float *most, const float *g, int64_t count,
                      const dc__adamw_factors *factors);

/* A step's constants of dc__update_sgd(). */
typedef struct dc__sgd_factors {
  float lr, weight_decay;
  float sign;      /* -1: up the gradient */
  float keep, add; /* momentum, 1 - dampening; 0 and 1 in a parameter's first step */
  float look;      /* Nesterov: the momentum, else 0 */
} dc__sgd_factors;

/* d = sign g + weight_decay w; b = keep b + add d; w = w - lr (look = 0 ? b : d + look b). b NULL: w = w - lr d. */
void dc__update_sgd(float *w, float *b, const float *g, int64_t count, const dc__sgd_factors *factors);

/* y[i] = x[i] * scale. */
void dc__update_scale(float *y, const float *x, int64_t count, float scale);
/* Whether all elements are below 2^exponent in size, -126 to 128; with 128, whether none is NaN or infinite. */
bool dc__update_below(const float *x, int64_t count, int32_t exponent);
/* master[i] = w[i] where rounded[i], the master as its weight's type has it, is not w[i], bit for bit. */
void dc__update_follow(float *master, const float *rounded, const float *w, int64_t count);

#endif
