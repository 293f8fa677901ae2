/* Layer norm, RMS norm and group norm: computes x-hat from x in float64, then sums over positions, column by column.
 * Layer and RMS norm store a row of columns per position, group norm a row of positions per column, its channel. */
#include <math.h>

#include "linalg/per_sample/per_sample.h"

typedef struct norm_job {
  dc_linalg *l;
  const dc__per_sample *s;
  int64_t width;       /* length of a normalised row */
  double *mean, *rstd; /* of each row: x-hat = (x - mean) * rstd */
  void *weight, *bias, *out;
  const void *factors;
  int32_t parts;
  bool accumulate;
} norm_job;

static void norm_statistics(void *arg, int64_t row, void *scratch) {
  (void)scratch;
  norm_job *job = arg;
  const dc__per_sample *s = job->s;
  bool wide = s->dtype == DC_FLOAT64;
  double mean = 0;
  double square = 0;
  int64_t width = job->width;
  for (int64_t i = 0; i < width && s->layer.kind != DC_SAMPLE_RMS_NORM; i++) {
    mean += dc__load_element(s->x, wide, row * width + i) / (double)width;
  }
  for (int64_t i = 0; i < width; i++) {
    double x = dc__load_element(s->x, wide, row * width + i) - mean;
    square += x * x / (double)width;
  }
  job->mean[row] = mean;
  job->rstd[row] = 1 / sqrt(square + s->layer.eps);
}

/* Computes column i of one sample's gradients. */
static void norm_column(const norm_job *job, int64_t sample, int64_t i, double *weight, double *bias) {
  const dc__per_sample *s = job->s;
  bool wide = s->dtype == DC_FLOAT64;
  bool channels = s->layer.kind == DC_SAMPLE_GROUP_NORM;
  int64_t at = sample * s->positions * s->in + (channels ? i * s->positions : i);
  int64_t row = channels ? sample * s->layer.groups + i / (s->in / s->layer.groups) : sample * s->positions;
  *weight = *bias = 0;
  for (int64_t t = 0; t < s->positions; t++) {
    double d = dc__load_element(s->delta, wide, at);
    *weight += d * (dc__load_element(s->x, wide, at) - job->mean[row]) * job->rstd[row];
    *bias += d;
    at += channels ? 1 : s->in;
    row += channels ? 0 : 1;
  }
}

/* Computes the statistics of all rows. In a query it only sets *query. */
static dc_status norm_prepare(norm_job *job, bool *query) {
  const dc__per_sample *s = job->s;
  bool channels = s->layer.kind == DC_SAMPLE_GROUP_NORM;
  int64_t rows = s->samples * (channels ? s->layer.groups : s->positions);
  job->width = channels ? s->in / s->layer.groups * s->positions : s->in;
  size_t bytes = 0;
  void *memory;
  bool fits = true;
  for (int i = 0; i < 2; i++) { /* mean and rstd, each from the beginning of a cache line */
    fits = fits && dc__linalg_add_bytes(&bytes, rows, sizeof(double));
  }
  if (!fits) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold the statistics", s->fn);
  }
  DC__TRY(dc__linalg_scratch(job->l, s->fn, bytes, &memory));
  *query = memory == NULL;
  if (memory != NULL) {
    size_t offset = 0;
    job->mean = dc__linalg_suballoc(memory, &offset, rows, sizeof(double));
    job->rstd = dc__linalg_suballoc(memory, &offset, rows, sizeof(double));
    dc__parallel_for(job->l->pool, rows, norm_statistics, job);
  }
  return DC_OK;
}

static void norm_grads_of(void *arg, int64_t sample, void *scratch) {
  (void)scratch;
  const norm_job *job = arg;
  bool wide = job->s->dtype == DC_FLOAT64;
  for (int64_t i = 0; i < job->s->in; i++) {
    double weight;
    double bias;
    norm_column(job, sample, i, &weight, &bias);
    if (job->weight != NULL) {
      dc__store_element(job->weight, wide, sample * job->s->in + i, weight);
    }
    if (job->bias != NULL) {
      dc__store_element(job->bias, wide, sample * job->s->in + i, bias);
    }
  }
}

dc_status dc__per_sample_norm_layer_grads(dc_linalg *l, const dc__per_sample *s, void *weight, void *bias) {
  norm_job job = {.l = l, .s = s, .weight = weight, .bias = bias};
  bool query;
  DC__TRY(norm_prepare(&job, &query));
  if (!query) {
    dc__parallel_for(l->pool, s->samples, norm_grads_of, &job);
  }
  return DC_OK;
}

static void norm_norm_of(void *arg, int64_t sample, void *scratch) {
  (void)scratch;
  const norm_job *job = arg;
  double square = 0;
  for (int64_t i = 0; i < job->s->in; i++) {
    double weight;
    double bias;
    norm_column(job, sample, i, &weight, &bias);
    square += (job->parts & DC_PART_WEIGHT) != 0 ? weight * weight : 0;
    square += (job->parts & DC_PART_BIAS) != 0 ? bias * bias : 0;
  }
  dc__store_squared_norm(job->s, job->out, sample, square, job->accumulate);
}

dc_status dc__per_sample_norm_layer_norms(dc_linalg *l, const dc__per_sample *s, int32_t parts, bool accumulate,
                                          void *squares) {
  norm_job job = {.l = l, .s = s, .parts = parts, .accumulate = accumulate, .out = squares};
  bool query;
  DC__TRY(norm_prepare(&job, &query));
  if (!query) {
    dc__parallel_for(l->pool, s->samples, norm_norm_of, &job);
  }
  return DC_OK;
}

static void norm_sum_column(void *arg, int64_t i, void *scratch) {
  (void)scratch;
  const norm_job *job = arg;
  const dc__per_sample *s = job->s;
  bool wide = s->dtype == DC_FLOAT64;
  double sums[2] = {0, 0};
  for (int64_t sample = 0; sample < s->samples; sample++) {
    double factor = dc__per_sample_factor(s, job->factors, sample);
    double weight;
    double bias;
    if (factor != 0) {
      norm_column(job, sample, i, &weight, &bias);
      sums[0] += factor * weight;
      sums[1] += factor * bias;
    }
  }
  void *const to[2] = {job->weight, job->bias};
  for (int32_t part = 0; part < 2; part++) {
    if (to[part] != NULL) {
      dc__store_element(to[part], wide, i, sums[part] + (job->accumulate ? dc__load_element(to[part], wide, i) : 0));
    }
  }
}

dc_status dc__per_sample_norm_layer_sum(dc_linalg *l, const dc__per_sample *s, const void *factors, bool accumulate,
                                        void *weight, void *bias) {
  norm_job job = {.l = l, .s = s, .factors = factors, .accumulate = accumulate, .weight = weight, .bias = bias};
  bool query;
  DC__TRY(norm_prepare(&job, &query));
  if (!query) {
    dc__parallel_for(l->pool, s->in, norm_sum_column, &job);
  }
  return DC_OK;
}
