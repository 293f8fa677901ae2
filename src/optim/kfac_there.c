/* K-FAC's work on matrices and elements, on a device with memory of its own: products and kernels, queued on the
 * device's own stream. All groups of a layer go together. */
#include "optim/kfac.h"

static dc_stream *stream_of(const dc_linalg *l) {
  return l->device->here;
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

static void copy(const dc_linalg *l, dc__cuda_matrices from, dc__cuda_matrices to) {
  dc__cuda_load_alike(stream_of(l), from, to, 1, 1);
}

/* The diagonals of all groups' sums, and where they are kept. */
static dc__cuda_matrices diagonals_of(const dc__kfac_layer *layer, const dc__factor *f) {
  return view_of(f->sum, layer->groups, f->order, f->order * f->order, f->order + 1);
}
static dc__cuda_matrices kept_of(const dc__kfac_layer *layer, const dc__factor *f) {
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

static void pack(dc_linalg *l, const dc__kfac_layer *layer, int32_t which, double *packed) {
  const dc__factor *f = &layer->factors[which];
  dc__cuda_triangles_args args = triangles_of(layer, f, packed);
  if (f->count == 0) {
    const int64_t count = layer->groups * dc__kfac_triangle(layer, which);
    dc__stream_zero(stream_of(l), packed, (size_t)count * sizeof *packed);
    return;
  }
  args.corner = which == DC__FACTOR_A && layer->bias >= 0 ? (double)f->count : -1; /* the one, squared and summed */
  dc__cuda_pack(stream_of(l), &args);
}

static void average(dc_linalg *l, const dc__kfac_layer *layer, int32_t which, const double *packed, double decay,
                    double count) {
  const dc__factor *f = &layer->factors[which];
  dc__cuda_triangles_args args = triangles_of(layer, f, packed);
  args.decay = decay;
  args.count = count;
  copy(l, diagonals_of(layer, f), kept_of(layer, f));
  dc__cuda_average(stream_of(l), &args);
}

static void commit(dc_linalg *l, const dc__kfac_layer *layer, int32_t which) {
  const dc__factor *f = &layer->factors[which];
  const int64_t n = f->order;
  for (int32_t group = 0; group < layer->groups; group += DC__CUDA_FLIGHT) {
    dc__cuda_load_args args = {.from = view_of(f->sum + group * n * n, n, n, n, 1),
                               .to = view_of(f->mean + group * n * n, n, n, n, 1),
                               .low = 1,
                               .mask = UINT32_MAX};
    args.from.batch_stride = args.to.batch_stride = n * n;
    args.from.count = layer->groups - group < DC__CUDA_FLIGHT ? layer->groups - group : DC__CUDA_FLIGHT;
    args.to.count = args.from.count;
    for (int32_t i = 0; i < DC__CUDA_FLIGHT; i++) {
      args.factor[i] = 1;
    }
    dc__cuda_load(stream_of(l), &args);
  }
}

static void undo(dc_linalg *l, const dc__kfac_layer *layer, int32_t which) {
  const dc__factor *f = &layer->factors[which];
  copy(l, kept_of(layer, f), diagonals_of(layer, f));
}

static void rectify(dc_linalg *l, float *values, int64_t count) {
  const dc__cuda_rectify_args args = {values, count};
  dc__cuda_rectify(stream_of(l), &args);
}

/* ---- directions ---- */

/* Where a direction is made: its gradient [groups, g, a] with the bias' as the last column, eigenvalues that were
 * shifted, sums of rows, and what the solution wants. */
typedef struct scene {
  int64_t a, g, in, rows;
  dc__mat x;
  float *shifted[DC__FACTORS];
  double *sums;
  void *place;
} scene;

static dc__mat dense(const float *data, int64_t batch, int64_t rows, int64_t cols) {
  return (dc__mat){.data = (float *)(uintptr_t)data, /* is only read, but for the gradient */
                   .dtype = DC_FLOAT32,
                   .batch = batch,
                   .rows = rows,
                   .cols = cols,
                   .batch_stride = rows * cols,
                   .row_stride = cols,
                   .col_stride = 1};
}

static void *place_at(void *memory, size_t offset) {
  return memory == NULL ? NULL : (char *)memory + offset;
}

/* memory NULL: *bytes are counted alone. */
static bool lay_out(const dc_linalg *l, const dc__kfac_layer *layer, void *memory, scene *s, size_t *bytes) {
  s->a = layer->factors[DC__FACTOR_A].order;
  s->g = layer->factors[DC__FACTOR_G].order;
  s->in = s->a - (layer->bias >= 0 ? 1 : 0);
  s->rows = layer->groups * s->g;
  s->x = dense(memory, layer->groups, s->g, s->a);
  const size_t begin = *bytes;
  bool fits = dc__linalg_add(bytes, s->rows, (size_t)s->a * sizeof(float));
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    s->shifted[which] = place_at(memory, *bytes - begin);
    fits = fits && dc__linalg_add(bytes, layer->groups * layer->factors[which].order, sizeof(float));
  }
  s->sums = place_at(memory, *bytes - begin);
  fits = fits && dc__linalg_add(bytes, s->rows, sizeof(double));
  s->place = place_at(memory, *bytes - begin);
  return fits && dc__kron_add_place(l, &s->x, bytes);
}

static bool room(const dc_linalg *l, const dc__kfac_layer *layer, size_t *bytes) {
  scene s;
  return lay_out(l, layer, NULL, &s, bytes);
}

/* The eigenvalues that divide, and what is added to their products. */
static double damp(dc_linalg *l, const dc__kfac_direction *d, const scene *s, const float *values[DC__FACTORS]) {
  const dc__cuda_shift_args args = {.values_a = d->values[DC__FACTOR_A],
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
    dc__cuda_shift(stream_of(l), &args);
  }
  return d->factored ? 0 : d->damping;
}

static void load(const dc_linalg *l, const dc__kfac_direction *d, const scene *s) {
  float *x = s->x.data;
  if (d->weight == NULL || (d->bias == NULL && s->in < s->a)) {
    dc__stream_zero(stream_of(l), x, (size_t)(s->rows * s->a) * sizeof *x);
  }
  if (d->weight != NULL) {
    copy(l, view_of(d->weight, s->rows, s->in, s->in, 1), view_of(x, s->rows, s->in, s->a, 1));
  }
  if (d->bias != NULL) {
    copy(l, view_of(d->bias, s->rows, 1, 1, 1), view_of(x + s->in, s->rows, 1, s->a, 1));
  }
}

static dc_status direct(dc_linalg *l, const dc__kfac_direction *d) {
  const float *values[DC__FACTORS];
  scene s;
  size_t bytes = 0;
  (void)lay_out(l, d->layer, d->memory, &s, &bytes);
  const dc__mat qa = dense(d->vectors[DC__FACTOR_A], d->layer->groups, s.a, s.a);
  const dc__mat qg = dense(d->vectors[DC__FACTOR_G], d->layer->groups, s.g, s.g);
  const dc__cuda_direct_args out = {s.x.data, d->weight, d->bias, s.sums, s.rows, s.a, s.in};
  const dc__cuda_totals_args total = {s.sums, &d->found->product, 1, s.rows, 1, 1, 1};
  const double damping = damp(l, d, &s, values);
  load(l, d, &s);
  dc__kron_divide(l, &qg, values[DC__FACTOR_G], &qa, values[DC__FACTOR_A], damping, &s.x, &s.x, s.place,
                  &d->found->refused);
  dc__cuda_direct(stream_of(l), &out);
  dc__cuda_totals(stream_of(l), &total);
  return DC_OK;
}

static dc_status explain(dc_linalg *l, const dc__kfac_direction *d) {
  const float *values[DC__FACTORS];
  dc_status status = DC_OK;
  scene s;
  size_t bytes = 0;
  (void)lay_out(l, d->layer, d->memory, &s, &bytes);
  const double damping = damp(l, d, &s, values);
  for (int64_t i = 0; i < d->layer->groups && status == DC_OK; i++) {
    status = dc__kron_check(l, d->fn, values[DC__FACTOR_G] + i * s.g, values[DC__FACTOR_A] + i * s.a, damping, &s.x);
  }
  return status;
}

const dc__kfac_work dc__kfac_there = {.scan = dc__kfac_scan_there,
                                      .gather = dc__kfac_gather_there,
                                      .pack = pack,
                                      .average = average,
                                      .commit = commit,
                                      .undo = undo,
                                      .rectify = rectify,
                                      .room = room,
                                      .direct = direct,
                                      .explain = explain};
