/* What a block's work is made of, on a device with memory of its own: products and kernels, queued on the device's own
 * stream. Lengths stay there, so nothing is waited for. */
#include "optim/blocked.h"

static dc_stream *stream_of(const dc__block_place *place) {
  return place->there->device->here;
}

static void multiply(const dc__block_place *place, const dc__gemm *g) {
  dc__linalg_gemm(place->there, g, place->product);
}

static void square(const dc__block_place *place, bool trans, int64_t n, int64_t k, const float *a, double add,
                   double keep, float *c) {
  const dc__gemm g = dc__syrk_product(trans, n, k, a, add, keep, c);
  multiply(place, &g);
}

static dc__cuda_matrices dense(const float *data, int64_t rows, int64_t cols) {
  dc__cuda_matrices m = {.data = (void *)(uintptr_t)data, .row_stride = cols, .col_stride = 1, .count = 1};
  m.rows = rows;
  m.cols = cols;
  return m;
}

static void turn(const dc__block_place *place, const float *from, int64_t rows, int64_t cols, float *to) {
  dc__cuda_load_args args = {.from = dense(from, cols, rows), .to = dense(to, cols, rows), .mask = 1, .factor = {1}};
  args.from.row_stride = 1;
  args.from.col_stride = cols;
  dc__cuda_load(stream_of(place), &args);
}

static void copy(const dc__block_place *place, float *to, const float *from, int64_t count) {
  dc__stream_copy(stream_of(place), to, from, (size_t)count * sizeof *to);
}

static void scale(const dc__block_place *place, float *a, int64_t n, float factor) {
  const dc__cuda_affine_args args = {.from = a, .to = a, .rows = n, .cols = n, .count = 1, .factor = {(double)factor}};
  dc__cuda_affine(stream_of(place), &args);
}

/* ---- Shampoo's ---- */

static dc__cuda_graft_args args_of(const dc__graft *g) {
  return (dc__cuda_graft_args){.data = g->data,
                               .exp_avg = g->exp_avg,
                               .squares = g->squares,
                               .momentum = g->momentum,
                               .to = g->data,
                               .count = g->count,
                               .factors = g->factors};
}

static void graft_learn(const dc__block_place *place, const dc__graft *g) {
  const dc__cuda_graft_args args = args_of(g);
  dc__cuda_graft_learn(stream_of(place), &args);
}

static void graft_take(const dc__block_place *place, const dc__graft *g) {
  const dc__cuda_graft_args args = args_of(g);
  dc__cuda_graft_take(stream_of(place), &args);
}

/* The square of x's length, to a report. */
static void fold(const dc__block_place *place, const dc__graft *g, const float *x, int32_t report) {
  const dc__cuda_fold_args args = {.from = dense(x, g->rows, g->count / g->rows),
                                   .sums = place->sums,
                                   .reports = place->lengths + report,
                                   .squares = 1};
  dc__cuda_fold(stream_of(place), &args);
}

static void graft_measure(dc__block_place *place, const dc__graft *g) {
  dc__cuda_graft_args args = args_of(g);
  args.to = place->temp;
  dc__cuda_graft_take(stream_of(place), &args);
  fold(place, g, args.to, 0);
}

static void graft_finish(const dc__block_place *place, const dc__graft *g, bool scaled) {
  dc__cuda_graft_args args = args_of(g);
  if (scaled) {
    fold(place, g, g->data, 1);
    args.lengths = place->lengths;
  }
  dc__cuda_graft_finish(stream_of(place), &args);
}

/* ---- SOAP's ---- */

static void adam(const dc__block_place *place, const dc__block *b, const dc__adamw_factors *factors) {
  dc__update_batch batch = {.spans_used = 1, .grad_scale = 1};
  dc__update_span *span = &batch.spans[0];
  span->weight = place->temp;
  span->grad = b->data;
  span->state[0] = b->exp_avg;
  span->state[1] = b->squares;
  span->count = b->count;
  span->dtype = span->grad_dtype = DC_FLOAT32;
  span->factors.adamw = *factors;
  dc__stream_zero(stream_of(place), place->temp, (size_t)b->count * sizeof *place->temp);
  dc__update_there(stream_of(place), DC__UPDATE_ADAMW, &batch);
  copy(place, b->data, place->temp, b->count);
}

/* The order is the host's, and stays until the next refresh. */
static void sort(const dc__block_place *place, const dc__side *side, int64_t inner, float *x, int64_t count) {
  const dc__cuda_sort_args args = {
      .x = x, .to = place->temp, .order = place->order, .n = side->n, .inner = inner, .count = count};
  dc__stream_copy(stream_of(place), place->order, side->order, (size_t)side->n * sizeof *side->order);
  dc__cuda_sort(stream_of(place), &args);
  copy(place, x, place->temp, count);
}

const dc__block_work dc__block_there = {.square = square,
                                        .multiply = multiply,
                                        .turn = turn,
                                        .copy = copy,
                                        .scale = scale,
                                        .graft_learn = graft_learn,
                                        .graft_take = graft_take,
                                        .graft_measure = graft_measure,
                                        .graft_finish = graft_finish,
                                        .adam = adam,
                                        .sort = sort};

/* ---- places ---- */

_Static_assert(sizeof(double) == sizeof(int64_t), "a place has either for a row");

bool dc__block_there_add(size_t *total, const dc_linalg *l, int64_t elements, int64_t rows) {
  return dc__linalg_add_product(total, l) && dc__linalg_add(total, elements, 2 * sizeof(float)) &&
         dc__linalg_add(total, rows, sizeof(double)) && dc__linalg_add(total, 2, sizeof(dc__cuda_report));
}

dc__block_place dc__block_there_place(dc_linalg *l, void *memory, int64_t elements, int64_t rows) {
  dc__block_place place = {.work = &dc__block_there, .there = l};
  size_t offset = 0;
  place.product = dc__linalg_product(l, memory, &offset);
  place.temp = dc__linalg_part(memory, &offset, elements, 2 * sizeof(float));
  void *of_rows = dc__linalg_part(memory, &offset, rows, sizeof(double));
  place.sums = of_rows;
  place.order = of_rows;
  place.lengths = dc__linalg_part(memory, &offset, 2, sizeof(dc__cuda_report));
  return place;
}
