/* Attention in tiles, forward. A block of queries visits the keys block by block, with online softmax (Milakov and
 * Gimelshein 2018; Dao et al. 2022). A task is a block of queries of one head of one sample, on one thread. */
#include <math.h>

#include "transformer/attention.h"

/* Tiles are smaller for wide heads, so that a task fits in its scratch memory. */
static int64_t clamp_int64(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}
int64_t dc__attention_queries(int64_t d) {
  return clamp_int64((1 << 17) / d / 16 * 16, 16, 256);
}
int64_t dc__attention_keys(int64_t d) {
  return clamp_int64((1 << 16) / d / 16 * 16, 16, 512);
}

void dc__attention_scores(const dc__attention_head *head, const dc__attention_tile *tile, float *s, void *scratch) {
  dc__gemm g = {.dtype = head->dtype, .out_dtype = DC_FLOAT32, .batch = 1, .trans_b = true};
  g.alpha = 1 / sqrt((double)head->d);
  g.m = tile->queries;
  g.n = tile->keys;
  g.k = head->d;
  g.a = dc__attention_head_row(head, head->q, tile->first_query);
  g.b = dc__attention_head_row(head, head->k, tile->first_key);
  g.c = s;
  g.lda = g.ldb = head->stride;
  g.ldc = tile->keys;
  dc__gemm_serial(&g, scratch);
  if (head->mask == NULL) {
    return;
  }
  float *mask = scratch;
  dc__cast(mask, DC_FLOAT32, head->mask + (size_t)tile->first_key * dc_dtype_size(head->mask_dtype), head->mask_dtype,
           tile->keys);
  for (int64_t i = 0; i < tile->queries; i++) {
    dc__row_add(s + i * tile->keys, mask, tile->keys);
  }
}

dc__attention_head dc__attention_head_of(const dc__layer_job *job, const dc__attention_args *a, int64_t plane) {
  const dc_layer_config *c = &job->layer->config;
  int64_t sample = plane / c->heads;
  int64_t h = plane % c->heads;
  dc__attention_head head = {.dtype = c->dtype, .d = c->hidden_size / c->heads, .stride = 3 * c->hidden_size};
  head.plane = (uint32_t)plane;
  head.first_token = dc__first_token(&job->size, sample);
  head.length = dc__sample_length(&job->size, sample);
  size_t size = dc_dtype_size(c->dtype);
  head.q = (const char *)a->qkv + (size_t)(head.first_token * head.stride + h * head.d) * size;
  head.k = head.q + (size_t)c->hidden_size * size;
  head.v = head.k + (size_t)c->hidden_size * size;
  head.out = head.first_token * c->hidden_size + h * head.d;
  head.statistics = h * job->size.tokens + head.first_token;
  head.all_statistics = c->heads * job->size.tokens;
  head.mask_dtype = job->mask_dtype;
  if (job->mask != NULL) {
    head.mask = (const char *)job->mask + (size_t)(sample * job->size.max_seqlen) * dc_dtype_size(job->mask_dtype);
  }
  return head;
}

typedef struct attention_forward_task {
  const dc__layer_job *job;
  const dc__attention_args *a;
  int64_t blocks; /* blocks of queries in the longest sample */
} attention_forward_task;

/* Online softmax of one query's row of scores; updates out, sum and row_max. */
static void online_softmax_row(float *row, int64_t keys, float *out, int64_t d, float *row_max, float *sum) {
  float found = dc__row_max(row, keys);
  float next = found > *row_max ? found : *row_max;
  if (next == -INFINITY) { /* all masked so far, unless one is NaN */
    *sum += dc__row_exp(row, keys, 0);
    return;
  }
  float factor = 1;
  if (next > *row_max && *sum != 0) {
    float correction = *row_max;
    dc__row_exp(&correction, 1, next);
    factor = correction;
    dc__row_scale(out, d, factor);
  }
  *sum = *sum * factor + dc__row_exp(row, keys, next);
  *row_max = next;
}

static void multiply_pv(const dc__attention_head *head, const dc__attention_tile *tile, const void *p, float *out,
                        void *scratch) {
  dc__gemm g = {.dtype = head->dtype, .out_dtype = DC_FLOAT32, .batch = 1, .alpha = 1};
  g.m = tile->queries;
  g.n = head->d;
  g.k = tile->keys;
  g.a = p;
  g.b = dc__attention_head_row(head, head->v, tile->first_key);
  g.c = out;
  g.lda = tile->keys;
  g.ldb = head->stride;
  g.ldc = head->d;
  g.beta = 1;
  dc__gemm_serial(&g, scratch);
}

static void attention_forward_block(void *arg, int64_t index, void *scratch) {
  const attention_forward_task *task = arg;
  const dc__attention_args *a = task->a;
  dc__attention_head head = dc__attention_head_of(task->job, a, index / task->blocks);
  int64_t block_keys = dc__attention_keys(head.d);
  dc__attention_tile tile = {.first_query = index % task->blocks * dc__attention_queries(head.d)};
  tile.queries = clamp_int64(head.length - tile.first_query, 0, dc__attention_queries(head.d));
  if (tile.queries == 0) {
    return;
  }
  dc__attention_scratch at = dc__attention_scratch_layout(scratch, head.d);
  float row_max[256];
  float sum[256];
  for (int64_t i = 0; i < tile.queries; i++) {
    row_max[i] = -INFINITY;
    sum[i] = 0;
  }
  memset(at.out[0], 0, (size_t)(tile.queries * head.d) * sizeof(float));
  for (tile.first_key = 0; tile.first_key < head.length; tile.first_key += block_keys) {
    tile.keys = clamp_int64(head.length - tile.first_key, 0, block_keys);
    dc__attention_scores(&head, &tile, at.s, at.gemm);
    for (int64_t i = 0; i < tile.queries; i++) {
      float *row = at.s + i * tile.keys;
      online_softmax_row(row, tile.keys, at.out[0] + i * head.d, head.d, &row_max[i], &sum[i]);
      if (a->dropout.threshold != 0) {
        dc__dropout_row(at.m, tile.keys, tile.first_key, (uint32_t)(tile.first_query + i), head.plane, &a->dropout);
        dc__row_multiply(row, at.m, tile.keys);
      }
    }
    multiply_pv(&head, &tile, dc__attention_cast_tile(&head, at.p, at.s, tile.queries * tile.keys), at.out[0], at.gemm);
  }
  int64_t hidden = task->job->layer->config.hidden_size;
  for (int64_t i = 0; i < tile.queries; i++) {
    float *row = at.out[0] + i * head.d;
    int64_t query = tile.first_query + i;
    if (sum[i] != 0) { /* also true for NaN */
      dc__row_scale(row, head.d, 1 / sum[i]);
    }
    if (a->softmax != NULL) { /* not row_max + log(sum), which loses the sum where scores are large */
      a->softmax[head.statistics + query] = sum[i] != 0 ? row_max[i] : INFINITY;
      a->softmax[head.all_statistics + head.statistics + query] = sum[i] != 0 ? 1 / sum[i] : 0;
    }
    dc__cast((char *)a->c + (size_t)(head.out + query * hidden) * dc_dtype_size(head.dtype), head.dtype, row,
             DC_FLOAT32, head.d);
  }
}

void dc__attention_forward(const dc__layer_job *job, const dc__attention_args *attention) {
  const dc_layer_config *c = &job->layer->config;
  int64_t queries = dc__attention_queries(c->hidden_size / c->heads);
  attention_forward_task task = {job, attention, (job->size.max_seqlen + queries - 1) / queries};
  int64_t cost = queries * job->size.max_seqlen * (2 + c->hidden_size / c->heads / 4);
  dc__parallel_for_cost(job->layer->pool, job->size.batch * c->heads * task.blocks, cost, attention_forward_block,
                        &task);
}

/* ---- shared by both directions ---- */

dc__attention_scratch dc__attention_scratch_layout(void *scratch, int64_t d) {
  size_t tile = (size_t)(dc__attention_queries(d) * dc__attention_keys(d));
  size_t wide =
      (size_t)(dc__attention_queries(d) > dc__attention_keys(d) ? dc__attention_queries(d) : dc__attention_keys(d)) *
      (size_t)d;
  dc__attention_scratch at;
  char *end = scratch;
  at.gemm = end;
  end += DC__ATTENTION_GEMM;
  at.s = (float *)(void *)end;
  at.dp = at.s + tile;
  at.m = at.dp + tile;
  at.out[0] = at.m + dc__attention_keys(d);
  at.out[1] = at.out[0] + wide;
  at.p = at.out[1] + wide;
  at.ds = (char *)at.p + tile * sizeof(uint16_t);
  return at;
}

const void *dc__attention_cast_tile(const dc__attention_head *head, void *narrow, const float *wide, int64_t count) {
  if (head->dtype == DC_FLOAT32) {
    return wide;
  }
  dc__cast(narrow, head->dtype, wide, DC_FLOAT32, count);
  return narrow;
}
