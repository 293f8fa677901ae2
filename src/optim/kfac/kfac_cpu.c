/* K-FAC's operations on the host: rows of factors on the threads, and directions from gradients. */
#include <math.h>
#include <string.h>

#include "optim/kfac/kfac.h"

/* ---- factors ---- */

typedef struct rows_job {
  const dc__kfac_layer *layer;
  int32_t which;
  double *to;         /* packed */
  const double *from; /* packed */
  double decay, count;
} rows_job;

/* Offsets of row i of a group's upper triangle: in its matrix, at the diagonal, and in packed memory. */
static int64_t row_at(const rows_job *job, int64_t index, int64_t *at, int64_t *packed) {
  int64_t n = job->layer->factors[job->which].order;
  int64_t group = index / n;
  int64_t i = index % n;
  *at = (group * n + i) * n + i;
  *packed = group * dc__kfac_triangle_count(job->layer, job->which) + i * n - i * (i - 1) / 2;
  return n - i;
}

static void pack_row(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const rows_job *job = arg;
  const dc__factor *f = &job->layer->factors[job->which];
  int64_t at;
  int64_t packed;
  int64_t length = row_at(job, index, &at, &packed);
  double *to = job->to + packed;
  if (f->count == 0) {
    memset(to, 0, (size_t)length * sizeof *to);
    return;
  }
  dc__cast(to, DC_FLOAT64, f->sum + at, DC_FLOAT32, length);
  if (job->which == DC__FACTOR_A && job->layer->bias >= 0 && length == 1) {
    *to = (double)f->count; /* the one, squared and summed */
  }
}

static void average_row(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const rows_job *job = arg;
  const dc__factor *f = &job->layer->factors[job->which];
  int64_t at;
  int64_t packed;
  int64_t length = row_at(job, index, &at, &packed);
  const double *from = job->from + packed;
  f->diagonal[index] = f->sum[at];
  for (int64_t j = 0; j < length; j++) {
    double value = job->decay * (double)f->mean[at + j] + (1 - job->decay) * (from[j] / job->count);
    f->sum[at + j * f->order] = (float)value;
  }
}

static void commit_row(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const rows_job *job = arg;
  const dc__factor *f = &job->layer->factors[job->which];
  int64_t i = index % f->order;
  int64_t at = index * f->order + i;
  for (int64_t j = 0; j < f->order - i; j++) {
    f->mean[at + j] = f->mean[at + j * f->order] = f->sum[at + j * f->order];
  }
}

static void each_row(dc_linalg *l, rows_job *job, dc__parallel_fn fn) {
  int64_t n = job->layer->factors[job->which].order;
  dc__parallel_for_cost(l->pool, job->layer->groups * n, n, fn, job);
}

static void kfac_pack_cpu(dc_linalg *l, const dc__kfac_layer *layer, int32_t which, double *packed) {
  rows_job job = {.layer = layer, .which = which, .to = packed};
  each_row(l, &job, pack_row);
}

static void kfac_average_cpu(dc_linalg *l, const dc__kfac_layer *layer, int32_t which, const double *packed,
                             double decay, double count) {
  rows_job job = {.layer = layer, .which = which, .from = packed, .decay = decay, .count = count};
  each_row(l, &job, average_row);
}

static void kfac_commit_cpu(dc_linalg *l, const dc__kfac_layer *layer, int32_t which) {
  rows_job job = {.layer = layer, .which = which};
  each_row(l, &job, commit_row);
}

static void kfac_undo_cpu(dc_linalg *l, const dc__kfac_layer *layer, int32_t which) {
  (void)l;
  const dc__factor *f = &layer->factors[which];
  for (int64_t i = 0; i < layer->groups * f->order; i++) {
    f->sum[i * f->order + i % f->order] = f->diagonal[i];
  }
}

static void kfac_clamp_negative_cpu(dc_linalg *l, float *values, int64_t count) {
  (void)l;
  for (int64_t k = 0; k < count; k++) {
    values[k] = values[k] > 0 ? values[k] : 0;
  }
}

/* ---- directions ---- */

/* Counts memory for a group's gradient and its shifted eigenvalues. */
static bool kfac_direction_size_cpu(const dc_linalg *l, const dc__kfac_layer *layer, size_t *bytes) {
  (void)l;
  int64_t a = layer->factors[DC__FACTOR_A].order;
  int64_t g = layer->factors[DC__FACTOR_G].order;
  return dc__linalg_add_bytes(bytes, a * g + a + g, sizeof(float));
}

/* Martens and Grosse 2015, section 6.3: splits sqrt(damping) so that both terms that it adds have the same trace. */
static void kfac_damp_eigenvalues_cpu(const float *values_a, int64_t a, const float *values_g, int64_t g,
                                      double damping, float *to_a, float *to_g) {
  double mean_a = 0;
  double mean_g = 0;
  for (int64_t i = 0; i < a; i++) {
    mean_a += (double)values_a[i] / (double)a;
  }
  for (int64_t i = 0; i < g; i++) {
    mean_g += (double)values_g[i] / (double)g;
  }
  double pi = mean_a > 0 && mean_g > 0 ? sqrt(mean_a / mean_g) : 1;
  for (int64_t i = 0; i < a; i++) {
    to_a[i] = (float)((double)values_a[i] + pi * sqrt(damping));
  }
  for (int64_t i = 0; i < g; i++) {
    to_g[i] = (float)((double)values_g[i] + sqrt(damping) / pi);
  }
}

/* A group's gradient with the bias's as its last column; NULL for zeros. */
static void kfac_load_gradient_cpu(const dc__kfac_layer *layer, int32_t group, const float *weight, const float *bias,
                                   float *x) {
  int64_t a = layer->factors[DC__FACTOR_A].order;
  int64_t g = layer->factors[DC__FACTOR_G].order;
  int64_t in = a - (layer->bias >= 0 ? 1 : 0);
  for (int64_t i = 0; i < g; i++, x += a) {
    int64_t row = group * g + i;
    memset(x, 0, (size_t)a * sizeof *x);
    if (weight != NULL) {
      memcpy(x, weight + row * in, (size_t)in * sizeof *x);
    }
    if (bias != NULL) {
      x[in] = bias[row];
    }
  }
}

static double store_direction(const float *x, float *to, int64_t count) {
  double product = 0;
  for (int64_t i = 0; i < count; i++) {
    product += (double)x[i] * (double)to[i];
    to[i] = x[i];
  }
  return product;
}

static dc__mat kfac_dense_cpu(const float *data, int64_t rows, int64_t cols) {
  return (dc__mat){.data = (float *)(uintptr_t)data, /* is only read, but for the gradient */
                   .dtype = DC_FLOAT32,
                   .batch = 1,
                   .rows = rows,
                   .cols = cols,
                   .row_stride = cols,
                   .col_stride = 1};
}

static dc_status direct_group(dc_linalg *l, const dc__kfac_direction *d, int64_t a, int64_t g, int32_t group) {
  const float *values_a = d->values[DC__FACTOR_A] + group * a;
  const float *values_g = d->values[DC__FACTOR_G] + group * g;
  float *memory = d->memory;
  float *shifted = memory + a * g;
  int64_t in = a - (d->layer->bias >= 0 ? 1 : 0);
  if (d->factored) {
    kfac_damp_eigenvalues_cpu(values_a, a, values_g, g, d->damping, shifted, shifted + a);
    values_a = shifted;
    values_g = shifted + a;
  }
  const dc__mat qa = kfac_dense_cpu(d->vectors[DC__FACTOR_A] + group * a * a, a, a);
  const dc__mat qg = kfac_dense_cpu(d->vectors[DC__FACTOR_G] + group * g * g, g, g);
  const dc__mat x = kfac_dense_cpu(memory, g, a);
  kfac_load_gradient_cpu(d->layer, group, d->weight, d->bias, memory);
  const dc__kron_inverse inverse = {.a_vectors = &qg,
                                    .b_vectors = &qa,
                                    .a_values = values_g,
                                    .b_values = values_a,
                                    .damping = d->factored ? 0 : d->damping};
  DC__TRY(dc__kron_solve(l, d->fn, &inverse, &x, &x));
  for (int64_t i = 0; i < g; i++) {
    int64_t row = group * g + i;
    d->found->product += d->weight == NULL ? 0 : store_direction(memory + i * a, d->weight + row * in, in);
    d->found->product += d->bias == NULL ? 0 : store_direction(memory + i * a + in, d->bias + row, 1);
  }
  return DC_OK;
}

static dc_status kfac_precondition_cpu(dc_linalg *l, const dc__kfac_direction *d) {
  int64_t a = d->layer->factors[DC__FACTOR_A].order;
  int64_t g = d->layer->factors[DC__FACTOR_G].order;
  for (int32_t group = 0; group < d->layer->groups; group++) {
    DC__TRY(direct_group(l, d, a, g, group));
  }
  return DC_OK;
}

const dc__kfac_work dc__kfac_work_cpu = {.scan = dc__kfac_scan_cpu,
                                         .accumulate = dc__kfac_accumulate_cpu,
                                         .pack = kfac_pack_cpu,
                                         .average = kfac_average_cpu,
                                         .commit = kfac_commit_cpu,
                                         .undo = kfac_undo_cpu,
                                         .clamp_negative = kfac_clamp_negative_cpu,
                                         .direction_size = kfac_direction_size_cpu,
                                         .precondition = kfac_precondition_cpu};
