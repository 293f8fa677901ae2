/* The layer's forward pass. In training, tensors that the backward needs are in the reserve; inference reuses a few
 * buffers. Both run the same kernels, so without dropout they give the same bits. */
#include "transformer/transformer_internal.h"

/* The tensors of a pass (dc__layer_reserve_space, dc__layer_workspace); NULL if not needed. */
typedef struct layer_tensors {
  void *y0, *qkv, *c, *u, *z, *y1, *h, *f, *t;
  float *softmax, *stats[2];
} layer_tensors;

static void forward_input_norm(const dc__layer_job *job, const layer_tensors *p) {
  dc__residual_args r = {.u = job->input, .y = p->y0, .stats = p->stats[0]};
  r.gamma = job->weight[DC_LAYER_NORM_W];
  r.beta = job->weight[DC_LAYER_NORM_B];
  job->layer->work->residual_forward(job, &r);
}

static void forward_attention(const dc__layer_job *job, const layer_tensors *p) {
  const dc_layer_config *c = &job->layer->config;
  int64_t h = c->hidden_size;
  const void *x = c->pre_layer_norm ? p->y0 : job->input;
  dc__linear_forward(job, &(dc__linear_args){.x = x,
                                             .w = job->weight[DC_LAYER_ATTN_QKVW],
                                             .bias = job->weight[DC_LAYER_ATTN_QKVB],
                                             .y = p->qkv,
                                             .in = h,
                                             .out = 3 * h,
                                             .epilogue = DC__EPILOGUE_BIAS});
  dc__attention_args attention = {.qkv = p->qkv, .c = p->c, .softmax = p->softmax};
  attention.dropout = dc__layer_dropout(job->layer, job->offset, DC_DROPOUT_ATTENTION, job->dropout);
  job->layer->work->attention_forward(job, &attention);
  dc__linear_forward(
      job,
      &(dc__linear_args){
          .x = p->c, .w = job->weight[DC_LAYER_ATTN_OW], .y = p->u, .in = h, .out = h, .epilogue = DC__EPILOGUE_NONE});
  dc__residual_args r = {.u = p->u, .residual = job->input, .out = p->z, .y = p->y1, .stats = p->stats[1]};
  r.bias = job->weight[DC_LAYER_ATTN_OB];
  r.gamma = job->weight[DC_LAYER_ATTN_NW];
  r.beta = job->weight[DC_LAYER_ATTN_NB];
  r.dropout = dc__layer_dropout(job->layer, job->offset, DC_DROPOUT_PROJECTION, job->dropout);
  job->layer->work->residual_forward(job, &r);
}

static void forward_ffn(const dc__layer_job *job, const layer_tensors *p) {
  const dc_layer_config *c = &job->layer->config;
  int64_t h = c->hidden_size;
  int64_t i = c->intermediate_size;
  dc__linear_forward(job, &(dc__linear_args){.x = p->y1,
                                             .w = job->weight[DC_LAYER_INTER_W],
                                             .bias = job->weight[DC_LAYER_INTER_B],
                                             .y = p->f,
                                             .aux = p->h,
                                             .in = h,
                                             .out = i,
                                             .epilogue = DC__EPILOGUE_GELU});
  dc__linear_forward(
      job,
      &(dc__linear_args){
          .x = p->f, .w = job->weight[DC_LAYER_OUTPUT_W], .y = p->u, .in = i, .out = h, .epilogue = DC__EPILOGUE_NONE});
  dc__residual_args r = {.u = p->u, .bias = job->weight[DC_LAYER_OUTPUT_B]};
  r.dropout = dc__layer_dropout(job->layer, job->offset, DC_DROPOUT_OUTPUT, job->dropout);
  if (c->pre_layer_norm) {
    r.residual = p->z;
    r.out = job->output;
  } else {
    r.residual = p->y1;
    r.out = p->t;
    r.y = job->output;
    r.gamma = job->weight[DC_LAYER_NORM_W];
    r.beta = job->weight[DC_LAYER_NORM_B];
    r.stats = p->stats[0];
  }
  job->layer->work->residual_forward(job, &r);
}

static void forward_run(const dc__layer_job *job, const layer_tensors *p) {
  if (job->layer->config.pre_layer_norm) {
    forward_input_norm(job, p);
  }
  forward_attention(job, p);
  forward_ffn(job, p);
}

static void *forward_ptr(char *base, int64_t offset, char *other_base, int64_t other) {
  return offset >= 0 ? base + offset : other >= 0 ? other_base + other : NULL;
}

void dc__layer_forward(const dc__layer_job *job) {
  dc__layer_reserve_space r = dc__layer_reserve(job->layer, &job->size);
  const dc__layer_workspace w = job->at;
  char *in = job->reserve;
  char *ws = job->workspace;
  layer_tensors p = {
      .y0 = forward_ptr(in, r.y0, ws, w.b),
      .qkv = in + r.qkv,
      .c = in + r.c,
      .u = ws + w.a,
      .z = in + r.z,
      .y1 = forward_ptr(in, r.y1, ws, w.b),
      .h = in + r.h,
      .f = forward_ptr(in, r.f, ws, w.wide),
      .t = forward_ptr(in, r.t, NULL, -1),
      .softmax = (float *)(void *)(in + r.softmax),
      .stats = {(float *)(void *)(in + r.stats[0]), (float *)(void *)(in + r.stats[1])},
  };
  forward_run(job, &p);
}

void dc__layer_inference(const dc__layer_job *job) {
  const dc__layer_workspace w = job->at;
  char *ws = job->workspace;
  layer_tensors p = {.y0 = ws + w.a,
                     .qkv = ws + w.wide,
                     .c = ws + w.b,
                     .u = ws + w.a,
                     .z = ws + w.c,
                     .y1 = ws + w.b,
                     .f = ws + w.wide};
  forward_run(job, &p);
}
