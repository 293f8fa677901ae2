/* The layer's operations on the CPU: on the calling thread and the layer's pool. */
#include <math.h>

#include "transformer/transformer_internal.h"

static void layer_gemm_cpu(const dc__layer_job *job, const dc__gemm *g) {
  dc__gemm_run(job->layer->pool, g);
}

static bool layer_gemm_sums_cpu(const dc__layer_job *job, const dc__gemm *g, void *sums) {
  (void)sums;
  layer_gemm_cpu(job, g);
  return false;
}

typedef struct gelu_task {
  const char *h;
  char *f;
  int64_t count;
  int32_t dtype, form;
} gelu_task;

enum { GELU_PIECE = 1 << 14 };

static void gelu_piece(void *arg, int64_t index, void *scratch) {
  const gelu_task *t = arg;
  int64_t first = index * GELU_PIECE;
  int64_t count = t->count - first < GELU_PIECE ? t->count - first : GELU_PIECE;
  size_t skip = (size_t)first * dc_dtype_size(t->dtype);
  float *x = scratch;
  dc__cast(x, DC_FLOAT32, t->h + skip, t->dtype, count);
  dc__gelu(x, x, count, t->form);
  dc__cast(t->f + skip, t->dtype, x, DC_FLOAT32, count);
}

static void layer_gelu_cpu(const dc__layer_job *job, void *f, const void *h) {
  const dc_layer_config *c = &job->layer->config;
  gelu_task t = {.h = h, .f = f, .count = job->size.tokens * c->intermediate_size, .dtype = c->dtype};
  t.form = c->gelu == DC_GELU_ERF ? DC__GELU_ERF : DC__GELU_TANH;
  dc__parallel_for(job->layer->pool, (t.count + GELU_PIECE - 1) / GELU_PIECE, gelu_piece, &t);
}

/* Whether the last normalisation's input can be recovered from its output to the type's accuracy. The error of (y -
 * beta) / gamma is the rounding of y, times 1 + |beta / gamma|. */
static bool layernorm_invertible_cpu(const dc__layer_job *job) {
  const dc_layer_config *c = &job->layer->config;
  int32_t dtype = c->dtype;
  double max_ratio = dtype == DC_FLOAT32 ? 64 : 4;
  double min_gamma = dtype == DC_FLOAT16 ? 0x1p-10 : 0x1p-100;
  for (int64_t j = 0; j < c->hidden_size; j++) {
    float gamma;
    float beta;
    dc__cast(&gamma, DC_FLOAT32, (const char *)job->weight[DC_LAYER_NORM_W] + (size_t)j * dc_dtype_size(dtype), dtype,
             1);
    dc__cast(&beta, DC_FLOAT32, (const char *)job->weight[DC_LAYER_NORM_B] + (size_t)j * dc_dtype_size(dtype), dtype,
             1);
    if (!(fabs((double)gamma) >= min_gamma && fabs((double)beta) <= max_ratio * fabs((double)gamma))) {
      return false;
    }
  }
  return true;
}

const dc__layer_work dc__layer_work_cpu = {
    .gemm = layer_gemm_cpu,
    .gemm_sums = layer_gemm_sums_cpu,
    .gelu = layer_gelu_cpu,
    .residual_forward = dc__residual_forward,
    .layernorm_recompute = dc__layernorm_recompute,
    .layernorm_backward = dc__layernorm_backward,
    .drop = dc__dropout_apply,
    .column_sums = dc__column_sums,
    .attention_forward = dc__attention_forward,
    .attention_backward = dc__attention_backward,
    .invertible = layernorm_invertible_cpu,
};
