/* K-FAC's operations on a device: products and kernels, queued on its internal stream. All groups of a layer run
 * together. */
#include "kernels/cuda/kernels_cuda.h"
#include "optim/kfac/kfac.h"

static dc_stream *stream_of(const dc_linalg *l) {
  return l->device->internal_stream;
}

/* ---- factors ---- */

static dc__cuda_matrices view_of(const float *data, int64_t rows, int64_t cols, int64_t row_stride,
                                 int64_t col_stride) {
  dc__cuda_matrices m = {.data = (void *)(uintptr_t)data, .row_stride = row_stride, .col_stride = col_stride};
  m.rows = rows;
  m.cols = cols;
  m.count = 1;
  return m;
}

static void copy_matrices(const dc_linalg *l, dc__cuda_matrices from, dc__cuda_matrices to) {
  dc__cuda_load_uniform(stream_of(l), from, to, 1, 1);
}

/* The diagonals of all groups' sums, and their saved copies. */
static dc__cuda_matrices diagonals_of(const dc__kfac_layer *layer, const dc__factor *f) {
  return view_of(f->sum, layer->groups, f->order, f->order * f->order, f->order + 1);
}
static dc__cuda_matrices saved_diagonals_of(const dc__kfac_layer *layer, const dc__factor *f) {
  return view_of(f->diagonal, layer->groups, f->order, f->order, 1);
}

static dc__cuda_triangles_args triangles_of(const dc__kfac_layer *layer, const dc__factor *f, const double *packed) {
  return (dc__cuda_triangles_args){.sum = f->sum,
                                   .mean = f->mean,
                                   .packed = (double *)(uintptr_t)packed, /* is only read by an average */
                                   .groups = layer->groups,
                                   .n = f->order,
                                   .corner = -1};
}

static void kfac_pack_cuda(dc_linalg *l, const dc__kfac_layer *layer, int32_t which, double *packed) {
  const dc__factor *f = &layer->factors[which];
  dc__cuda_triangles_args args = triangles_of(layer, f, packed);
  if (f->count == 0) {
    const int64_t count = layer->groups * dc__kfac_triangle_count(layer, which);
    dc__stream_zero(stream_of(l), packed, (size_t)count * sizeof *packed);
    return;
  }
  args.corner = which == DC__FACTOR_A && layer->bias >= 0 ? (double)f->count : -1; /* the one, squared and summed */
  dc__cuda_pack_triangles(stream_of(l), &args);
}

static void kfac_average_cuda(dc_linalg *l, const dc__kfac_layer *layer, int32_t which, const double *packed,
                              double decay, double count) {
  const dc__factor *f = &layer->factors[which];
  dc__cuda_triangles_args args = triangles_of(layer, f, packed);
  args.decay = decay;
  args.count = count;
  copy_matrices(l, diagonals_of(layer, f), saved_diagonals_of(layer, f));
  dc__cuda_average_triangles(stream_of(l), &args);
}

static void kfac_commit_cuda(dc_linalg *l, const dc__kfac_layer *layer, int32_t which) {
  const dc__factor *f = &layer->factors[which];
  const int64_t n = f->order;
  for (int32_t group = 0; group < layer->groups; group += DC__CUDA_BATCH_SLICE) {
    dc__cuda_load_args args = {.from = view_of(f->sum + group * n * n, n, n, n, 1),
                               .to = view_of(f->mean + group * n * n, n, n, n, 1),
                               .low = 1,
                               .mask = UINT32_MAX};
    args.from.batch_stride = args.to.batch_stride = n * n;
    args.from.count = layer->groups - group < DC__CUDA_BATCH_SLICE ? layer->groups - group : DC__CUDA_BATCH_SLICE;
    args.to.count = args.from.count;
    for (int32_t i = 0; i < DC__CUDA_BATCH_SLICE; i++) {
      args.factor[i] = 1;
    }
    dc__cuda_load(stream_of(l), &args);
  }
}

static void kfac_undo_cuda(dc_linalg *l, const dc__kfac_layer *layer, int32_t which) {
  const dc__factor *f = &layer->factors[which];
  copy_matrices(l, saved_diagonals_of(layer, f), diagonals_of(layer, f));
}

static void kfac_clamp_negative_cuda(dc_linalg *l, float *values, int64_t count) {
  const dc__cuda_clamp_min_zero_args args = {values, count};
  dc__cuda_clamp_min_zero(stream_of(l), &args);
}

/* ---- directions ---- */

/* Memory of a direction: its gradient [groups, g, a] with the bias's as the last column, shifted eigenvalues, row
 * sums, and the solver's scratch. */
typedef struct direction_plan {
  int64_t a, g, in, rows;
  dc__mat x;
  float *shifted[DC__FACTORS];
  double *sums;
  void *workspace;
} direction_plan;

static dc__mat kfac_dense_cuda(const float *data, int64_t batch, int64_t rows, int64_t cols) {
  return (dc__mat){.data = (float *)(uintptr_t)data, /* is only read, but for the gradient */
                   .dtype = DC_FLOAT32,
                   .batch = batch,
                   .rows = rows,
                   .cols = cols,
                   .batch_stride = rows * cols,
                   .row_stride = cols,
                   .col_stride = 1};
}

static void *offset_of(void *memory, size_t offset) {
  return memory == NULL ? NULL : (char *)memory + offset;
}

/* With memory NULL, only counts *bytes. */
static bool plan_direction(const dc_linalg *l, const dc__kfac_layer *layer, void *memory, direction_plan *s,
                           size_t *bytes) {
  s->a = layer->factors[DC__FACTOR_A].order;
  s->g = layer->factors[DC__FACTOR_G].order;
  s->in = s->a - (layer->bias >= 0 ? 1 : 0);
  s->rows = layer->groups * s->g;
  s->x = kfac_dense_cuda(memory, layer->groups, s->g, s->a);
  const size_t begin = *bytes;
  bool fits = dc__linalg_add_bytes(bytes, s->rows, (size_t)s->a * sizeof(float));
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    s->shifted[which] = offset_of(memory, *bytes - begin);
    fits = fits && dc__linalg_add_bytes(bytes, layer->groups * layer->factors[which].order, sizeof(float));
  }
  s->sums = offset_of(memory, *bytes - begin);
  fits = fits && dc__linalg_add_bytes(bytes, s->rows, sizeof(double));
  s->workspace = offset_of(memory, *bytes - begin);
  return fits && dc__kron_add_scratch(l, &s->x, bytes);
}

static bool kfac_direction_size_cuda(const dc_linalg *l, const dc__kfac_layer *layer, size_t *bytes) {
  direction_plan s;
  return plan_direction(l, layer, NULL, &s, bytes);
}

/* Sets the eigenvalues to divide by. Returns what is added to their products. */
static double kfac_damp_eigenvalues_cuda(dc_linalg *l, const dc__kfac_direction *d, const direction_plan *s,
                                         const float *values[DC__FACTORS]) {
  const dc__cuda_damp_eigenvalues_args args = {.values_a = d->values[DC__FACTOR_A],
                                               .values_g = d->values[DC__FACTOR_G],
                                               .to_a = s->shifted[DC__FACTOR_A],
                                               .to_g = s->shifted[DC__FACTOR_G],
                                               .groups = d->layer->groups,
                                               .a = s->a,
                                               .g = s->g,
                                               .damping = d->damping};
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    values[which] = d->factored ? s->shifted[which] : d->values[which];
  }
  if (d->factored) {
    dc__cuda_damp_eigenvalues(stream_of(l), &args);
  }
  return d->factored ? 0 : d->damping;
}

static void kfac_load_gradient_cuda(const dc_linalg *l, const dc__kfac_direction *d, const direction_plan *s) {
  float *x = s->x.data;
  if (d->weight == NULL || (d->bias == NULL && s->in < s->a)) {
    dc__stream_zero(stream_of(l), x, (size_t)(s->rows * s->a) * sizeof *x);
  }
  if (d->weight != NULL) {
    copy_matrices(l, view_of(d->weight, s->rows, s->in, s->in, 1), view_of(x, s->rows, s->in, s->a, 1));
  }
  if (d->bias != NULL) {
    copy_matrices(l, view_of(d->bias, s->rows, 1, 1, 1), view_of(x + s->in, s->rows, 1, s->a, 1));
  }
}

static dc_status kfac_precondition_cuda(dc_linalg *l, const dc__kfac_direction *d) {
  const float *values[DC__FACTORS];
  direction_plan s;
  size_t bytes = 0;
  (void)plan_direction(l, d->layer, d->memory, &s, &bytes);
  const dc__mat qa = kfac_dense_cuda(d->vectors[DC__FACTOR_A], d->layer->groups, s.a, s.a);
  const dc__mat qg = kfac_dense_cuda(d->vectors[DC__FACTOR_G], d->layer->groups, s.g, s.g);
  const dc__cuda_store_direction_args out = {
      .x = s.x.data, .weight = d->weight, .bias = d->bias, .sums = s.sums, .rows = s.rows, .columns = s.a, .in = s.in};
  const dc__cuda_totals_args total = {
      .sums = s.sums, .to = &d->found->product, .count = 1, .rows = s.rows, .group = 1, .step = 1, .factor = 1};
  const double damping = kfac_damp_eigenvalues_cuda(l, d, &s, values);
  kfac_load_gradient_cuda(l, d, &s);
  const dc__kron_inverse inverse = {.a_vectors = &qg,
                                    .b_vectors = &qa,
                                    .a_values = values[DC__FACTOR_G],
                                    .b_values = values[DC__FACTOR_A],
                                    .damping = damping};
  dc__kron_apply_inverse(l, &inverse, &s.x, &s.x, s.workspace, &d->found->not_positive);
  dc__cuda_store_direction(stream_of(l), &out);
  dc__cuda_totals(stream_of(l), &total);
  return DC_OK;
}

static dc_status kfac_report_not_positive_cuda(dc_linalg *l, const dc__kfac_direction *d) {
  const float *values[DC__FACTORS];
  dc_status status = DC_OK;
  direction_plan s;
  size_t bytes = 0;
  (void)plan_direction(l, d->layer, d->memory, &s, &bytes);
  const double damping = kfac_damp_eigenvalues_cuda(l, d, &s, values);
  for (int64_t i = 0; i < d->layer->groups && status == DC_OK; i++) {
    const dc__kron_inverse inverse = {
        .a_values = values[DC__FACTOR_G] + i * s.g, .b_values = values[DC__FACTOR_A] + i * s.a, .damping = damping};
    status = dc__kron_check_damped(l, d->fn, &inverse, &s.x);
  }
  return status;
}

const dc__kfac_work dc__kfac_work_cuda = {.scan = dc__kfac_scan_cuda,
                                          .accumulate = dc__kfac_accumulate_cuda,
                                          .pack = kfac_pack_cuda,
                                          .average = kfac_average_cuda,
                                          .commit = kfac_commit_cuda,
                                          .undo = kfac_undo_cuda,
                                          .clamp_negative = kfac_clamp_negative_cuda,
                                          .direction_size = kfac_direction_size_cuda,
                                          .precondition = kfac_precondition_cuda,
                                          .report_not_positive = kfac_report_not_positive_cuda};
