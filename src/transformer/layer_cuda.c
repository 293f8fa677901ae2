/* The layer's operations on a device: kernels and matrix products, queued on the job's stream. The host never waits for
 * the device, so it cannot decide anything by values in device memory. */
#include <inttypes.h>
#include <math.h>

#include "kernels/cuda/kernels_cuda.h"
#include "transformer/transformer_internal.h"

dc_status dc__layer_check_cuda(const char *fn, dc_device *device, const dc_layer_config *config) {
  if (device->ops->matmul_init == NULL) {
    return dc__device_require_host(fn, device);
  }
  if (config->intermediate_size > DC__CUDA_MAX_SUM_COLUMNS) {
    return dc__fail(DC_E_UNSUPPORTED, "%s: config.intermediate_size = %" PRId64 ", must be at most %d on device \"%s\"",
                    fn, config->intermediate_size, (int)DC__CUDA_MAX_SUM_COLUMNS, device->name);
  }
  const dc_status status = device->ops->matmul_init(device);
  return status == DC_OK ? DC_OK : dc__fail(status, "%s: %s", fn, dc_last_error());
}

void dc__layer_upload_offsets(const dc__layer_job *job) {
  if (job->size.cu_seqlens != NULL) {
    int32_t *to = (int32_t *)(void *)(job->workspace + job->at.offsets);
    dc__cuda_offsets(job->stream, to, job->size.cu_seqlens, job->size.batch + 1);
  }
}

static const int32_t *layer_offsets(const dc__layer_job *job) {
  return job->size.cu_seqlens != NULL ? (const int32_t *)(const void *)(job->workspace + job->at.offsets) : NULL;
}

static dc__cuda_dropout dropout_args(const dc__layer_job *job, const dc__dropout *dropout) {
  dc__cuda_dropout d = {.offsets = layer_offsets(job), .longest = job->size.max_seqlen, .batch = job->size.batch};
  memcpy(d.key, dropout->key, sizeof d.key);
  d.threshold = dropout->threshold;
  d.scale = dropout->scale;
  return d;
}

static char *layer_gemm_workspace(const dc__layer_job *job) {
  char *begin = job->workspace + job->at.product;
  return begin + (0 - (uintptr_t)begin) % DC__MATMUL_ALIGNMENT;
}

static void layer_gemm_cuda(const dc__layer_job *job, const dc__gemm *g) {
  dc__cuda_gemm(job->stream, g, layer_gemm_workspace(job), DC__CUDA_GEMM_WORKSPACE_BYTES);
}

/* The GEMM library can only overwrite sums. Sums to be added go to the workspace first. */
static bool layer_gemm_sums_cuda(const dc__layer_job *job, const dc__gemm *g, void *sums) {
  void *to = job->accumulate ? job->workspace + job->at.sums : sums;
  const bool made = dc__cuda_gemm_sums(job->stream, g, to, layer_gemm_workspace(job), DC__CUDA_GEMM_WORKSPACE_BYTES);
  if (made && to != sums) {
    dc__cuda_accumulate(job->stream, sums, g->out_dtype, to, g->out_dtype, g->m);
  }
  return made;
}

static void layer_gelu_cuda(const dc__layer_job *job, void *f, const void *h) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_epilogue_args e = {.x = h, .out = f, .rows = job->size.tokens, .columns = c->intermediate_size};
  e.dtype = c->dtype;
  e.epilogue = DC__EPILOGUE_GELU;
  e.gelu = c->gelu == DC_GELU_ERF ? DC__GELU_ERF : DC__GELU_TANH;
  dc__cuda_epilogue(job->stream, &e);
}

static void residual_forward_cuda(const dc__layer_job *job, const dc__residual_args *r) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_residual_args a = {.u = r->u, .bias = r->bias, .residual = r->residual, .out = r->out, .y = r->y};
  a.gamma = r->gamma;
  a.beta = r->beta;
  a.stats = r->stats;
  a.rows = job->size.tokens;
  a.columns = c->hidden_size;
  a.eps = (float)c->layer_norm_eps;
  a.dtype = c->dtype;
  a.drop = dropout_args(job, &r->dropout);
  dc__cuda_residual(job->stream, &a);
}

static void layernorm_recompute_cuda(const dc__layer_job *job, void *y, const void *x, const void *gamma,
                                     const void *beta, const float *stats) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_layernorm_args a = {.y = y, .x = x, .gamma = gamma, .beta = beta, .stats = stats, .dtype = c->dtype};
  a.rows = job->size.tokens;
  a.columns = c->hidden_size;
  dc__cuda_layernorm(job->stream, &a);
}

static dc__cuda_sums gradient_sums(const dc__layer_job *job) {
  return (dc__cuda_sums){.parts = (float *)(void *)(job->workspace + job->at.sums),
                         .dtype = job->layer->config.grad_dtype,
                         .accumulate = job->accumulate};
}

static void layernorm_backward_cuda(const dc__layer_job *job, const dc__layernorm_backward_args *b) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_layernorm_backward_args a = {.dy = b->dy, .x = b->x, .gamma = b->gamma, .add = b->add, .stats = b->stats};
  void *dgamma = job->grad_weight[b->gamma_index], *dbeta = job->grad_weight[b->gamma_index + 1];
  const bool summed = dgamma != NULL || dbeta != NULL;
  if (b->dx == NULL && !summed) {
    return;
  }
  a.dx = b->dx;
  a.dropped = b->dropped != b->dx ? b->dropped : NULL;
  a.rows = job->size.tokens;
  a.columns = c->hidden_size;
  a.dtype = c->dtype;
  a.drop = dropout_args(job, &b->dropout);
  if (summed) {
    a.sums = gradient_sums(job);
    a.sums.to[0] = dbeta;
    a.sums.to[1] = dgamma;
  }
  dc__cuda_layernorm_backward(job->stream, &a);
}

static void dropout_apply_cuda(const dc__layer_job *job, void *out, const void *x, const dc__dropout *dropout) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_dropout_args a = {
      .out = out, .x = x, .rows = job->size.tokens, .columns = c->hidden_size, .dtype = c->dtype};
  a.drop = dropout_args(job, dropout);
  dc__cuda_dropout_rows(job->stream, &a);
}

static void column_sums_cuda(const dc__layer_job *job, const void *x, int64_t columns, int32_t index) {
  dc__cuda_sum_args a = {.x = x, .rows = job->size.tokens, .columns = columns, .dtype = job->layer->config.dtype};
  a.sums = gradient_sums(job);
  a.sums.to[0] = job->grad_weight[index];
  dc__cuda_column_sums(job->stream, &a);
}

static dc__cuda_attention_args attention_args(const dc__layer_job *job, const dc__attention_args *attention) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_attention_args a = {
      .qkv = attention->qkv, .c = attention->c, .softmax = attention->softmax, .dc = attention->dc};
  a.dqkv = attention->dqkv;
  a.delta = attention->delta;
  a.mask = job->mask;
  a.offsets = layer_offsets(job);
  a.tokens = job->size.tokens;
  a.longest = job->size.max_seqlen;
  a.batch = job->size.batch;
  a.heads = (int32_t)c->heads;
  a.d = (int32_t)(c->hidden_size / c->heads);
  a.wide_mask = job->mask_dtype == DC_FLOAT32;
  a.factor = (float)(1 / sqrt((double)a.d));
  memcpy(a.key, attention->dropout.key, sizeof a.key);
  a.threshold = attention->dropout.threshold;
  a.scale = attention->dropout.scale;
  return a;
}

static void attention_forward_cuda(const dc__layer_job *job, const dc__attention_args *attention) {
  const dc__cuda_attention_args a = attention_args(job, attention);
  dc__cuda_attention_forward(job->stream, &a, job->layer->config.dtype);
}

static void attention_backward_cuda(const dc__layer_job *job, const dc__attention_args *attention) {
  const dc__cuda_attention_args a = attention_args(job, attention);
  dc__cuda_attention_backward(job->stream, &a, job->layer->config.dtype);
}

/* The answer depends on the weights' values, and reading them would wait for the device. So the input is recomputed. */
static bool layernorm_invertible_cuda(const dc__layer_job *job) {
  (void)job;
  return false;
}

const dc__layer_work dc__layer_work_cuda = {
    .gemm = layer_gemm_cuda,
    .gemm_sums = layer_gemm_sums_cuda,
    .gelu = layer_gelu_cuda,
    .residual_forward = residual_forward_cuda,
    .layernorm_recompute = layernorm_recompute_cuda,
    .layernorm_backward = layernorm_backward_cuda,
    .drop = dropout_apply_cuda,
    .column_sums = column_sums_cuda,
    .attention_forward = attention_forward_cuda,
    .attention_backward = attention_backward_cuda,
    .invertible = layernorm_invertible_cuda,
};
