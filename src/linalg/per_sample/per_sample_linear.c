/* Linear layers and convolutions: each sample's gradient is a product of two matrices over the positions. */
#include <math.h>
#include <string.h>

#include "linalg/per_sample/per_sample.h"

/* Positions in a Gram tile; rows of a gradient computed at a time; bytes of scaled delta in a slice. */
enum { TILE = 128, ROWS = 64, SUM_BYTES = 8 << 20 };

typedef struct linear_job {
  dc_linalg *l;
  const dc__per_sample *s;
  dc__slots slots;
  void *weight, *bias, *squares;
  const void *factors;
  int32_t groups, parts;
  int64_t in, out; /* of a group's weight */
  bool conv, accumulate, ghost;
} linear_job;

static linear_job make_linear_job(dc_linalg *l, const dc__per_sample *s) {
  linear_job job = {.l = l, .s = s, .groups = 1, .in = s->in, .out = s->out, .conv = s->layer.kind == DC_SAMPLE_CONV};
  if (job.conv) {
    const int64_t *k = s->layer.kernel;
    job.groups = s->layer.groups;
    job.in = s->in / job.groups * k[0] * k[1] * k[2];
    job.out = s->out / job.groups;
  }
  return job;
}

/* A linear layer's factors are used in place. A convolution's patches are written to `patches`. */
static dc__grad_factors linear_factors(const linear_job *job, int64_t sample, int32_t group, void *patches) {
  const dc__per_sample *s = job->s;
  dc__grad_factors p = {.by_rows = job->conv, .in = job->in, .out = job->out, .positions = s->positions, .a = patches};
  p.d = dc__element_ptr(s->delta, s->dtype, (sample * s->out + group * job->out) * s->positions);
  if (job->conv) {
    dc__im2col(s, sample, group, patches, s->positions);
  } else {
    p.a = dc__element_ptr(s->x, s->dtype, sample * s->positions * s->in);
  }
  return p;
}

/* Returns the product c [rows, in] = D A for rows [row, row + rows) of D. */
static dc__gemm gradient_gemm(const dc__grad_factors *p, int32_t dtype, int64_t row, int64_t rows, void *c) {
  const void *d = dc__element_ptr(p->d, dtype, p->by_rows ? row * p->positions : row);
  dc__gemm g = dc__gemm_dense(dtype, !p->by_rows, p->by_rows, rows, p->in, p->positions, d, p->a, c);
  g.lda = p->by_rows ? p->positions : p->out;
  return g;
}

/* Returns the sum of row `row` of D over the positions. */
static double row_sum(const dc__grad_factors *p, bool wide, int64_t row) {
  double sum = 0;
  for (int64_t t = 0; t < p->positions; t++) {
    sum += dc__load_element(p->d, wide, p->by_rows ? row * p->positions + t : t * p->out + row);
  }
  return sum;
}

/* ---- gradients ---- */

enum {
  OUTER_WIDTH = 16
}; /* columns per iteration: with one vector each, the speed would depend on the loop's address */

#define OUTER(name, T)                                                                \
  static void name(T *restrict to, const T *d, const T *a, int64_t out, int64_t in) { \
    const int64_t whole = in - in % OUTER_WIDTH;                                      \
    for (int64_t o = 0; o < out; o++, to += in) {                                     \
      for (int64_t i = 0; i < whole; i += OUTER_WIDTH) {                              \
        for (int64_t k = 0; k < OUTER_WIDTH; k++) {                                   \
          to[i + k] = d[o] * a[i + k];                                                \
        }                                                                             \
      }                                                                               \
      for (int64_t i = whole; i < in; i++) {                                          \
        to[i] = d[o] * a[i];                                                          \
      }                                                                               \
    }                                                                                 \
  }
OUTER(outer_float, float)
OUTER(outer_double, double)

static void write_gradient(const dc__grad_factors *p, int32_t dtype, void *to, void *scratch) {
  if (p->positions != 1) {
    dc__gemm g = gradient_gemm(p, dtype, 0, p->out, to);
    dc__gemm_serial(&g, scratch);
  } else if (dtype == DC_FLOAT64) {
    outer_double(to, p->d, p->a, p->out, p->in);
  } else {
    outer_float(to, p->d, p->a, p->out, p->in);
  }
}

static void linear_grads_of(void *arg, int64_t index, void *scratch) {
  linear_job *job = arg;
  const dc__per_sample *s = job->s;
  int64_t sample = index / job->groups;
  int32_t group = (int32_t)(index % job->groups);
  int64_t slot = job->conv ? dc__slots_acquire(&job->slots) : 0;
  dc__grad_factors p = linear_factors(job, sample, group, job->conv ? dc__slots_memory(&job->slots, slot) : NULL);
  if (job->weight != NULL && p.in > 0 && p.out > 0) {
    write_gradient(&p, s->dtype, dc__element_ptr(job->weight, s->dtype, index * p.out * p.in), scratch);
  }
  for (int64_t o = 0; job->bias != NULL && o < p.out; o++) {
    bool wide = s->dtype == DC_FLOAT64;
    dc__store_element(job->bias, wide, sample * s->out + group * p.out + o, row_sum(&p, wide, o));
  }
  if (job->conv) {
    dc__slots_release(&job->slots, slot);
  }
}

/* Allocates slots, each for a convolution's patches and `more` bytes. */
static dc_status alloc_slots(linear_job *job, int64_t work, size_t more, bool *query) {
  size_t slot = 0;
  size_t total = 0;
  void *memory;
  if ((job->conv && !dc__linalg_add_bytes(&slot, dc__im2col_numel(job->s), dc_dtype_size(job->s->dtype))) ||
      !dc__linalg_add_bytes(&slot, 1, more) || !dc__slots_plan(&job->slots, job->l, work, slot, &total)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold the patches of a sample", job->s->fn);
  }
  DC__TRY(dc__linalg_scratch(job->l, job->s->fn, total, &memory));
  *query = memory == NULL;
  size_t offset = 0;
  if (memory != NULL) {
    dc__slots_init(&job->slots, memory, &offset);
  }
  return DC_OK;
}

dc_status dc__per_sample_linear_grads(dc_linalg *l, const dc__per_sample *s, void *weight, void *bias) {
  linear_job job = make_linear_job(l, s);
  job.weight = weight;
  job.bias = bias;
  bool query = false;
  DC__TRY(alloc_slots(&job, s->samples * job.groups, 0, &query));
  if (!query) {
    dc__parallel_for(l->pool, s->samples * job.groups, linear_grads_of, &job);
  }
  return DC_OK;
}

/* ---- norms ---- */

static double linear_dot(const void *x, const void *y, bool wide, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) {
    sum += dc__load_element(x, wide, i) * dc__load_element(y, wide, i);
  }
  return sum;
}

/* Positions [t, t + rows) and [u, u + cols) of a sample. */
typedef struct gram_block {
  int64_t t, rows, u, cols;
} gram_block;

/* The Gram matrix [rows, cols] of a block of one of p's factors, which has `width` values a position. */
static void linear_gram(const dc__grad_factors *p, const void *factor, int64_t width, int32_t dtype,
                        const gram_block *block, void *c, void *scratch) {
  const void *a = dc__element_ptr(factor, dtype, p->by_rows ? block->t : block->t * width);
  const void *b = dc__element_ptr(factor, dtype, p->by_rows ? block->u : block->u * width);
  dc__gemm g = dc__gemm_dense(dtype, p->by_rows, !p->by_rows, block->rows, block->cols, width, a, b, c);
  g.lda = g.ldb = p->by_rows ? p->positions : width;
  dc__gemm_serial(&g, scratch);
}

/* Returns the sum over t, u of (a_t . a_u) (d_t . d_u), in tiles, so that memory does not grow with the positions. */
static double ghost_square(const dc__grad_factors *p, int32_t dtype, void *tiles, void *scratch) {
  bool wide = dtype == DC_FLOAT64;
  void *other = dc__element_ptr(tiles, dtype, TILE * TILE);
  double sum = 0;
  for (int64_t t = 0; t < p->positions; t += TILE) {
    for (int64_t u = 0; u <= t; u += TILE) {
      const gram_block block = {.t = t,
                                .rows = p->positions - t < TILE ? p->positions - t : TILE,
                                .u = u,
                                .cols = p->positions - u < TILE ? p->positions - u : TILE};
      linear_gram(p, p->a, p->in, dtype, &block, tiles, scratch);
      linear_gram(p, p->d, p->out, dtype, &block, other, scratch);
      sum += (u < t ? 2 : 1) * linear_dot(tiles, other, wide, block.rows * block.cols);
    }
  }
  return sum;
}

/* Returns the square of the gradient itself, computed a few rows at a time. */
static double direct_square(const dc__grad_factors *p, int32_t dtype, void *rows, void *scratch) {
  double sum = 0;
  for (int64_t row = 0; row < p->out; row += ROWS) {
    int64_t count = p->out - row < ROWS ? p->out - row : ROWS;
    dc__gemm g = gradient_gemm(p, dtype, row, count, rows);
    dc__gemm_serial(&g, scratch);
    sum += linear_dot(rows, rows, dtype == DC_FLOAT64, count * p->in);
  }
  return sum;
}

static double weight_square(const linear_job *job, const dc__grad_factors *p, void *memory, void *scratch) {
  bool wide = job->s->dtype == DC_FLOAT64;
  if (p->in == 0 || p->out == 0 || p->positions == 0) {
    return 0;
  }
  if (p->positions == 1) {
    return linear_dot(p->a, p->a, wide, p->in) * linear_dot(p->d, p->d, wide, p->out);
  }
  return job->ghost ? ghost_square(p, job->s->dtype, memory, scratch)
                    : direct_square(p, job->s->dtype, memory, scratch);
}

static void linear_norm_of(void *arg, int64_t sample, void *scratch) {
  linear_job *job = arg;
  bool wide = job->s->dtype == DC_FLOAT64;
  int64_t slot = dc__slots_acquire(&job->slots);
  char *memory = dc__slots_memory(&job->slots, slot);
  size_t offset = 0;
  void *patches =
      job->conv ? dc__linalg_suballoc(memory, &offset, dc__im2col_numel(job->s), dc_dtype_size(job->s->dtype)) : NULL;
  double square = 0;
  for (int32_t group = 0; group < job->groups; group++) {
    dc__grad_factors p = linear_factors(job, sample, group, patches);
    if ((job->parts & DC_PART_WEIGHT) != 0) {
      square += weight_square(job, &p, memory + offset, scratch);
    }
    for (int64_t o = 0; (job->parts & DC_PART_BIAS) != 0 && o < p.out; o++) {
      double sum = row_sum(&p, wide, o);
      square += sum * sum;
    }
  }
  dc__store_squared_norm(job->s, job->squares, sample, square, job->accumulate);
  dc__slots_release(&job->slots, slot);
}

dc_status dc__per_sample_linear_norms(dc_linalg *l, const dc__per_sample *s, int32_t parts, bool accumulate,
                                      void *squares) {
  linear_job job = make_linear_job(l, s);
  job.parts = parts;
  job.accumulate = accumulate;
  job.squares = squares;
  job.ghost = 2 * (double)s->positions * (double)s->positions < (double)job.in * (double)job.out;
  size_t more = 0;
  bool query = false;
  int64_t elements = job.ghost ? 2 * TILE * TILE : ROWS * job.in;
  if (!dc__linalg_add_bytes(&more, elements, dc_dtype_size(s->dtype))) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold %d rows of the weight", s->fn, (int)ROWS);
  }
  DC__TRY(alloc_slots(&job, s->samples, more, &query));
  if (!query) {
    dc__parallel_for(l->pool, s->samples, linear_norm_of, &job);
  }
  return DC_OK;
}

/* ---- sums ---- */

typedef struct linear_sum_job {
  linear_job pair;
  char *scaled;        /* a slice's delta times the samples' factors, or a convolution's patches */
  int64_t begin, each; /* the slice's first sample; elements of delta per sample */
  bool added;          /* weights are initialised, so later products add */
} linear_sum_job;

static void scale_sample(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  linear_sum_job *job = arg;
  const dc__per_sample *s = job->pair.s;
  bool wide = s->dtype == DC_FLOAT64;
  double factor = dc__per_sample_factor(s, job->pair.factors, job->begin + index);
  const void *from = dc__element_ptr(s->delta, s->dtype, (job->begin + index) * job->each);
  void *to = dc__element_ptr(job->scaled, s->dtype, index * job->each);
  for (int64_t i = 0; i < job->each; i++) {
    dc__store_element(to, wide, i, factor * dc__load_element(from, wide, i));
  }
}

/* weight += alpha D A over all positions of p, with the whole pool on one product. */
static void linear_add_product(linear_sum_job *job, const dc__grad_factors *p, int32_t group, double alpha) {
  const dc__per_sample *s = job->pair.s;
  void *to = dc__element_ptr(job->pair.weight, s->dtype, group * p->out * p->in);
  dc__gemm g = gradient_gemm(p, s->dtype, 0, p->out, to);
  g.alpha = alpha;
  g.beta = job->added || job->pair.accumulate ? 1 : 0;
  dc__gemm_run(job->pair.l->pool, &g);
}

/* Adds samples [begin, end) of a linear layer by one product over all their positions. */
static void add_linear(linear_sum_job *job, int64_t begin, int64_t end) {
  const dc__per_sample *s = job->pair.s;
  dc__grad_factors p = {.in = s->in, .out = s->out, .positions = (end - begin) * s->positions};
  p.a = dc__element_ptr(s->x, s->dtype, begin * s->positions * s->in);
  p.d = dc__element_ptr(s->delta, s->dtype, begin * job->each);
  if (job->pair.factors != NULL) {
    job->begin = begin;
    dc__parallel_for(job->pair.l->pool, end - begin, scale_sample, job);
    p.d = job->scaled;
  }
  linear_add_product(job, &p, 0, 1);
  job->added = true;
}

static void sum_linear(linear_sum_job *job, int64_t max_samples) {
  const dc__per_sample *s = job->pair.s;
  for (int64_t begin = 0; begin < s->samples;) {
    int64_t end = begin;
    while (end < s->samples && end - begin < max_samples && dc__per_sample_factor(s, job->pair.factors, end) != 0) {
      end++;
    }
    if (end > begin) {
      add_linear(job, begin, end);
    }
    begin = end == begin ? begin + 1 : end;
  }
}

static void sum_conv(linear_sum_job *job) {
  const dc__per_sample *s = job->pair.s;
  for (int64_t sample = 0; sample < s->samples; sample++) {
    double factor = dc__per_sample_factor(s, job->pair.factors, sample);
    for (int32_t group = 0; group < job->pair.groups && factor != 0; group++) {
      dc__grad_factors p = linear_factors(&job->pair, sample, group, job->scaled);
      linear_add_product(job, &p, group, factor);
    }
    job->added = job->added || factor != 0;
  }
}

/* Sums element `index` of the bias over all samples and positions, in order. */
static void linear_bias_of(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  linear_job *job = arg;
  const dc__per_sample *s = job->s;
  bool wide = s->dtype == DC_FLOAT64;
  double sum = 0;
  for (int64_t sample = 0; sample < s->samples; sample++) {
    double factor = dc__per_sample_factor(s, job->factors, sample);
    dc__grad_factors p = {.by_rows = job->conv, .out = s->out, .positions = s->positions};
    p.d = dc__element_ptr(s->delta, s->dtype, sample * s->positions * s->out);
    sum += factor != 0 ? factor * row_sum(&p, wide, index) : 0;
  }
  dc__store_element(job->bias, wide, index, sum + (job->accumulate ? dc__load_element(job->bias, wide, index) : 0));
}

dc_status dc__per_sample_linear_sum(dc_linalg *l, const dc__per_sample *s, const void *factors, bool accumulate,
                                    void *weight, void *bias) {
  size_t size = dc_dtype_size(s->dtype);
  linear_sum_job job = {.pair = make_linear_job(l, s), .each = s->positions * s->out};
  job.pair.weight = weight;
  job.pair.bias = bias;
  job.pair.factors = factors;
  job.pair.accumulate = accumulate;
  int64_t max_samples = factors == NULL ? s->samples : SUM_BYTES / (int64_t)size / (job.each > 0 ? job.each : 1);
  max_samples = max_samples < 1 ? 1 : max_samples < s->samples ? max_samples : s->samples;
  int64_t elements = job.pair.conv ? dc__im2col_numel(s) : factors == NULL ? 1 : max_samples * job.each;
  size_t bytes = 0;
  void *memory;
  if (!dc__linalg_add_bytes(&bytes, elements, size)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold a sample", s->fn);
  }
  DC__TRY(dc__linalg_scratch(l, s->fn, bytes, &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  job.scaled = memory;
  if (weight != NULL && job.pair.in > 0 && job.pair.out > 0) {
    if (job.pair.conv) {
      sum_conv(&job);
    } else {
      sum_linear(&job, max_samples > 0 ? max_samples : 1);
    }
    if (!job.added && !accumulate) {
      memset(weight, 0, (size_t)(s->out * job.pair.in) * size);
    }
  }
  if (bias != NULL) {
    dc__parallel_for(l->pool, s->out, linear_bias_of, &job.pair);
  }
  return DC_OK;
}
