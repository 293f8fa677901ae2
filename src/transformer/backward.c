/* The layer's backward pass. Buffers of the workspace serve several tensors in turn (dc__layer_workspace). Tensors
 * that the memory flags did not keep are recomputed, with the forward's bits. */
#include "transformer/transformer_internal.h"

typedef struct backward_pass {
  const dc__layer_job *job;
  const dc_layer_config *c;
  dc__layer_reserve_space at;
  dc__layer_workspace w;
  dc__dropout drop2, drop3;
} backward_pass;

static char *backward_saved(const backward_pass *b, int64_t offset) {
  return offset >= 0 ? b->job->reserve + offset : NULL;
}
static char *backward_buffer(const backward_pass *b, int64_t offset) {
  return b->job->workspace + offset;
}
static const float *backward_stats(const backward_pass *b, int32_t which) {
  return (const float *)(const void *)backward_saved(b, b->at.stats[which]);
}
static const void *backward_weight(const backward_pass *b, int32_t index) {
  return b->job->weight[index];
}

/* f, kept or recomputed from h. */
static const void *gelu_output(const backward_pass *b) {
  if (b->at.f >= 0) {
    return backward_saved(b, b->at.f);
  }
  b->job->layer->work->gelu(b->job, backward_buffer(b, b->w.wide), backward_saved(b, b->at.h));
  return backward_buffer(b, b->w.wide);
}

/* y1, kept or recomputed into buffer d. */
static const void *ffn_input(const backward_pass *b) {
  if (b->at.y1 >= 0) {
    return backward_saved(b, b->at.y1);
  }
  void *y1 = backward_buffer(b, b->w.d);
  b->job->layer->work->layernorm_recompute(b->job, y1, backward_saved(b, b->at.z), backward_weight(b, DC_LAYER_ATTN_NW),
                                           backward_weight(b, DC_LAYER_ATTN_NB), backward_stats(b, 1));
  return y1;
}

/* Post-LN: the input of the last normalisation; NULL if it is recovered from the output. */
static const void *post_ln_sum(const backward_pass *b, const void *f) {
  if (b->at.t >= 0) {
    return backward_saved(b, b->at.t);
  }
  if (b->job->layer->work->invertible(b->job)) {
    return NULL;
  }
  void *t = backward_buffer(b, b->w.c);
  dc__linear_forward(b->job, &(dc__linear_args){.x = f,
                                                .w = backward_weight(b, DC_LAYER_OUTPUT_W),
                                                .y = t,
                                                .in = b->c->intermediate_size,
                                                .out = b->c->hidden_size,
                                                .epilogue = DC__EPILOGUE_NONE});
  dc__residual_args r = {.u = t, .bias = backward_weight(b, DC_LAYER_OUTPUT_B), .residual = ffn_input(b), .out = t};
  r.dropout = b->drop3;
  b->job->layer->work->residual_forward(b->job, &r);
  return t;
}

/* Computes dw, the gradient of the second product, from the output's gradient; for Post-LN also dt, in buffer b. */
static const void *backward_output(const backward_pass *b, const void *f) {
  const dc__layer_job *job = b->job;
  void *dw = backward_buffer(b, b->w.a);
  if (b->c->pre_layer_norm) {
    if (b->drop3.threshold == 0) {
      return job->grad_output;
    }
    job->layer->work->drop(job, dw, job->grad_output, &b->drop3);
    return dw;
  }
  dc__layernorm_backward_args n = {
      .dy = job->grad_output, .x = post_ln_sum(b, f), .y = job->output, .stats = backward_stats(b, 0)};
  n.gamma = backward_weight(b, DC_LAYER_NORM_W);
  n.beta = backward_weight(b, DC_LAYER_NORM_B);
  n.dx = backward_buffer(b, b->w.b);
  n.dropped = b->drop3.threshold != 0 ? dw : n.dx;
  n.dropout = b->drop3;
  n.gamma_index = DC_LAYER_NORM_W;
  job->layer->work->layernorm_backward(job, &n);
  return n.dropped;
}

/* Backward of the feed-forward half; leaves dy1 in buffer b. */
static void backward_ffn(const backward_pass *b) {
  const dc__layer_job *job = b->job;
  int64_t h = b->c->hidden_size;
  int64_t i = b->c->intermediate_size;
  const void *f = gelu_output(b);
  const void *dw = backward_output(b, f);
  dc__linear_backward_weight(job, dw, f, DC_LAYER_OUTPUT_W, DC_LAYER_OUTPUT_B);
  void *dh = backward_buffer(b, b->w.wide);
  dc__linear_backward_input(job, dw, backward_weight(b, DC_LAYER_OUTPUT_W), dh, i, h, false,
                            backward_saved(b, b->at.h));
  if (job->grad_weight[DC_LAYER_INTER_W] != NULL || job->grad_weight[DC_LAYER_INTER_B] != NULL) {
    dc__linear_backward_weight(job, dh, ffn_input(b), DC_LAYER_INTER_W, DC_LAYER_INTER_B);
  }
  dc__linear_backward_input(job, dh, backward_weight(b, DC_LAYER_INTER_W), backward_buffer(b, b->w.b), h, i,
                            !b->c->pre_layer_norm, NULL);
}

/* Backward of the attention half; leaves dqkv in buffer wide and returns dz. */
static const void *backward_attention(const backward_pass *b) {
  const dc__layer_job *job = b->job;
  int64_t h = b->c->hidden_size;
  dc__layernorm_backward_args n = {
      .dy = backward_buffer(b, b->w.b), .x = backward_saved(b, b->at.z), .stats = backward_stats(b, 1)};
  n.gamma = backward_weight(b, DC_LAYER_ATTN_NW);
  n.beta = backward_weight(b, DC_LAYER_ATTN_NB);
  n.add = b->c->pre_layer_norm ? job->grad_output : NULL;
  n.dx = !b->c->pre_layer_norm && job->grad_input != NULL ? job->grad_input : backward_buffer(b, b->w.c);
  n.dropped = b->drop2.threshold != 0 ? backward_buffer(b, b->w.d) : n.dx;
  n.dropout = b->drop2;
  n.gamma_index = DC_LAYER_ATTN_NW;
  job->layer->work->layernorm_backward(job, &n);
  dc__linear_backward_weight(job, n.dropped, backward_saved(b, b->at.c), DC_LAYER_ATTN_OW, DC_LAYER_ATTN_OB);
  dc__linear_backward_input(job, n.dropped, backward_weight(b, DC_LAYER_ATTN_OW), backward_buffer(b, b->w.a), h, h,
                            false, NULL);
  dc__attention_args a = {
      .qkv = backward_saved(b, b->at.qkv), .c = backward_saved(b, b->at.c), .dc = backward_buffer(b, b->w.a)};
  a.softmax = (float *)(void *)backward_saved(b, b->at.softmax);
  a.dropout = dc__layer_dropout(job->layer, job->offset, DC_DROPOUT_ATTENTION, job->dropout);
  a.dqkv = backward_buffer(b, b->w.wide);
  a.delta = (float *)(void *)backward_buffer(b, b->w.delta);
  a.dq = b->w.dq >= 0 ? (float *)(void *)backward_buffer(b, b->w.dq) : NULL;
  job->layer->work->attention_backward(job, &a);
  return n.dx;
}

/* Backward of the first product and, in Pre-LN, of the normalisation before it. */
static void backward_input(const backward_pass *b, const void *dz) {
  const dc__layer_job *job = b->job;
  int64_t h = b->c->hidden_size;
  const void *dqkv = backward_buffer(b, b->w.wide);
  const void *x = job->input;
  if (b->c->pre_layer_norm) {
    x = backward_saved(b, b->at.y0);
  }
  if (x == NULL) {
    x = backward_buffer(b, b->w.d);
    job->layer->work->layernorm_recompute(job, backward_buffer(b, b->w.d), job->input,
                                          backward_weight(b, DC_LAYER_NORM_W), backward_weight(b, DC_LAYER_NORM_B),
                                          backward_stats(b, 0));
  }
  dc__linear_backward_weight(job, dqkv, x, DC_LAYER_ATTN_QKVW, DC_LAYER_ATTN_QKVB);
  if (!b->c->pre_layer_norm) {
    if (job->grad_input != NULL) { /* it already holds dz */
      dc__linear_backward_input(job, dqkv, backward_weight(b, DC_LAYER_ATTN_QKVW), job->grad_input, h, 3 * h, true,
                                NULL);
    }
    return;
  }
  void *dy0 = backward_buffer(b, b->w.b);
  dc__linear_backward_input(job, dqkv, backward_weight(b, DC_LAYER_ATTN_QKVW), dy0, h, 3 * h, false, NULL);
  dc__layernorm_backward_args n = {
      .dy = dy0, .x = job->input, .stats = backward_stats(b, 0), .add = dz, .dx = job->grad_input};
  n.gamma = backward_weight(b, DC_LAYER_NORM_W);
  n.beta = backward_weight(b, DC_LAYER_NORM_B);
  n.gamma_index = DC_LAYER_NORM_W;
  job->layer->work->layernorm_backward(job, &n);
}

void dc__layer_backward(const dc__layer_job *job) {
  backward_pass b = {.job = job, .c = &job->layer->config};
  b.at = dc__layer_reserve(job->layer, &job->size);
  b.w = job->at;
  b.drop2 = dc__layer_dropout(job->layer, job->offset, DC_DROPOUT_PROJECTION, job->dropout);
  b.drop3 = dc__layer_dropout(job->layer, job->offset, DC_DROPOUT_OUTPUT, job->dropout);
  backward_ffn(&b);
  backward_input(&b, backward_attention(&b));
}
