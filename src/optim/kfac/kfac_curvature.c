/* From a layer's sums to its curvature: the mean over ranks at the owner, running averages, eigendecompositions.
 * Element-wise work is in dc__kfac_work. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "optim/kfac/kfac.h"

/* ---- memory ---- */

static int32_t memory_kind(const dc_linalg *l) {
  return dc__linalg_work_of(l)->memory_kind;
}

dc_status dc__kfac_alloc(dc_linalg *l, size_t bytes, void **memory) {
  return l->device->ops->alloc(l->device, bytes, memory_kind(l), memory);
}

void dc__kfac_free(dc_linalg *l, void *memory, size_t bytes) {
  if (memory != NULL) {
    l->device->ops->free(l->device, memory, bytes, memory_kind(l));
  }
}

/* ---- the ranks' mean ---- */

/* Upper triangles of all matrices. In float64 the sum of equal values is exact, so a mean of equal sums has their bits.
 * Only the owner receives, half of what an all-reduce would send. */
int64_t dc__kfac_packed_count(const dc__kfac_layer *layer) {
  return layer->groups * (dc__kfac_triangle_count(layer, DC__FACTOR_A) + dc__kfac_triangle_count(layer, DC__FACTOR_G));
}

static int64_t packed_at(const dc__kfac_layer *layer, int32_t which) {
  return which == DC__FACTOR_A ? 0 : layer->groups * dc__kfac_triangle_count(layer, DC__FACTOR_A);
}

static dc_status reduce_to_owner(dc_linalg *l, dc_comm *comm, dc_stream *comm_stream, const dc__kfac_layer *layer,
                                 const double *from, double *to) {
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_REDUCE_SCATTER};
  int64_t total = dc__kfac_packed_count(layer);
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
  dc__device_sync_internal(l->device, NULL);
  dc__comm_reduce_scatter(comm, comm_stream, &tag, &item, 1);
  DC__TRY(dc__stream_sync(comm_stream, 0));
  return dc__comm_check(comm);
}

dc_status dc__kfac_update(dc_linalg *l, dc_comm *comm, dc_stream *comm_stream, dc__kfac_layer *layer, double decay,
                          const int64_t counts[DC__FACTORS], double *memory) {
  const dc__kfac_work *work = dc__kfac_work_of(l);
  double *sums = memory;
  if (counts[DC__FACTOR_A] == 0) {
    return DC_OK; /* then G has none either */
  }
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    work->pack(l, layer, which, memory + packed_at(layer, which));
  }
  if (comm != NULL && comm->world > 1) {
    sums = memory + dc__kfac_packed_count(layer);
    DC__TRY(reduce_to_owner(l, comm, comm_stream, layer, memory, sums));
  }
  for (int32_t which = 0; which < DC__FACTORS && layer->updates != NULL; which++) {
    /* Martens and Grosse 2015, section 5: the plain mean of the first updates */
    double first = 1 - 1 / ((double)*layer->updates + 1);
    work->average(l, layer, which, sums + packed_at(layer, which), decay < first ? decay : first,
                  (double)counts[which]);
    layer->factors[which].changed = true;
  }
  return DC_OK;
}

/* ---- the end of a step ---- */

/* Commits the latest decomposition if it succeeded. */
static void commit_vectors(dc_linalg *l, dc__factor *f, int32_t groups, dc_optimizer_stats *stats) {
  dc_stream *stream = l->device->internal_stream;
  int64_t rows = groups * f->order;
  if (f->rejected) {
    ++*f->failures;
    stats->failed_refreshes++;
  } else if (f->attempted) {
    dc__stream_copy(stream, f->vectors, f->new_vectors, (size_t)(rows * f->order) * sizeof *f->vectors);
    dc__stream_copy(stream, f->values, f->new_values, (size_t)rows * sizeof *f->values);
    ++*f->successes;
    *f->failures = 0;
    stats->refreshes++;
  }
}

void dc__kfac_commit(dc_linalg *l, dc__kfac_layer *layer, dc_optimizer_stats *stats) {
  bool changed = false;
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    dc__factor *f = &layer->factors[which];
    if (f->changed) {
      dc__kfac_work_of(l)->commit(l, layer, which);
    }
    commit_vectors(l, f, layer->groups, stats);
    changed = changed || f->changed;
    f->changed = f->attempted = f->rejected = false;
    f->count = 0;
    f->bound = 0;
  }
  if (changed) {
    ++*layer->updates;
  }
}

void dc__kfac_undo(dc_linalg *l, dc__kfac_layer *layer) {
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    dc__factor *f = &layer->factors[which];
    if (f->changed) {
      dc__kfac_work_of(l)->undo(l, layer, which);
    }
    f->changed = f->attempted = f->rejected = false;
  }
}

/* ---- decompositions ---- */

static int by_order_descending(const void *a, const void *b) {
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
  m->list_index = dc__calloc((size_t)all, sizeof *m->list_index);
  if (m->list == NULL || m->requests == NULL || m->infos == NULL || m->list_index == NULL) {
    dc__kfac_matrices_destroy(m);
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = 0; i < count; i++) {
    for (int32_t j = 0; j < DC__FACTORS * layers[i].groups && layers[i].updates != NULL; j++) {
      m->list[m->count++] = (dc__kfac_matrix){&layers[i], j % DC__FACTORS, j / DC__FACTORS};
    }
  }
  qsort(m->list, (size_t)m->count, sizeof *m->list, by_order_descending);
  return DC_OK;
}

void dc__kfac_matrices_destroy(dc__kfac_matrices *m) {
  dc__free(m->list);
  dc__free(m->requests);
  dc__free(m->infos);
  dc__free(m->list_index);
  memset(m, 0, sizeof *m);
}

static dc__mat group_matrix(float *data, int64_t n, int64_t group) {
  return (dc__mat){.data = data + group * n * n,
                   .dtype = DC_FLOAT32,
                   .batch = 1,
                   .rows = n,
                   .cols = n,
                   .row_stride = n,
                   .col_stride = 1};
}

/* In float64: small eigenvalues of a float32 decomposition are noise, and damping may be smaller than that. */
static dc__spectral_request request_of(const char *fn, const dc__kfac_matrix *x, dc_spectral_info *info) {
  const dc__factor *f = &x->layer->factors[x->which];
  dc__spectral_request r = {.fn = fn,
                            .op = DC__SPECTRAL_EIGH,
                            .options = DC_SPECTRAL_OPTIONS_INIT,
                            .a = group_matrix(f->changed ? f->sum : f->mean, f->order, x->group),
                            .out = group_matrix(f->new_vectors, f->order, x->group),
                            .values = f->new_values + x->group * f->order,
                            .vectors = true,
                            .info = info,
                            .info_size = sizeof *info};
  r.options.precision = DC_FLOAT64;
  r.options.symmetry = DC_SYMMETRY_LOWER;
  return r;
}

dc_status dc__kfac_reserve(dc_linalg *l, const char *fn, dc__kfac_matrices *m) {
  void *memory;
  for (int64_t i = 0; i < m->count; i++) {
    m->requests[i] = request_of(fn, &m->list[i], &m->infos[i]);
  }
  l->query = true;
  l->query_bytes = 0;
  dc_status status = dc__spectral_run_grouped(l, m->requests, m->count);
  l->query = false;
  return status == DC_OK ? dc__linalg_scratch(l, fn, l->query_bytes, &memory) : status;
}

static bool failures_exhausted(const dc__kfac_matrix *x) {
  return *x->layer->factors[x->which].failures >= x->layer->tolerated;
}

static dc_status fail_not_converged(const char *fn, const dc__kfac_matrix *x, dc_status status) {
  return dc__fail(DC_E_NOT_CONVERGED,
                  "%s: the factor_%c of parameter %" PRId64 " could not be decomposed %" PRId64
                  " time%s in a row, the last time for %s",
                  fn, x->which == DC__FACTOR_A ? 'a' : 'g', x->layer->weight, x->layer->tolerated + 1,
                  DC__PLURAL_S(x->layer->tolerated + 1), dc_status_name(status));
}

dc_status dc__kfac_decompose(dc_linalg *l, const char *fn, dc__kfac_matrices *m, dc_optimizer_stats *stats) {
  int64_t count = 0;
  int64_t began = dc__now_ns();
  for (int64_t i = 0; i < m->count; i++) {
    const dc__kfac_matrix *x = &m->list[i];
    if (x->layer->due) {
      m->requests[count] = request_of(fn, x, &m->infos[count]);
      m->list_index[count++] = i;
    }
  }
  DC__TRY(dc__spectral_run_grouped(l, m->requests, count));
  for (int64_t i = 0; i < count; i++) {
    const dc__kfac_matrix *x = &m->list[m->list_index[i]];
    dc__factor *f = &x->layer->factors[x->which];
    f->attempted = true;
    f->rejected = f->rejected || m->infos[i].status != DC_OK;
    if (f->rejected && failures_exhausted(x)) {
      return fail_not_converged(fn, x, m->infos[i].status);
    }
    if (!f->rejected && !(m->infos[i].smallest > 0)) {
      dc__kfac_work_of(l)->clamp_negative(l, f->new_values + x->group * f->order, f->order);
    }
  }
  stats->refresh_ns += dc__now_ns() - began;
  return DC_OK;
}

/* A factor's latest decomposition, this step's if there is one. Returns false if there is none yet. */
static bool latest_decomposition(const dc__factor *f, const float **vectors, const float **values) {
  bool fresh = f->attempted && !f->rejected;
  *vectors = fresh ? f->new_vectors : f->vectors;
  *values = fresh ? f->new_values : f->values;
  return fresh || *f->successes > 0;
}

bool dc__kfac_latest(const dc__kfac_layer *layer, dc__kfac_direction *d) {
  bool complete = true;
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    complete = latest_decomposition(&layer->factors[which], &d->vectors[which], &d->values[which]) && complete;
  }
  return complete;
}
