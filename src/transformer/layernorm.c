/* Row operations on tokens: sums with the residual, normalisation, dropout, and sums over tokens. */
#include "transformer/transformer_internal.h"

/* A task sums MIN_COLUMNS to MAX_COLUMNS columns over all tokens. The minimum holds even if threads are idle, as short
 * pieces of rows are slow to read. Sums are first over CHUNK_TOKENS tokens, to keep rounding errors small. */
enum { MAX_COLUMNS = 512, MIN_COLUMNS = 128, CHUNK_TOKENS = 128 };
/* Rows to prefetch ahead when a task reads a piece of each. */
enum { PREFETCH_ROWS = 4 };

/* The cost of a task of DC__ROWS_PER_TASK rows. */
static int64_t row_cost(const dc__layer_job *job) {
  return 4 * DC__ROWS_PER_TASK * job->layer->config.hidden_size;
}

static int64_t last_row(const dc__layer_job *job, int64_t index) {
  int64_t end = (index + 1) * DC__ROWS_PER_TASK;
  return end < job->size.tokens ? end : job->size.tokens;
}

/* Columns per task, such that tasks are equal, and each thread gets the same number of them. */
static int64_t columns_per_task(const dc__layer_job *job, int64_t columns) {
  const int64_t threads = dc__threadpool_threads(job->layer->pool);
  const int64_t tasks = dc__ceil_div(dc__ceil_div(columns, MAX_COLUMNS), threads) * threads;
  const int64_t width = dc__ceil_div(dc__ceil_div(columns, tasks), DC__ROWS_PER_TASK) * DC__ROWS_PER_TASK;
  return width > MIN_COLUMNS ? width : MIN_COLUMNS;
}

/* ---- bias, dropout, residual, normalisation ---- */

typedef struct residual_task {
  const dc__layer_job *job;
  const dc__residual_args *r;
} residual_task;

/* Rounds a row as storing it does. */
static void round_row(float *row, char *store, int32_t dtype, int64_t count) {
  dc__cast(store, dtype, row, DC_FLOAT32, count);
  dc__cast(row, DC_FLOAT32, store, dtype, count);
}

static void residual_rows(void *arg, int64_t index, void *scratch) {
  const residual_task *task = arg;
  const dc__layer_job *job = task->job;
  const dc__residual_args *r = task->r;
  const dc_layer_config *c = &job->layer->config;
  int64_t h = c->hidden_size;
  float *row = scratch;
  float *other = row + h;
  float *bias = other + h;
  float *gamma = bias + h;
  float *beta = gamma + h;
  char *rounded = (char *)(beta + h);
  if (r->bias != NULL) {
    dc__row_load(bias, r->bias, c->dtype, 0, h);
  }
  if (r->y != NULL) {
    dc__row_load(gamma, r->gamma, c->dtype, 0, h);
    dc__row_load(beta, r->beta, c->dtype, 0, h);
  }
  dc__token_cursor cursor = dc__token_cursor_at(&job->size, index * DC__ROWS_PER_TASK);
  for (int64_t i = index * DC__ROWS_PER_TASK; i < last_row(job, index);
       i++, dc__token_cursor_next(&job->size, &cursor)) {
    dc__row_load(row, r->u, c->dtype, i, h);
    if (r->bias != NULL) {
      dc__row_add(row, bias, h);
    }
    if (r->dropout.threshold != 0) {
      dc__dropout_row(other, h, 0, (uint32_t)cursor.position, (uint32_t)cursor.sample, &r->dropout);
      dc__row_multiply(row, other, h);
    }
    if (r->residual != NULL) {
      dc__row_load(other, r->residual, c->dtype, i, h);
      dc__row_add(row, other, h);
    }
    char *out = r->out != NULL ? (char *)r->out + (size_t)(i * h) * dc_dtype_size(c->dtype) : rounded;
    if (r->y == NULL) {
      dc__cast(out, c->dtype, row, DC_FLOAT32, h);
      continue;
    }
    /* Statistics are of the stored values, so they do not depend on whether the row is kept. */
    round_row(row, out, c->dtype, h);
    float mean;
    float rstd;
    dc__row_moments(row, h, (float)c->layer_norm_eps, &mean, &rstd);
    if (r->stats != NULL) {
      r->stats[i] = mean;
      r->stats[job->size.tokens + i] = rstd;
    }
    dc__row_normalize(row, row, gamma, beta, h, mean, rstd);
    dc__row_store(r->y, c->dtype, i, row, h);
  }
}

void dc__residual_forward(const dc__layer_job *job, const dc__residual_args *residual) {
  residual_task task = {job, residual};
  dc__parallel_for_cost(job->layer->pool, dc__ceil_div(job->size.tokens, DC__ROWS_PER_TASK), row_cost(job),
                        residual_rows, &task);
}

/* ---- normalisation from kept statistics ---- */

typedef struct recompute_task {
  const dc__layer_job *job;
  void *y;
  const void *x, *gamma, *beta;
  const float *stats;
} recompute_task;

static void recompute_rows(void *arg, int64_t index, void *scratch) {
  const recompute_task *task = arg;
  const dc_layer_config *c = &task->job->layer->config;
  int64_t h = c->hidden_size;
  float *row = scratch;
  float *gamma = row + h;
  float *beta = gamma + h;
  dc__row_load(gamma, task->gamma, c->dtype, 0, h);
  dc__row_load(beta, task->beta, c->dtype, 0, h);
  for (int64_t i = index * DC__ROWS_PER_TASK; i < last_row(task->job, index); i++) {
    dc__row_load(row, task->x, c->dtype, i, h);
    dc__row_normalize(row, row, gamma, beta, h, task->stats[i], task->stats[task->job->size.tokens + i]);
    dc__row_store(task->y, c->dtype, i, row, h);
  }
}

void dc__layernorm_recompute(const dc__layer_job *job, void *y, const void *x, const void *gamma, const void *beta,
                             const float *stats) {
  recompute_task task = {.job = job, .y = y, .x = x, .gamma = gamma, .beta = beta, .stats = stats};
  dc__parallel_for_cost(job->layer->pool, dc__ceil_div(job->size.tokens, DC__ROWS_PER_TASK), row_cost(job),
                        recompute_rows, &task);
}

/* ---- the backward of normalisation ---- */

typedef struct layernorm_backward_task {
  const dc__layer_job *job;
  const dc__layernorm_backward_args *b;
  int64_t width; /* columns per task */
} layernorm_backward_task;

static const char *element_at(const void *array, int32_t dtype, int64_t i) {
  return (const char *)array + (size_t)i * dc_dtype_size(dtype);
}

/* Prefetches columns [first, first + count) of row i + PREFETCH_ROWS. */
static void prefetch_row(const dc__layer_job *job, const void *x, int64_t columns, int64_t i, int64_t first,
                         int64_t count) {
  int32_t dtype = job->layer->config.dtype;
  if (i + PREFETCH_ROWS < job->size.tokens) {
    dc__prefetch(element_at(x, dtype, (i + PREFETCH_ROWS) * columns + first), (size_t)count * dc_dtype_size(dtype));
  }
}

/* The normalised columns [first, first + count) of token i, before scale and shift. */
static void load_xhat(const layernorm_backward_task *task, float *xhat, const float *gamma, const float *beta,
                      int64_t i, int64_t first, int64_t count) {
  const dc__layernorm_backward_args *b = task->b;
  const dc_layer_config *c = &task->job->layer->config;
  const void *from = b->x != NULL ? b->x : b->y;
  dc__cast(xhat, DC_FLOAT32, element_at(from, c->dtype, i * c->hidden_size + first), c->dtype, count);
  if (b->x != NULL) {
    dc__row_normalize(xhat, xhat, NULL, NULL, count, b->stats[i], b->stats[task->job->size.tokens + i]);
    return;
  }
  for (int64_t j = 0; j < count; j++) {
    xhat[j] = (xhat[j] - beta[j]) / gamma[j];
  }
}

static void layernorm_backward_rows(void *arg, int64_t index, void *scratch) {
  const layernorm_backward_task *task = arg;
  const dc__layer_job *job = task->job;
  const dc__layernorm_backward_args *b = task->b;
  const dc_layer_config *c = &job->layer->config;
  int64_t h = c->hidden_size;
  float *row = scratch;
  float *other = row + h;
  float *gamma = other + h;
  float *beta = gamma + h;
  dc__row_load(gamma, b->gamma, c->dtype, 0, h);
  dc__row_load(beta, b->beta, c->dtype, 0, h);
  dc__token_cursor cursor = dc__token_cursor_at(&job->size, index * DC__ROWS_PER_TASK);
  for (int64_t i = index * DC__ROWS_PER_TASK; i < last_row(job, index);
       i++, dc__token_cursor_next(&job->size, &cursor)) {
    dc__row_load(row, b->dy, c->dtype, i, h);
    load_xhat(task, other, gamma, beta, i, 0, h);
    dc__row_normalize_backward(row, row, other, gamma, h, b->stats[job->size.tokens + i]);
    if (b->add != NULL) {
      dc__row_load(other, b->add, c->dtype, i, h);
      dc__row_add(row, other, h);
    }
    char *dx = (char *)b->dx + (size_t)(i * h) * dc_dtype_size(c->dtype);
    round_row(row, dx, c->dtype, h);
    if (b->dropped != NULL && b->dropped != b->dx) {
      dc__dropout_row(other, h, 0, (uint32_t)cursor.position, (uint32_t)cursor.sample, &b->dropout);
      dc__row_multiply(row, other, h);
      dc__row_store(b->dropped, c->dtype, i, row, h);
    }
  }
}

/* Writes or adds the gradient of a weight's elements [first, first + count). */
static void store_gradient(const dc__layer_job *job, int32_t index, int64_t first, float *sum, int64_t count) {
  int32_t dtype = job->layer->config.grad_dtype;
  char *at = (char *)job->grad_weight[index] + (size_t)first * dc_dtype_size(dtype);
  float old[MAX_COLUMNS];
  if (job->accumulate) {
    dc__cast(old, DC_FLOAT32, at, dtype, count);
    dc__row_add(sum, old, count);
  }
  dc__cast(at, dtype, sum, DC_FLOAT32, count);
}

static void layernorm_backward_columns(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const layernorm_backward_task *task = arg;
  const dc__layer_job *job = task->job;
  const dc__layernorm_backward_args *b = task->b;
  const dc_layer_config *c = &job->layer->config;
  int64_t first = index * task->width;
  int64_t count = c->hidden_size - first < task->width ? c->hidden_size - first : task->width;
  float gamma[MAX_COLUMNS];
  float beta[MAX_COLUMNS];
  dc__cast(gamma, DC_FLOAT32, element_at(b->gamma, c->dtype, first), c->dtype, count);
  dc__cast(beta, DC_FLOAT32, element_at(b->beta, c->dtype, first), c->dtype, count);
  float sums[2][MAX_COLUMNS] = {{0}};
  for (int64_t begin = 0; begin < job->size.tokens; begin += CHUNK_TOKENS) {
    float part[2][MAX_COLUMNS] = {{0}};
    for (int64_t i = begin; i < begin + CHUNK_TOKENS && i < job->size.tokens; i++) {
      float dy[MAX_COLUMNS];
      float xhat[MAX_COLUMNS];
      prefetch_row(job, b->dy, c->hidden_size, i, first, count);
      prefetch_row(job, b->x != NULL ? b->x : b->y, c->hidden_size, i, first, count);
      dc__cast(dy, DC_FLOAT32, element_at(b->dy, c->dtype, i * c->hidden_size + first), c->dtype, count);
      load_xhat(task, xhat, gamma, beta, i, first, count);
      dc__row_multiply(xhat, dy, count);
      dc__row_add(part[0], xhat, count);
      dc__row_add(part[1], dy, count);
    }
    dc__row_add(sums[0], part[0], count);
    dc__row_add(sums[1], part[1], count);
  }
  for (int32_t k = 0; k < 2; k++) {
    if (job->grad_weight[b->gamma_index + k] != NULL) {
      store_gradient(job, b->gamma_index + k, first, sums[k], count);
    }
  }
}

void dc__layernorm_backward(const dc__layer_job *job, const dc__layernorm_backward_args *back) {
  const int64_t hidden = job->layer->config.hidden_size;
  layernorm_backward_task task = {job, back, columns_per_task(job, hidden)};
  /* Column sums are first, as dx may alias dy. */
  if (job->grad_weight[back->gamma_index] != NULL || job->grad_weight[back->gamma_index + 1] != NULL) {
    dc__parallel_for_cost(job->layer->pool, dc__ceil_div(hidden, task.width), job->size.tokens * task.width,
                          layernorm_backward_columns, &task);
  }
  if (back->dx != NULL) {
    dc__parallel_for_cost(job->layer->pool, dc__ceil_div(job->size.tokens, DC__ROWS_PER_TASK), row_cost(job),
                          layernorm_backward_rows, &task);
  }
}

/* ---- dropout alone ---- */

typedef struct dropout_task {
  const dc__layer_job *job;
  void *out;
  const void *x;
  const dc__dropout *dropout;
} dropout_task;

static void dropout_rows(void *arg, int64_t index, void *scratch) {
  const dropout_task *task = arg;
  const dc_layer_config *c = &task->job->layer->config;
  int64_t h = c->hidden_size;
  float *row = scratch;
  float *m = row + h;
  dc__token_cursor cursor = dc__token_cursor_at(&task->job->size, index * DC__ROWS_PER_TASK);
  for (int64_t i = index * DC__ROWS_PER_TASK; i < last_row(task->job, index);
       i++, dc__token_cursor_next(&task->job->size, &cursor)) {
    dc__row_load(row, task->x, c->dtype, i, h);
    dc__dropout_row(m, h, 0, (uint32_t)cursor.position, (uint32_t)cursor.sample, task->dropout);
    dc__row_multiply(row, m, h);
    dc__row_store(task->out, c->dtype, i, row, h);
  }
}

void dc__dropout_apply(const dc__layer_job *job, void *out, const void *x, const dc__dropout *dropout) {
  dropout_task task = {.job = job, .out = out, .x = x, .dropout = dropout};
  dc__parallel_for_cost(job->layer->pool, dc__ceil_div(job->size.tokens, DC__ROWS_PER_TASK), row_cost(job),
                        dropout_rows, &task);
}

/* ---- sums over tokens ---- */

typedef struct sum_task {
  const dc__layer_job *job;
  const void *x;
  int64_t columns, width;
  int32_t index;
} sum_task;

static void sum_columns(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const sum_task *task = arg;
  int32_t dtype = task->job->layer->config.dtype;
  int64_t first = index * task->width;
  int64_t count = task->columns - first < task->width ? task->columns - first : task->width;
  float sum[MAX_COLUMNS] = {0};
  for (int64_t begin = 0; begin < task->job->size.tokens; begin += CHUNK_TOKENS) {
    float part[MAX_COLUMNS] = {0};
    for (int64_t i = begin; i < begin + CHUNK_TOKENS && i < task->job->size.tokens; i++) {
      prefetch_row(task->job, task->x, task->columns, i, first, count);
      dc__accumulate(part, DC_FLOAT32, element_at(task->x, dtype, i * task->columns + first), dtype, count);
    }
    dc__row_add(sum, part, count);
  }
  store_gradient(task->job, task->index, first, sum, count);
}

void dc__column_sums(const dc__layer_job *job, const void *x, int64_t columns, int32_t index) {
  sum_task task = {.job = job, .x = x, .columns = columns, .width = columns_per_task(job, columns), .index = index};
  dc__parallel_for_cost(job->layer->pool, dc__ceil_div(columns, task.width), job->size.tokens * task.width, sum_columns,
                        &task);
}
