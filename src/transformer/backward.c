/* The layer's backward pass. Buffers of the workspace serve several tensors in turn (dc__workspace); what the memory
 * flags did not keep is computed again, bit for bit as the forward had it. */
#include "transformer/inside.h"

typedef struct back {
  const dc__layer_job *job;
  const dc_layer_config *c;
  dc__reserve at;
  dc__workspace w;
  dc__dropout drop2, drop3;
} back;

static char *kept(const back *b, int64_t offset) {
  return offset >= 0 ? b->job->reserve + offset : NULL;
}
static char *space(const back *b, int64_t offset) {
  return b->job->workspace + offset;
}
static const float *stats(const back *b, int32_t which) {
  return (const float *)(const void *)kept(b, b->at.stats[which]);
}
static const void *weight(const back *b, int32_t index) {
  return b->job->weight[index];
}

/* f, kept or computed again from h. */
static const void *activation(const back *b) {
  if (b->at.f >= 0) {
    return kept(b, b->at.f);
  }
  b->job->layer->work->gelu(b->job, space(b, b->w.wide), kept(b, b->at.h));
  return space(b, b->w.wide);
}

/* y1, kept or computed again into buffer d. */
static const void *second_input(const back *b) {
  if (b->at.y1 >= 0) {
    return kept(b, b->at.y1);
  }
  void *y1 = space(b, b->w.d);
  b->job->layer->work->normalize_again(b->job, y1, kept(b, b->at.z), weight(b, DC_LAYER_ATTN_NW),
                                       weight(b, DC_LAYER_ATTN_NB), stats(b, 1));
  return y1;
}

/* Post-LN: the sum before the last normalisation; NULL: its output serves. */
static const void *last_sum(const back *b, const void *f) {
  if (b->at.t >= 0) {
    return kept(b, b->at.t);
  }
  if (b->job->layer->work->invertible(b->job)) {
    return NULL;
  }
  void *t = space(b, b->w.c);
  dc__linear_forward(b->job, &(dc__linear){f, weight(b, DC_LAYER_OUTPUT_W), NULL, t, NULL, b->c->intermediate_size,
                                           b->c->hidden_size, DC__EPILOGUE_NONE});
  dc__residual r = {.u = t, .bias = weight(b, DC_LAYER_OUTPUT_B), .residual = second_input(b), .out = t};
  r.dropout = b->drop3;
  b->job->layer->work->residual_forward(b->job, &r);
  return t;
}

/* From the gradient of the output to that of the second product's result, dw; Post-LN also dt, in buffer b. */
static const void *back_output(const back *b, const void *f) {
  const dc__layer_job *job = b->job;
  void *dw = space(b, b->w.a);
  if (b->c->pre_layer_norm) {
    if (b->drop3.threshold == 0) {
      return job->grad_output;
    }
    job->layer->work->drop(job, dw, job->grad_output, &b->drop3);
    return dw;
  }
  dc__normal_back n = {.dy = job->grad_output, .x = last_sum(b, f), .y = job->output, .stats = stats(b, 0)};
  n.gamma = weight(b, DC_LAYER_NORM_W);
  n.beta = weight(b, DC_LAYER_NORM_B);
  n.dx = space(b, b->w.b);
  n.dropped = b->drop3.threshold != 0 ? dw : n.dx;
  n.dropout = b->drop3;
  n.gamma_index = DC_LAYER_NORM_W;
  job->layer->work->normalize_back(job, &n);
  return n.dropped;
}

/* The feed-forward half; leaves dy1 in buffer b. */
static void back_feed(const back *b) {
  const dc__layer_job *job = b->job;
  int64_t h = b->c->hidden_size;
  int64_t i = b->c->intermediate_size;
  const void *f = activation(b);
  const void *dw = back_output(b, f);
  dc__linear_back_weight(job, dw, f, DC_LAYER_OUTPUT_W, DC_LAYER_OUTPUT_B);
  void *dh = space(b, b->w.wide);
  dc__linear_back_input(job, dw, weight(b, DC_LAYER_OUTPUT_W), dh, i, h, false, kept(b, b->at.h));
  if (job->grad_weight[DC_LAYER_INTER_W] != NULL || job->grad_weight[DC_LAYER_INTER_B] != NULL) {
    dc__linear_back_weight(job, dh, second_input(b), DC_LAYER_INTER_W, DC_LAYER_INTER_B);
  }
  dc__linear_back_input(job, dh, weight(b, DC_LAYER_INTER_W), space(b, b->w.b), h, i, !b->c->pre_layer_norm, NULL);
}

/* The attention half; leaves dqkv in buffer wide and returns dz. */
static const void *back_attention(const back *b) {
  const dc__layer_job *job = b->job;
  int64_t h = b->c->hidden_size;
  dc__normal_back n = {.dy = space(b, b->w.b), .x = kept(b, b->at.z), .stats = stats(b, 1)};
  n.gamma = weight(b, DC_LAYER_ATTN_NW);
  n.beta = weight(b, DC_LAYER_ATTN_NB);
  n.add = b->c->pre_layer_norm ? job->grad_output : NULL;
  n.dx = !b->c->pre_layer_norm && job->grad_input != NULL ? job->grad_input : space(b, b->w.c);
  n.dropped = b->drop2.threshold != 0 ? space(b, b->w.d) : n.dx;
  n.dropout = b->drop2;
  n.gamma_index = DC_LAYER_ATTN_NW;
  job->layer->work->normalize_back(job, &n);
  dc__linear_back_weight(job, n.dropped, kept(b, b->at.c), DC_LAYER_ATTN_OW, DC_LAYER_ATTN_OB);
  dc__linear_back_input(job, n.dropped, weight(b, DC_LAYER_ATTN_OW), space(b, b->w.a), h, h, false, NULL);
  dc__attention a = {.qkv = kept(b, b->at.qkv), .c = kept(b, b->at.c), .dc = space(b, b->w.a)};
  a.softmax = (float *)(void *)kept(b, b->at.softmax);
  a.dropout = dc__layer_dropout(job->layer, job->offset, DC_DROPOUT_ATTENTION, job->dropout);
  a.dqkv = space(b, b->w.wide);
  a.delta = (float *)(void *)space(b, b->w.delta);
  a.dq = b->w.dq >= 0 ? (float *)(void *)space(b, b->w.dq) : NULL;
  job->layer->work->attention_backward(job, &a);
  return n.dx;
}

/* The first product and, in Pre-LN, the normalisation before it. */
static void back_input(const back *b, const void *dz) {
  const dc__layer_job *job = b->job;
  int64_t h = b->c->hidden_size;
  const void *dqkv = space(b, b->w.wide);
  const void *x = job->input;
  if (b->c->pre_layer_norm) {
    x = kept(b, b->at.y0);
  }
  if (x == NULL) {
    x = space(b, b->w.d);
    job->layer->work->normalize_again(job, space(b, b->w.d), job->input, weight(b, DC_LAYER_NORM_W),
                                      weight(b, DC_LAYER_NORM_B), stats(b, 0));
  }
  dc__linear_back_weight(job, dqkv, x, DC_LAYER_ATTN_QKVW, DC_LAYER_ATTN_QKVB);
  if (!b->c->pre_layer_norm) {
    if (job->grad_input != NULL) { /* where dz lies */
      dc__linear_back_input(job, dqkv, weight(b, DC_LAYER_ATTN_QKVW), job->grad_input, h, 3 * h, true, NULL);
    }
    return;
  }
  void *dy0 = space(b, b->w.b);
  dc__linear_back_input(job, dqkv, weight(b, DC_LAYER_ATTN_QKVW), dy0, h, 3 * h, false, NULL);
  dc__normal_back n = {.dy = dy0, .x = job->input, .stats = stats(b, 0), .add = dz, .dx = job->grad_input};
  n.gamma = weight(b, DC_LAYER_NORM_W);
  n.beta = weight(b, DC_LAYER_NORM_B);
  n.gamma_index = DC_LAYER_NORM_W;
  job->layer->work->normalize_back(job, &n);
}

void dc__layer_backward(const dc__layer_job *job) {
  back b = {.job = job, .c = &job->layer->config};
  b.at = dc__layer_reserve(job->layer, &job->size);
  b.w = job->at;
  b.drop2 = dc__layer_dropout(job->layer, job->offset, DC_DROPOUT_PROJECTION, job->dropout);
  b.drop3 = dc__layer_dropout(job->layer, job->offset, DC_DROPOUT_OUTPUT, job->dropout);
  back_feed(&b);
  back_input(&b, back_attention(&b));
}
