/* The layer's work on a device whose memory the host cannot touch: its kernels and products, queued on the job's
 * stream. Nothing waits for the device, so nothing is decided by what lies in its memory. */
#include <math.h>

#include "transformer/inside.h"

dc_status dc__layer_check_there(const char *fn, dc_device *device) {
  if (device->ops->product_ready == NULL) {
    return dc__device_is_host(fn, device);
  }
  const dc_status status = device->ops->product_ready(device);
  return status == DC_OK ? DC_OK : dc__fail(status, "%s: %s", fn, dc_last_error());
}

void dc__layer_begin_there(const dc__layer_job *job) {
  if (job->size.cu_seqlens != NULL) {
    int32_t *to = (int32_t *)(void *)(job->workspace + job->at.offsets);
    dc__cuda_offsets(job->stream, to, job->size.cu_seqlens, job->size.batch + 1);
  }
}

static const int32_t *offsets(const dc__layer_job *job) {
  return job->size.cu_seqlens != NULL ? (const int32_t *)(const void *)(job->workspace + job->at.offsets) : NULL;
}

static dc__cuda_drop drop_of(const dc__layer_job *job, const dc__dropout *dropout) {
  dc__cuda_drop d = {.offsets = offsets(job), .longest = job->size.longest, .batch = job->size.batch};
  memcpy(d.key, dropout->key, sizeof d.key);
  d.threshold = dropout->threshold;
  d.scale = dropout->scale;
  return d;
}

static void gemm(const dc__layer_job *job, const dc__gemm *g) {
  dc__cuda_gemm(job->stream, g, job->workspace + job->at.product, DC__CUDA_PRODUCT_BYTES);
}

/* The library writes sums and adds none: what is to be added comes into the workspace first. */
static bool gemm_sums(const dc__layer_job *job, const dc__gemm *g, void *sums) {
  void *to = job->accumulate ? job->workspace + job->at.sums : sums;
  const bool made = dc__cuda_gemm_sums(job->stream, g, to, job->workspace + job->at.product, DC__CUDA_PRODUCT_BYTES);
  if (made && to != sums) {
    dc__cuda_accumulate(job->stream, sums, g->out_dtype, to, g->out_dtype, g->m);
  }
  return made;
}

static void gelu(const dc__layer_job *job, void *f, const void *h) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_epilogue_args e = {.x = h, .out = f, .rows = job->size.tokens, .columns = c->intermediate_size};
  e.dtype = c->dtype;
  e.epilogue = DC__EPILOGUE_GELU;
  e.gelu = c->gelu == DC_GELU_ERF ? DC__GELU_ERF : DC__GELU_TANH;
  dc__cuda_epilogue(job->stream, &e);
}

static void residual_forward(const dc__layer_job *job, const dc__residual *r) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_residual_args a = {.u = r->u, .bias = r->bias, .residual = r->residual, .out = r->out, .y = r->y};
  a.gamma = r->gamma;
  a.beta = r->beta;
  a.stats = r->stats;
  a.rows = job->size.tokens;
  a.columns = c->hidden_size;
  a.eps = (float)c->layer_norm_eps;
  a.dtype = c->dtype;
  a.drop = drop_of(job, &r->dropout);
  dc__cuda_residual(job->stream, &a);
}

static void normalize_again(const dc__layer_job *job, void *y, const void *x, const void *gamma, const void *beta,
                            const float *stats) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_normalize_args a = {.y = y, .x = x, .gamma = gamma, .beta = beta, .stats = stats, .dtype = c->dtype};
  a.rows = job->size.tokens;
  a.columns = c->hidden_size;
  dc__cuda_normalize(job->stream, &a);
}

static dc__cuda_sums sums_of(const dc__layer_job *job) {
  return (dc__cuda_sums){.parts = (float *)(void *)(job->workspace + job->at.sums),
                         .dtype = job->layer->config.grad_dtype,
                         .accumulate = job->accumulate};
}

static void normalize_back(const dc__layer_job *job, const dc__normal_back *b) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_normal_back_args a = {.dy = b->dy, .x = b->x, .gamma = b->gamma, .add = b->add, .stats = b->stats};
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
  a.drop = drop_of(job, &b->dropout);
  if (summed) {
    a.sums = sums_of(job);
    a.sums.to[0] = dbeta;
    a.sums.to[1] = dgamma;
  }
  dc__cuda_normal_back(job->stream, &a);
}

static void drop(const dc__layer_job *job, void *out, const void *x, const dc__dropout *dropout) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_drop_args a = {.out = out, .x = x, .rows = job->size.tokens, .columns = c->hidden_size, .dtype = c->dtype};
  a.drop = drop_of(job, dropout);
  dc__cuda_drop_rows(job->stream, &a);
}

static void column_sums(const dc__layer_job *job, const void *x, int64_t columns, int32_t index) {
  dc__cuda_sum_args a = {.x = x, .rows = job->size.tokens, .columns = columns, .dtype = job->layer->config.dtype};
  a.sums = sums_of(job);
  a.sums.to[0] = job->grad_weight[index];
  dc__cuda_column_sums(job->stream, &a);
}

static dc__cuda_attention_args attention_args(const dc__layer_job *job, const dc__attention *attention) {
  const dc_layer_config *c = &job->layer->config;
  dc__cuda_attention_args a = {
      .qkv = attention->qkv, .c = attention->c, .softmax = attention->softmax, .dc = attention->dc};
  a.dqkv = attention->dqkv;
  a.delta = attention->delta;
  a.mask = job->mask;
  a.offsets = offsets(job);
  a.tokens = job->size.tokens;
  a.longest = job->size.longest;
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

static void attention_forward(const dc__layer_job *job, const dc__attention *attention) {
  const dc__cuda_attention_args a = attention_args(job, attention);
  dc__cuda_attention_forward(job->stream, &a, job->layer->config.dtype);
}

static void attention_backward(const dc__layer_job *job, const dc__attention *attention) {
  const dc__cuda_attention_args a = attention_args(job, attention);
  dc__cuda_attention_backward(job->stream, &a, job->layer->config.dtype);
}

/* That depends on what the weights are, and asking the device would wait for it: the input is computed again instead.
 */
static bool invertible(const dc__layer_job *job) {
  (void)job;
  return false;
}

const dc__layer_work dc__layer_there = {
    .gemm = gemm,
    .gemm_sums = gemm_sums,
    .gelu = gelu,
    .residual_forward = residual_forward,
    .normalize_again = normalize_again,
    .normalize_back = normalize_back,
    .drop = drop,
    .column_sums = column_sums,
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
    .invertible = invertible,
};
