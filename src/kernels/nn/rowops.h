/* Elementwise work of the transformer layer on rows of float32. One source in plain C (rowops_tmpl.h) is compiled for
 * every instruction set; without contraction, and with sums in a fixed number of lanes, all give the same bits. */
#ifndef DC_KERNELS_ROWOPS_H
#define DC_KERNELS_ROWOPS_H

#include "base/base.h"

/* y[i] = gelu(x[i]); y may be x. form: enum dc__gelu_form. */
void dc__gelu(float *y, const float *x, int64_t count, int32_t form);
/* g[i] *= gelu'(x[i]). */
void dc__gelu_backward(float *g, const float *x, int64_t count, int32_t form);

/* Computes the mean and 1 / sqrt(variance + eps), with the variance from the differences to the mean. count >= 1. */
void dc__row_moments(const float *x, int64_t count, float eps, float *mean, float *rstd);
/* y[i] = (x[i] - mean) * rstd * gamma[i] + beta[i]. gamma and beta both NULL: 1 and 0. y may be x. */
void dc__row_normalize(float *y, const float *x, const float *gamma, const float *beta, int64_t count, float mean,
                       float rstd);
/* The gradient of normalisation by its input: dx = rstd (g - mean(g) - xhat mean(g xhat)) with g = dy gamma. dx may be
 * dy. */
void dc__row_normalize_backward(float *dx, const float *dy, const float *xhat, const float *gamma, int64_t count,
                                float rstd);
/* Returns the largest element, or -infinity if there is none. NaN is skipped. */
float dc__row_max(const float *x, int64_t count);
/* x[i] = e^(x[i] - shift); returns the sum. */
float dc__row_exp(float *x, int64_t count, float shift);
/* x[i] = e^(x[i] - shift) scale. */
void dc__row_exp_scaled(float *x, int64_t count, float shift, float scale);
/* The gradient of softmax with dropout: dp[i] = p[i] (dp[i] m[i] - delta), and then p[i] *= m[i]. A NULL m means all
 * ones. */
void dc__row_softmax_backward(float *dp, float *p, const float *m, int64_t count, float delta);
float dc__row_dot(const float *x, const float *y, int64_t count);
/* x[i] *= scale; x[i] += y[i]; x[i] *= y[i]. */
void dc__row_scale(float *x, int64_t count, float scale);
void dc__row_add(float *x, const float *y, int64_t count);
void dc__row_multiply(float *x, const float *y, int64_t count);

/* Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). */
void dc__philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);

/* Dropout at one site in one call. */
typedef struct dc__dropout {
  uint32_t key[2];
  uint32_t threshold; /* an element is dropped if its 16-bit draw is below this; 0 drops none */
  float scale;        /* 65536 / (65536 - threshold) */
} dc__dropout;

/* m[i] = 0 or scale, for element first + i of a row. Element j draws bits 16 (j % 2) to 16 (j % 2) + 15 of word
 * (j % 8) / 2 of Philox at the counter (j / 8, row, plane, 0). first: a multiple of 8. */
void dc__dropout_row(float *m, int64_t count, int64_t first, uint32_t row, uint32_t plane, const dc__dropout *dropout);

#endif
