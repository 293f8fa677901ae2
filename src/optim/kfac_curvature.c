/* What becomes of a layer's sums: the ranks' mean at the owner, running averages, their eigendecompositions, and with
 * these directions out of gradients. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "optim/kfac.h"

static int64_t triangle(const dc__kfac_layer *layer, int32_t which) {
  int64_t n = layer->factors[which].order;
  return n * (n + 1) / 2;
}

/* ---- the ranks' mean ---- */

/* Upper triangles of all matrices, and the two counts. In float64 the sum of equal ranks is exactly theirs times their
 * number, so a mean of equal sums has their bits; and only the owner receives, half of what an all-reduce would. */
int64_t dc__kfac_packed(const dc__kfac_layer *layer) {
  return layer->groups * (triangle(layer, DC__FACTOR_A) + triangle(layer, DC__FACTOR_G)) + DC__FACTORS;
}

typedef struct rows_job {
  dc__kfac_layer *layer;
  int32_t which;
  double *packed;
  double decay;
} rows_job;

/* Where row i of a group's upper triangle begins in its matrix, at the diagonal, and in the packed memory. */
static int64_t row_at(const rows_job *job, int64_t index, int64_t *at, double **packed) {
  int64_t n = job->layer->factors[job->which].order;
  int64_t group = index / n;
  int64_t i = index % n;
  *at = (group * n + i) * n + i;
  *packed = job->packed + group * triangle(job->layer, job->which) + i * n - i * (i - 1) / 2;
  return n - i;
}

static void pack_row(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const rows_job *job = arg;
  const dc__factor *f = &job->layer->factors[job->which];
  int64_t at;
  double *to;
  int64_t length = row_at(job, index, &at, &to);
  if (f->count == 0) {
    memset(to, 0, (size_t)length * sizeof *to);
    return;
  }
  dc__cast(to, DC_FLOAT64, f->sum + at, DC_FLOAT32, length);
  if (job->which == DC__FACTOR_A && job->layer->bias >= 0 && length == 1) {
    *to = (double)f->count; /* the one, squared and summed */
  }
}

/* The factor as it will be: decay mean + (1 - decay) packed over its count. */
static void average_row(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const rows_job *job = arg;
  const dc__factor *f = &job->layer->factors[job->which];
  int64_t at;
  double *from;
  int64_t length = row_at(job, index, &at, &from);
  double count = job->packed[job->layer->groups * triangle(job->layer, job->which)];
  f->diagonal[index] = f->sum[at];
  for (int64_t j = 0; j < length; j++) {
    double value = job->decay * (double)f->mean[at + j] + (1 - job->decay) * (from[j] / count);
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

static void each_row(dc_linalg *l, rows_job *job, dc__work_fn fn) {
  int64_t n = job->layer->factors[job->which].order;
  dc__parallel_sized(l->pool, job->layer->groups * n, n, fn, job);
}

/* The packed factors one after the other, each with its count. */
static double *packed_of(const dc__kfac_layer *layer, int32_t which, double *packed, double **count) {
  double *at = which == DC__FACTOR_A ? packed : packed + layer->groups * triangle(layer, DC__FACTOR_A) + 1;
  *count = at + layer->groups * triangle(layer, which);
  return at;
}

static void to_owner(dc_comm *comm, const dc__kfac_layer *layer, const double *from, double *to) {
  const dc__tag tag = {-1, -1, DC_OP_COMM_REDUCE_SCATTER, NULL};
  int64_t total = dc__kfac_packed(layer);
  dc__range ranges[DC__COMM_MAX_WORLD] = {{0, 0}};
  for (int32_t r = 0; r < comm->world; r++) {
    ranges[r] = (dc__range){r <= layer->owner ? 0 : total, r == layer->owner ? total : 0};
  }
  const dc__coll_item item = {.send = from,
                              .recv = to,
                              .ranges = ranges,
                              .total = total,
                              .id = layer->weight,
                              .dtype = DC_FLOAT64,
                              .recv_dtype = DC_FLOAT64,
                              .reduce_op = DC_SUM};
  dc__comm_reduce_scatter(comm, NULL, &tag, &item, 1);
}

dc_status dc__kfac_update(dc_linalg *l, dc_comm *comm, dc__kfac_layer *layer, double decay, double *memory) {
  double *sums = memory;
  double *count;
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    rows_job job = {.layer = layer, .which = which, .packed = packed_of(layer, which, memory, &count)};
    each_row(l, &job, pack_row);
    *count = (double)layer->factors[which].count;
  }
  if (comm != NULL && comm->world > 1) {
    sums = memory + dc__kfac_packed(layer);
    to_owner(comm, layer, memory, sums);
    DC__TRY(dc__comm_check(comm));
  }
  for (int32_t which = 0; which < DC__FACTORS && layer->updates != NULL; which++) {
    /* Martens and Grosse 2015, section 5: the plain mean of the first updates */
    double first = 1 - 1 / ((double)*layer->updates + 1);
    rows_job job = {.layer = layer, .which = which, .packed = packed_of(layer, which, sums, &count)};
    job.decay = decay < first ? decay : first;
    if (*count > 0) {
      each_row(l, &job, average_row);
      layer->factors[which].changed = true;
    }
  }
  return DC_OK;
}

/* ---- the end of a step ---- */

/* The latest decomposition, if it succeeded, becomes the one in use. */
static void commit_vectors(dc__factor *f, int32_t groups, dc_optimizer_stats *stats) {
  int64_t rows = groups * f->order;
  if (f->bad) {
    ++*f->failed;
    stats->failed_refreshes++;
  } else if (f->tried) {
    memcpy(f->vectors, f->fresh_vectors, (size_t)(rows * f->order) * sizeof *f->vectors);
    memcpy(f->values, f->fresh_values, (size_t)rows * sizeof *f->values);
    ++*f->good;
    *f->failed = 0;
    stats->refreshes++;
  }
}

void dc__kfac_commit(dc_linalg *l, dc__kfac_layer *layer, dc_optimizer_stats *stats) {
  bool changed = false;
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    dc__factor *f = &layer->factors[which];
    rows_job job = {.layer = layer, .which = which};
    if (f->changed) {
      each_row(l, &job, commit_row);
    }
    commit_vectors(f, layer->groups, stats);
    changed = changed || f->changed;
    f->changed = f->tried = f->bad = false;
    f->count = 0;
    f->bound = 0;
  }
  if (changed) {
    ++*layer->updates;
  }
}

void dc__kfac_undo(dc__kfac_layer *layer) {
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    dc__factor *f = &layer->factors[which];
    for (int64_t i = 0; i < layer->groups * f->order && f->changed; i++) {
      f->sum[i * f->order + i % f->order] = f->diagonal[i];
    }
    f->changed = f->tried = f->bad = false;
  }
}

/* ---- decompositions ---- */

static int larger_first(const void *a, const void *b) {
  const dc__kfac_matrix *x = a;
  const dc__kfac_matrix *y = b;
  int64_t left = x->layer->factors[x->which].order;
  int64_t right = y->layer->factors[y->which].order;
  return left > right ? -1 : left < right ? 1 : 0;
}

dc_status dc__kfac_matrices_create(dc__kfac_layer *layers, int64_t count, dc__kfac_matrices *m) {
  int64_t all = 1;
  for (int64_t i = 0; i < count; i++) {
    all += layers[i].updates == NULL ? 0 : DC__FACTORS * layers[i].groups;
  }
  m->list = dc__calloc((size_t)all, sizeof *m->list);
  m->requests = dc__calloc((size_t)all, sizeof *m->requests);
  m->infos = dc__calloc((size_t)all, sizeof *m->infos);
  m->places = dc__calloc((size_t)all, sizeof *m->places);
  if (m->list == NULL || m->requests == NULL || m->infos == NULL || m->places == NULL) {
    dc__kfac_matrices_destroy(m);
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = 0; i < count; i++) {
    for (int32_t j = 0; j < DC__FACTORS * layers[i].groups && layers[i].updates != NULL; j++) {
      m->list[m->count++] = (dc__kfac_matrix){&layers[i], j % DC__FACTORS, j / DC__FACTORS};
    }
  }
  qsort(m->list, (size_t)m->count, sizeof *m->list, larger_first);
  return DC_OK;
}

void dc__kfac_matrices_destroy(dc__kfac_matrices *m) {
  dc__free(m->list);
  dc__free(m->requests);
  dc__free(m->infos);
  dc__free(m->places);
  memset(m, 0, sizeof *m);
}

static dc__mat square(float *data, int64_t n, int64_t group) {
  return (dc__mat){.data = data + group * n * n,
                   .dtype = DC_FLOAT32,
                   .batch = 1,
                   .rows = n,
                   .cols = n,
                   .row_stride = n,
                   .col_stride = 1};
}

/* In float64: small eigenvalues of a float32 decomposition are noise, and damping may be smaller than that. */
static dc__spectral request_of(const char *fn, const dc__kfac_matrix *x, dc_spectral_info *info) {
  const dc__factor *f = &x->layer->factors[x->which];
  dc__spectral r = {.fn = fn,
                    .op = DC__SPECTRAL_EIGH,
                    .options = DC_SPECTRAL_OPTIONS_INIT,
                    .a = square(f->changed ? f->sum : f->mean, f->order, x->group),
                    .out = square(f->fresh_vectors, f->order, x->group),
                    .values = f->fresh_values + x->group * f->order,
                    .vectors = true,
                    .info = info,
                    .info_size = sizeof *info};
  r.options.precision = DC_FLOAT64;
  r.options.symmetry = DC_SYMMETRY_LOWER;
  return r;
}

static bool at_brink(const dc__kfac_matrix *x) {
  return *x->layer->factors[x->which].failed >= x->layer->tolerated;
}

static dc_status too_many(const char *fn, const dc__kfac_matrix *x, dc_status status) {
  return dc__fail(DC_E_NOT_CONVERGED,
                  "%s: the factor_%c of parameter %" PRId64 " could not be decomposed %" PRId64
                  " times in a row, the last time for %s",
                  fn, x->which == DC__FACTOR_A ? 'a' : 'g', x->layer->weight, x->layer->tolerated + 1,
                  dc_status_name(status));
}

dc_status dc__kfac_decompose(dc_linalg *l, const char *fn, dc__kfac_matrices *m, dc_optimizer_stats *stats) {
  int64_t count = 0;
  int64_t began = dc__now_ns();
  for (int64_t i = 0; i < m->count; i++) {
    const dc__kfac_matrix *x = &m->list[i];
    if (x->layer->due) {
      m->requests[count] = request_of(fn, x, &m->infos[count]);
      m->places[count++] = i;
    }
  }
  DC__TRY(dc__spectral_each(l, m->requests, count));
  for (int64_t i = 0; i < count; i++) {
    const dc__kfac_matrix *x = &m->list[m->places[i]];
    dc__factor *f = &x->layer->factors[x->which];
    f->tried = true;
    f->bad = f->bad || m->infos[i].status != DC_OK;
    if (f->bad && at_brink(x)) {
      return too_many(fn, x, m->infos[i].status);
    }
    float *values = f->fresh_values + x->group * f->order;
    for (int64_t k = 0; k < f->order && !f->bad; k++) {
      values[k] = values[k] > 0 ? values[k] : 0; /* rounding */
    }
  }
  stats->refresh_ns += dc__now_ns() - began;
  return DC_OK;
}

/* ---- directions ---- */

int64_t dc__kfac_direction_room(const dc__kfac_layer *layer) {
  int64_t a = layer->factors[DC__FACTOR_A].order;
  int64_t g = layer->factors[DC__FACTOR_G].order;
  return a * g + a + g;
}

/* Martens and Grosse 2015, section 6.3: sqrt(damping), shared out so that both terms it adds have one trace. */
static void shift(const float *values_a, int64_t a, const float *values_g, int64_t g, double damping, float *to_a,
                  float *to_g) {
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

/* A group's gradient with the bias' as its last column; NULL: zeros. */
static void load(const dc__kfac_layer *layer, int32_t group, const float *weight, const float *bias, float *x) {
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

static double store(const float *x, float *to, int64_t count) {
  double product = 0;
  for (int64_t i = 0; i < count; i++) {
    product += (double)x[i] * (double)to[i];
    to[i] = x[i];
  }
  return product;
}

/* A factor's latest decomposition: this step's, if there is one; false: there was none yet. */
static bool latest(const dc__factor *f, float **vectors, float **values) {
  bool fresh = f->tried && !f->bad;
  *vectors = fresh ? f->fresh_vectors : f->vectors;
  *values = fresh ? f->fresh_values : f->values;
  return fresh || *f->good > 0;
}

dc_status dc__kfac_direction(dc_linalg *l, const char *fn, const dc__kfac_layer *layer, double damping, bool factored,
                             float *weight, float *bias, float *memory, double *product) {
  const dc__factor *fa = &layer->factors[DC__FACTOR_A];
  const dc__factor *fg = &layer->factors[DC__FACTOR_G];
  int64_t a = fa->order;
  int64_t g = fg->order;
  int64_t in = a - (layer->bias >= 0 ? 1 : 0);
  dc__mat x = {.data = memory, .dtype = DC_FLOAT32, .batch = 1, .rows = g, .cols = a, .row_stride = a, .col_stride = 1};
  float *vectors[DC__FACTORS];
  float *values[DC__FACTORS];
  *product = 0;
  bool some = latest(fa, &vectors[DC__FACTOR_A], &values[DC__FACTOR_A]);
  some = latest(fg, &vectors[DC__FACTOR_G], &values[DC__FACTOR_G]) && some;
  for (int32_t group = 0; group < layer->groups && some; group++) {
    dc__mat qa = square(vectors[DC__FACTOR_A], a, group);
    dc__mat qg = square(vectors[DC__FACTOR_G], g, group);
    float *values_a = values[DC__FACTOR_A] + group * a;
    float *values_g = values[DC__FACTOR_G] + group * g;
    if (factored) {
      shift(values_a, a, values_g, g, damping, memory + a * g, memory + a * g + a);
      values_a = memory + a * g;
      values_g = values_a + a;
    }
    load(layer, group, weight, bias, memory);
    DC__TRY(dc__kron_solve(l, fn, &qg, values_g, &qa, values_a, factored ? 0 : damping, &x, &x));
    for (int64_t i = 0; i < g; i++) {
      int64_t row = group * g + i;
      *product += weight == NULL ? 0 : store(memory + i * a, weight + row * in, in);
      *product += bias == NULL ? 0 : store(memory + i * a + in, bias + row, 1);
    }
  }
  return isfinite(*product)
             ? DC_OK
             : dc__fail(DC_E_NOT_FINITE, "%s: the direction of parameter %" PRId64 " is not finite", fn, layer->weight);
}
