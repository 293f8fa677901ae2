/* The plain version of rowops.h, and the choice of the version to use. */
#include "kernels/nn/rowops.h"

#include "kernels/nn/philox.h"

#define ROWOPS dc__rowops_plain
#include "kernels/nn/rowops_tmpl.h"

static const dc__rowops *active_rowops(void) {
  const dc__rowops *chosen = dc__active_kernels()->rowops;
  return chosen != NULL ? chosen : &dc__rowops_plain;
}

void dc__gelu(float *y, const float *x, int64_t count, int32_t form) {
  active_rowops()->gelu(y, x, count, form);
}
void dc__gelu_backward(float *g, const float *x, int64_t count, int32_t form) {
  active_rowops()->gelu_backward(g, x, count, form);
}
void dc__row_moments(const float *x, int64_t count, float eps, float *mean, float *rstd) {
  active_rowops()->moments(x, count, eps, mean, rstd);
}
void dc__row_normalize(float *y, const float *x, const float *gamma, const float *beta, int64_t count, float mean,
                       float rstd) {
  active_rowops()->normalize(y, x, gamma, beta, count, mean, rstd);
}
void dc__row_normalize_backward(float *dx, const float *dy, const float *xhat, const float *gamma, int64_t count,
                                float rstd) {
  active_rowops()->normalize_backward(dx, dy, xhat, gamma, count, rstd);
}
float dc__row_max(const float *x, int64_t count) {
  return active_rowops()->max(x, count);
}
float dc__row_exp(float *x, int64_t count, float shift) {
  return active_rowops()->exp(x, count, shift);
}
void dc__row_exp_scaled(float *x, int64_t count, float shift, float scale) {
  active_rowops()->exp_scaled(x, count, shift, scale);
}
void dc__row_softmax_backward(float *dp, float *p, const float *m, int64_t count, float delta) {
  active_rowops()->softmax_backward(dp, p, m, count, delta);
}
float dc__row_dot(const float *x, const float *y, int64_t count) {
  return active_rowops()->dot(x, y, count);
}
void dc__row_scale(float *x, int64_t count, float scale) {
  active_rowops()->scale(x, count, scale);
}
void dc__row_add(float *x, const float *y, int64_t count) {
  active_rowops()->add(x, y, count);
}
void dc__row_multiply(float *x, const float *y, int64_t count) {
  active_rowops()->multiply(x, y, count);
}
void dc__dropout_row(float *m, int64_t count, int64_t first, uint32_t row, uint32_t plane, const dc__dropout *dropout) {
  active_rowops()->dropout(m, count, first, row, plane, dropout);
}

void dc__philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]) {
  dc__philox_words(out, counter, key);
}
