/* Attention in tiles, backward. Probabilities are recomputed from the scores and each row's maximum and sum. One
 * task is one head of one sample. For each block of keys it walks over the blocks of queries, sums that block's dk
 * and dv in scratch memory, and adds to dq. */
#include <math.h>

#include "transformer/attention.h"

typedef struct attention_backward_task {
  const dc__layer_job *job;
  const dc__attention_args *a;
} attention_backward_task;

/* The gradients of this head, at its first token. */
typedef struct head_gradients {
  const char *dc; /* of the output, [N, H] */
  int64_t hidden;
  char *dq, *dk, *dv; /* head.stride apart per token */
  float *delta;
} head_gradients;

static const char *attention_row(const char *base, int64_t token, int64_t stride, int32_t dtype) {
  return base + (size_t)(token * stride) * dc_dtype_size(dtype);
}

/* Rows to prefetch: a head's piece of a row is too short for the hardware prefetcher. */
enum { PREFETCH_ROWS = 8 };

/* delta = rowsum(dout out), which is rowsum(dP P) (Dao et al.). */
static void row_sum_delta(const dc__attention_head *head, const head_gradients *g, const void *c, float *a, float *b) {
  const size_t bytes = (size_t)head->d * dc_dtype_size(head->dtype);
  const char *first = attention_row(c, head->out, 1, head->dtype);
  for (int64_t i = 0; i < head->length; i++) {
    const char *out = attention_row(first, i, g->hidden, head->dtype);
    if (i + PREFETCH_ROWS < head->length) {
      dc__prefetch(attention_row(g->dc, i + PREFETCH_ROWS, g->hidden, head->dtype), bytes);
      dc__prefetch(attention_row(first, i + PREFETCH_ROWS, g->hidden, head->dtype), bytes);
    }
    dc__cast(a, DC_FLOAT32, attention_row(g->dc, i, g->hidden, head->dtype), head->dtype, head->d);
    dc__cast(b, DC_FLOAT32, out, head->dtype, head->d);
    g->delta[i] = dc__row_dot(a, b, head->d);
  }
}

/* out (+)= alpha x' y over the tile's queries: [keys, d], float32. */
static void accumulate_dk_dv(const dc__attention_head *head, const dc__attention_tile *tile, const void *x,
                             const void *y, int64_t ldy, double alpha, float *out, void *scratch) {
  dc__gemm g = {.dtype = head->dtype, .out_dtype = DC_FLOAT32, .batch = 1, .trans_a = true, .alpha = alpha};
  g.m = tile->keys;
  g.n = head->d;
  g.k = tile->queries;
  g.a = x;
  g.b = y;
  g.c = out;
  g.lda = tile->keys;
  g.ldb = ldy;
  g.ldc = head->d;
  g.beta = tile->first_query > 0 ? 1 : 0;
  dc__gemm_serial(&g, scratch);
}

/* dq (+)= ds k / sqrt d: into the gradient itself, or into float32 while key blocks are added. */
static void accumulate_dq(const dc__attention_head *head, const dc__attention_tile *tile, const head_gradients *to,
                          float *wide, const void *ds, void *scratch) {
  dc__gemm g = {.dtype = head->dtype, .out_dtype = wide != NULL ? DC_FLOAT32 : head->dtype, .batch = 1};
  g.alpha = 1 / sqrt((double)head->d);
  g.m = tile->queries;
  g.n = head->d;
  g.k = tile->keys;
  g.a = ds;
  g.b = dc__attention_head_row(head, head->k, tile->first_key);
  g.lda = tile->keys;
  g.ldb = head->stride;
  if (wide != NULL) {
    g.c = wide + tile->first_query * to->hidden;
    g.ldc = to->hidden;
  } else {
    g.c = to->dq + (size_t)(tile->first_query * head->stride) * dc_dtype_size(head->dtype);
    g.ldc = head->stride;
  }
  g.beta = tile->first_key > 0 ? 1 : 0;
  dc__gemm_serial(&g, scratch);
}

/* Computes P, and dP = dout v', with dropout in dP. On return s = P m and dp = P (dP m - delta). */
static void softmax_backward_tile(const dc__attention_head *head, const dc__attention_tile *tile,
                                  const dc__attention_args *a, const head_gradients *g,
                                  const dc__attention_scratch *at) {
  const float *row_max = a->softmax + head->statistics;
  const float *inverse = row_max + head->all_statistics;
  for (int64_t i = 0; i < tile->queries; i++) {
    int64_t query = tile->first_query + i;
    float *p = at->s + i * tile->keys;
    float *dp = at->dp + i * tile->keys;
    float *m = a->dropout.threshold != 0 ? at->m : NULL;
    dc__row_exp_scaled(p, tile->keys, row_max[query], inverse[query]);
    if (m != NULL) {
      dc__dropout_row(m, tile->keys, tile->first_key, (uint32_t)query, head->plane, &a->dropout);
    }
    dc__row_softmax_backward(dp, p, m, tile->keys, g->delta[query]);
  }
}

static void backward_tile(const dc__attention_head *head, const dc__attention_tile *tile, const dc__attention_args *a,
                          const head_gradients *to, float *wide, const dc__attention_scratch *at) {
  dc__attention_scores(head, tile, at->s, at->gemm);
  const char *dout = attention_row(to->dc, tile->first_query, to->hidden, head->dtype);
  dc__gemm g = {.dtype = head->dtype, .out_dtype = DC_FLOAT32, .batch = 1, .trans_b = true, .alpha = 1};
  g.m = tile->queries;
  g.n = tile->keys;
  g.k = head->d;
  g.a = dout;
  g.b = dc__attention_head_row(head, head->v, tile->first_key);
  g.c = at->dp;
  g.lda = to->hidden;
  g.ldb = head->stride;
  g.ldc = tile->keys;
  dc__gemm_serial(&g, at->gemm);
  softmax_backward_tile(head, tile, a, to, at);
  const void *p = dc__attention_cast_tile(head, at->p, at->s, tile->queries * tile->keys);
  const void *ds = dc__attention_cast_tile(head, at->ds, at->dp, tile->queries * tile->keys);
  accumulate_dk_dv(head, tile, p, dout, to->hidden, 1, at->out[0], at->gemm);
  accumulate_dk_dv(head, tile, ds, dc__attention_head_row(head, head->q, tile->first_query), head->stride,
                   1 / sqrt((double)head->d), at->out[1], at->gemm);
  accumulate_dq(head, tile, to, wide, ds, at->gemm);
}

static void store_rows(char *dst, int64_t stride, int32_t dtype, const float *src, int64_t from, int64_t rows,
                       int64_t count) {
  for (int64_t i = 0; i < rows; i++) {
    dc__cast(dst + (size_t)(i * stride) * dc_dtype_size(dtype), dtype, src + i * from, DC_FLOAT32, count);
  }
}

static void attention_backward_head(void *arg, int64_t index, void *scratch) {
  const attention_backward_task *task = arg;
  const dc__attention_args *a = task->a;
  dc__attention_head head = dc__attention_head_of(task->job, a, index);
  size_t size = dc_dtype_size(head.dtype);
  int64_t hidden = task->job->layer->config.hidden_size;
  head_gradients to = {.dc = (const char *)a->dc + (size_t)head.out * size, .hidden = hidden};
  to.dq = (char *)a->dqkv + (size_t)(head.q - (const char *)a->qkv);
  to.dk = to.dq + (size_t)hidden * size;
  to.dv = to.dk + (size_t)hidden * size;
  to.delta = a->delta + head.statistics;
  dc__attention_scratch at = dc__attention_scratch_layout(scratch, head.d);
  row_sum_delta(&head, &to, a->c, at.out[0], at.out[1]); /* in at.out, as a tile may have fewer than d elements */
  int64_t block_queries = dc__attention_queries(head.d);
  int64_t block_keys = dc__attention_keys(head.d);
  float *wide = a->dq != NULL ? a->dq + head.out : NULL;
  dc__attention_tile tile;
  for (tile.first_key = 0; tile.first_key < head.length; tile.first_key += block_keys) {
    tile.keys = head.length - tile.first_key < block_keys ? head.length - tile.first_key : block_keys;
    for (tile.first_query = 0; tile.first_query < head.length; tile.first_query += block_queries) {
      int64_t left = head.length - tile.first_query;
      tile.queries = left < block_queries ? left : block_queries;
      backward_tile(&head, &tile, a, &to, wide, &at);
    }
    int64_t first = tile.first_key * head.stride;
    store_rows(to.dv + (size_t)first * size, head.stride, head.dtype, at.out[0], head.d, tile.keys, head.d);
    store_rows(to.dk + (size_t)first * size, head.stride, head.dtype, at.out[1], head.d, tile.keys, head.d);
  }
  if (wide != NULL) {
    store_rows(to.dq, head.stride, head.dtype, wide, hidden, head.length, head.d);
  }
}

void dc__attention_backward(const dc__layer_job *job, const dc__attention_args *attention) {
  attention_backward_task task = {job, attention};
  const dc_layer_config *c = &job->layer->config;
  int64_t cost = job->size.max_seqlen * job->size.max_seqlen * (4 + c->hidden_size / c->heads / 2);
  dc__parallel_for_cost(job->layer->pool, job->size.batch * c->heads, cost, attention_backward_head, &task);
}
