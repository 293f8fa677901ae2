/* The two sums of outer products of a layer, on the host. A linear layer's vectors are used in place; a
 * convolution's patches are unfolded a few samples at a time. */
#include <stdatomic.h>
#include <string.h>

#include "optim/kfac/kfac.h"

/* Rows of a factor per task, bytes of unfolded vectors, elements of a scan's task and of a tile on the stack. */
enum { ROWS = 128, PANEL_BYTES = 4 << 20, CHUNK = 1 << 16, TILE = 512 };

/* Vectors for outer products: [count][order], or by rows [order][count]. */
typedef struct kfac_vectors {
  const void *data;
  int32_t dtype;
  bool by_rows;
  int64_t order, count;
  int64_t row; /* elements from one stored row to the next */
} kfac_vectors;

/* ---- sums of outer products ---- */

typedef struct gram_job {
  kfac_vectors v;
  float *sum;
  int64_t width;    /* of sum: v.order, or one more for the bias */
  const void *ones; /* v.count of v's type; NULL: no bias */
  double alpha, beta;
} gram_job;

/* Rows [row, row + rows) of the upper triangle; behind the last ones, the column of the bias. */
static void gram_rows(void *arg, int64_t index, void *scratch) {
  const gram_job *job = arg;
  const kfac_vectors *v = &job->v;
  int64_t row = index * ROWS;
  bool bias = row >= v->order;
  dc__gemm g = {.dtype = v->dtype,
                .out_dtype = DC_FLOAT32,
                .trans_a = !v->by_rows,
                .trans_b = v->by_rows,
                .m = v->order - row < ROWS ? v->order - row : ROWS,
                .n = v->order - row,
                .k = v->count,
                .lda = v->row,
                .ldb = v->row,
                .ldc = job->width,
                .batch = 1,
                .alpha = job->alpha,
                .beta = job->beta};
  if (bias) {
    row = 0;
    g.m = v->order;
    g.n = 1;
    g.trans_b = false;
    g.ldb = 1;
  }
  g.a = dc__element_ptr(v->data, v->dtype, v->by_rows ? row * v->row : row);
  g.b = bias ? job->ones : g.a;
  g.c = job->sum + row * job->width + (bias ? v->order : row);
  dc__gemm_serial(&g, scratch);
}

static void factor_add_products_cpu(dc_linalg *l, gram_job *job) {
  int64_t blocks = (job->v.order + ROWS - 1) / ROWS;
  dc__parallel_for_cost(l->pool, blocks + (job->ones != NULL ? 1 : 0), ROWS * job->v.order * job->v.count, gram_rows,
                        job);
  job->beta = 1;
}

/* ---- computed vectors ---- */

/* One factor of one call. */
typedef struct factor_job_cpu {
  const dc__per_sample *s;
  bool inputs, reduce;
  int32_t group;
  int64_t begin, tile; /* samples in the panel */
  void *panel;
  dc__slots slots; /* patches of a sample, if only their means are kept */
  gram_job gram;
} factor_job_cpu;

static double sum_of(const void *from, int32_t dtype, int64_t count) {
  float tile[TILE];
  double sum = 0;
  for (int64_t i = 0; i < count; i += TILE) {
    int64_t some = count - i < TILE ? count - i : TILE;
    dc__cast(tile, DC_FLOAT32, dc__element_ptr(from, dtype, i), dtype, some);
    for (int64_t j = 0; j < some; j++) {
      sum += (double)tile[j];
    }
  }
  return sum;
}

/* The group's rows of a sample of delta, or of its patches: [order][positions]. */
static void fill_columns(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const factor_job_cpu *w = arg;
  const dc__per_sample *s = w->s;
  int64_t order = w->gram.v.order;
  void *to = dc__element_ptr(w->panel, w->gram.v.dtype, index * s->positions);
  if (w->inputs) {
    dc__im2col(s, w->begin + index, w->group, to, w->gram.v.row);
    return;
  }
  for (int64_t i = 0; i < order; i++) {
    int64_t at = ((w->begin + index) * s->out + w->group * order + i) * s->positions;
    memcpy(dc__element_ptr(to, s->dtype, i * w->gram.v.row), dc__element_ptr(s->delta, s->dtype, at),
           (size_t)s->positions * dc_dtype_size(s->dtype));
  }
}

/* The mean of a sample's inputs over its positions, or the sum of its gradients, as float32. */
static void fill_reduced(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  factor_job_cpu *w = arg;
  const dc__per_sample *s = w->s;
  int64_t order = w->gram.v.order;
  int64_t sample = w->begin + index;
  int32_t dtype = w->inputs ? s->x_dtype : s->dtype;
  float *to = (float *)w->panel + index * order;
  float factor = w->inputs ? 1 / (float)s->positions : 1;
  if (s->layer.kind == DC_SAMPLE_LINEAR) {
    memset(to, 0, (size_t)order * sizeof *to);
    for (int64_t t = sample * s->positions; t < (sample + 1) * s->positions; t++) {
      dc__accumulate(to, DC_FLOAT32, dc__element_ptr(w->inputs ? s->x : s->delta, dtype, t * order), dtype, order);
    }
    dc__row_scale(to, order, factor);
    return;
  }
  int64_t slot = w->inputs ? dc__slots_acquire(&w->slots) : 0;
  void *from = w->inputs ? dc__slots_memory(&w->slots, slot)
                         : dc__element_ptr(s->delta, dtype, (sample * s->out + w->group * order) * s->positions);
  if (w->inputs) {
    dc__im2col(s, sample, w->group, from, s->positions);
  }
  for (int64_t i = 0; i < order; i++) {
    to[i] = factor * (float)sum_of(dc__element_ptr(from, dtype, i * s->positions), dtype, s->positions);
  }
  if (w->inputs) {
    dc__slots_release(&w->slots, slot);
  }
}

/* ---- a factor ---- */

static bool factor_in_place_cpu(const factor_job_cpu *w) {
  return w->s->layer.kind == DC_SAMPLE_LINEAR && (!w->reduce || w->s->positions == 1);
}

/* Sets up the vectors of a panel, and counts the bytes of all scratch memory. */
static bool factor_plan_scratch(factor_job_cpu *w, const dc_linalg *l, const dc__kfac_layer *layer, size_t *bytes) {
  const dc__per_sample *s = w->s;
  kfac_vectors *v = &w->gram.v;
  bool bias = w->inputs && layer->bias >= 0;
  int64_t order = layer->factors[w->inputs ? DC__FACTOR_A : DC__FACTOR_G].order - (bias ? 1 : 0);
  *v = (kfac_vectors){.dtype = w->inputs ? s->x_dtype : s->dtype, .order = order, .row = order};
  w->tile = s->samples;
  v->count = s->samples * s->positions;
  if (!factor_in_place_cpu(w)) {
    v->by_rows = !w->reduce;
    v->dtype = w->reduce ? DC_FLOAT32 : v->dtype;
    int64_t positions = w->reduce ? 1 : s->positions;
    int64_t max_abs = PANEL_BYTES / (int64_t)dc_dtype_size(v->dtype) / positions / order;
    w->tile = max_abs < 1 ? 1 : max_abs < s->samples ? max_abs : s->samples;
    v->count = w->tile * positions;
    v->row = w->reduce ? order : v->count;
    int64_t all;
    size_t patches = 0;
    if (__builtin_mul_overflow(v->count, order, &all) || !dc__linalg_add_bytes(bytes, all, dc_dtype_size(v->dtype)) ||
        (s->layer.kind == DC_SAMPLE_CONV && w->inputs &&
         !dc__linalg_add_bytes(&patches, dc__im2col_numel(s), dc_dtype_size(s->x_dtype)))) {
      return false;
    }
    if (w->reduce && patches > 0 && !dc__slots_plan(&w->slots, l, w->tile, patches, bytes)) {
      return false;
    }
  }
  return !bias || dc__linalg_add_bytes(bytes, v->count, dc_dtype_size(v->dtype));
}

/* Assigns what factor_plan_scratch() counted, in its order. */
static void layout_scratch(factor_job_cpu *w, const dc__kfac_layer *layer, void *memory) {
  const kfac_vectors *v = &w->gram.v;
  size_t offset = 0;
  if (!factor_in_place_cpu(w)) {
    w->panel = dc__linalg_suballoc(memory, &offset, v->count * v->order, dc_dtype_size(v->dtype));
    if (w->reduce && w->s->layer.kind == DC_SAMPLE_CONV && w->inputs) {
      dc__slots_init(&w->slots, memory, &offset);
    }
  }
  if (w->inputs && layer->bias >= 0) {
    const float one = 1;
    char *ones = dc__linalg_suballoc(memory, &offset, v->count, dc_dtype_size(v->dtype));
    for (int64_t i = 0; i < v->count; i++) {
      dc__cast(dc__element_ptr(ones, v->dtype, i), v->dtype, &one, DC_FLOAT32, 1);
    }
    w->gram.ones = ones;
  }
}

/* Adds the products of all samples, of one group. */
static void add_group(dc_linalg *l, factor_job_cpu *w) {
  const dc__per_sample *s = w->s;
  kfac_vectors *v = &w->gram.v;
  if (factor_in_place_cpu(w)) {
    v->data = w->inputs ? s->x : s->delta;
    factor_add_products_cpu(l, &w->gram);
    return;
  }
  int64_t each = v->count / w->tile;
  v->data = w->panel;
  for (w->begin = 0; w->begin < s->samples; w->begin += w->tile) {
    int64_t samples = s->samples - w->begin < w->tile ? s->samples - w->begin : w->tile;
    dc__parallel_for(l->pool, samples, w->reduce ? fill_reduced : fill_columns, w);
    v->count = samples * each; /* rows keep their stride */
    factor_add_products_cpu(l, &w->gram);
  }
  v->count = w->tile * each;
}

static void factor_add_group_cpu(dc_linalg *l, dc__kfac_layer *layer, factor_job_cpu *w, double alpha, void *memory) {
  const dc__factor *to = &layer->factors[w->inputs ? DC__FACTOR_A : DC__FACTOR_G];
  layout_scratch(w, layer, memory);
  w->gram.width = to->order;
  w->gram.alpha = alpha;
  for (w->group = 0; w->group < layer->groups; w->group++) {
    w->gram.sum = to->sum + w->group * to->order * to->order;
    w->gram.beta = to->count > 0 ? 1 : 0;
    add_group(l, w);
  }
}

dc_status dc__kfac_accumulate_cpu(dc_linalg *l, dc__kfac_layer *layer, const dc__per_sample *s, double scale) {
  const bool reduce = layer->approximation == DC_KFAC_REDUCE;
  factor_job_cpu of_a = {.s = s, .inputs = true, .reduce = reduce};
  factor_job_cpu of_g = {.s = s, .inputs = false, .reduce = reduce};
  size_t bytes_a = 1; /* one memory, reused */
  size_t bytes_g = 1;
  void *memory;
  if (!factor_plan_scratch(&of_a, l, layer, &bytes_a) || !factor_plan_scratch(&of_g, l, layer, &bytes_g)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold the patches of a sample", s->fn);
  }
  DC__TRY(dc__linalg_scratch(l, s->fn, bytes_a > bytes_g ? bytes_a : bytes_g, &memory));
  factor_add_group_cpu(l, layer, &of_a, 1, memory);
  factor_add_group_cpu(l, layer, &of_g, scale * scale, memory);
  return DC_OK;
}

/* ---- nonfinite input ---- */

typedef struct scan_job {
  const void *data;
  int32_t dtype;
  int64_t count;
  atomic_uint max_abs; /* bits of the largest absolute value; those of nonfinite values are larger */
} scan_job;

static uint32_t max_abs_of(const scan_job *job, int64_t begin, int64_t end) {
  float tile[TILE];
  uint32_t bits[TILE];
  uint32_t max_abs = 0;
  for (int64_t i = begin; i < end; i += TILE) {
    int64_t some = end - i < TILE ? end - i : TILE;
    dc__cast(tile, DC_FLOAT32, dc__element_ptr(job->data, job->dtype, i), job->dtype, some);
    memcpy(bits, tile, (size_t)some * sizeof *bits);
    for (int64_t j = 0; j < some; j++) {
      uint32_t now = bits[j] & UINT32_C(0x7fffffff);
      max_abs = now > max_abs ? now : max_abs;
    }
  }
  return max_abs;
}

static void scan_chunk(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  scan_job *job = arg;
  int64_t end = (index + 1) * CHUNK < job->count ? (index + 1) * CHUNK : job->count;
  unsigned max_abs = max_abs_of(job, index * CHUNK, end);
  unsigned old = atomic_load_explicit(&job->max_abs, memory_order_relaxed);
  while (max_abs > old && !atomic_compare_exchange_weak_explicit(&job->max_abs, &old, max_abs, memory_order_relaxed,
                                                                 memory_order_relaxed)) {
  }
}

/* Finds the largest absolute value of x or of delta. */
static dc_status factor_scan_cpu(dc_linalg *l, const dc__per_sample *s, int32_t which, double *max_abs) {
  const bool inputs = which == DC__FACTOR_A;
  const uint32_t infinity = UINT32_C(0x7f800000);
  scan_job job = {.data = inputs ? s->x : s->delta, .dtype = inputs ? s->x_dtype : s->dtype};
  job.count = dc__kfac_elements(s, which);
  atomic_init(&job.max_abs, 0);
  dc__parallel_for_cost(l->pool, (job.count + CHUNK - 1) / CHUNK, CHUNK, scan_chunk, &job);
  uint32_t bits = atomic_load(&job.max_abs);
  if (bits >= infinity) {
    return dc__kfac_not_finite(s, which, dc__kfac_first_nonfinite(job.data, job.dtype, job.count));
  }
  float value;
  memcpy(&value, &bits, sizeof value);
  *max_abs = (double)value;
  return DC_OK;
}

dc_status dc__kfac_scan_cpu(dc_linalg *l, const dc__per_sample *s, double max_abs[DC__FACTORS]) {
  DC__TRY(factor_scan_cpu(l, s, DC__FACTOR_A, &max_abs[DC__FACTOR_A]));
  return factor_scan_cpu(l, s, DC__FACTOR_G, &max_abs[DC__FACTOR_G]);
}
