/* The epilogue of a matrix product, which makes a row of C from a row of sums. */
#include "kernels/gemm/gemm_epilogue.h"

#include <string.h>

#include "kernels/dispatch.h"
#include "kernels/kernels.h"

/* Returns elements from i on in float32: in place, or converted into `row`. */
static const float *epilogue_row(float *row, const void *src, int32_t dtype, int64_t i, int64_t count) {
  const void *at = dc__const_at(src, dtype, i);
  if (dtype == DC_FLOAT32) {
    return at;
  }
  dc__cast(row, DC_FLOAT32, at, dtype, count);
  return row;
}

void dc__gemm_epilogue_f32(const dc__gemm *g, void *c, void *aux, float *t, int64_t i, int64_t j, int64_t count) {
  int64_t at = i * g->ldc + j;
  float row[DC__GEMM_EPILOGUE_COLUMNS];
  if (g->alpha != 1) {
    dc__row_scale(t, count, (float)g->alpha);
  }
  if (g->beta != 0) {
    const float *old = epilogue_row(row, c, g->out_dtype, at, count);
    if (g->beta != 1) {
      memmove(row, old, (size_t)count * sizeof(float));
      dc__row_scale(row, count, (float)g->beta);
      old = row;
    }
    dc__row_add(t, old, count);
  }
  if (g->bias != NULL && (g->epilogue == DC__EPILOGUE_BIAS || g->epilogue == DC__EPILOGUE_GELU)) {
    dc__row_add(t, epilogue_row(row, g->bias, g->dtype, j, count), count);
  }
  if (g->epilogue == DC__EPILOGUE_GELU) {
    char rounded[DC__GEMM_EPILOGUE_COLUMNS * sizeof(float)];
    void *kept = aux != NULL ? dc__at(aux, g->out_dtype, at) : rounded;
    dc__cast(kept, g->out_dtype, t, DC_FLOAT32, count);
    dc__gelu(t, epilogue_row(row, kept, g->out_dtype, 0, count), count, g->gelu);
  } else if (g->epilogue == DC__EPILOGUE_GELU_BACK) {
    dc__gelu_backward(t, epilogue_row(row, aux, g->out_dtype, at, count), count, g->gelu);
  }
  dc__cast(dc__at(c, g->out_dtype, at), g->out_dtype, t, DC_FLOAT32, count);
}

void dc__gemm_epilogue_f64(const dc__gemm *g, double *c, const double *restrict t, int64_t i, int64_t j,
                           int64_t count) {
  double *restrict out = c + i * g->ldc + j;
  const double alpha = g->alpha;
  const double beta = g->beta;
  if (beta != 0) {
    for (int64_t x = 0; x < count; x++) {
      out[x] = alpha * t[x] + beta * out[x];
    }
  } else {
    for (int64_t x = 0; x < count; x++) {
      out[x] = alpha * t[x];
    }
  }
  if (g->epilogue == DC__EPILOGUE_BIAS) {
    const double *bias = g->bias;
    for (int64_t x = 0; x < count; x++) {
      out[x] += bias[j + x];
    }
  }
}
