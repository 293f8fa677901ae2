/* The plain version of rows.h, and the choice between it and the others. */
#include "kernels/rows.h"

#define ROWS dc__rows_plain
#include "kernels/rows_loops.h"

static const dc__rows *rows(void) {
  const dc__rows *chosen = dc__kernels_table()->rows;
  return chosen != NULL ? chosen : &dc__rows_plain;
}

void dc__gelu(float *y, const float *x, int64_t count, int32_t form) {
  rows()->gelu(y, x, count, form);
}
void dc__gelu_back(float *g, const float *x, int64_t count, int32_t form) {
  rows()->gelu_back(g, x, count, form);
}
void dc__row_moments(const float *x, int64_t count, float eps, float *mean, float *rstd) {
  rows()->moments(x, count, eps, mean, rstd);
}
void dc__row_normalize(float *y, const float *x, const float *gamma, const float *beta, int64_t count, float mean,
                       float rstd) {
  rows()->normalize(y, x, gamma, beta, count, mean, rstd);
}
void dc__row_normalize_back(float *dx, const float *dy, const float *xhat, const float *gamma, int64_t count,
                            float rstd) {
  rows()->normalize_back(dx, dy, xhat, gamma, count, rstd);
}
float dc__row_max(const float *x, int64_t count) {
  return rows()->max(x, count);
}
float dc__row_exp(float *x, int64_t count, float shift) {
  return rows()->exp(x, count, shift);
}
void dc__row_softmax_back(float *dp, float *p, const float *m, int64_t count, float delta) {
  rows()->softmax_back(dp, p, m, count, delta);
}
float dc__row_dot(const float *x, const float *y, int64_t count) {
  return rows()->dot(x, y, count);
}
void dc__row_scale(float *x, int64_t count, float scale) {
  rows()->scale(x, count, scale);
}
void dc__row_add(float *x, const float *y, int64_t count) {
  rows()->add(x, y, count);
}
void dc__row_multiply(float *x, const float *y, int64_t count) {
  rows()->multiply(x, y, count);
}
void dc__dropout_row(float *m, int64_t count, int64_t first, uint32_t row, uint32_t plane, const dc__dropout *dropout) {
  rows()->dropout(m, count, first, row, plane, dropout);
}

void dc__philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]) {
  uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
  uint32_t k0 = key[0];
  uint32_t k1 = key[1];
  for (int32_t round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)c[0] * 0xD2511F53u;
    uint64_t b = (uint64_t)c[2] * 0xCD9E8D57u;
    c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
    c[1] = (uint32_t)b;
    c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
    c[3] = (uint32_t)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  memcpy(out, c, sizeof c);
}
