/* What a block's work is made of, on a device with memory of its own: products and kernels, queued on the
 * stream of the step. Lengths stay there, so nothing is waited for. */
#include "optim/blocked.h"

static dc_stream *stream_of(const dc__block_place *place) {
  return place->there->on;
}

/* Of all blocks that go together, whose matrices follow each other in steps of a kin. That many others are there does
 * not change the bits. */
static void multiply(const dc__block_place *place, const dc__gemm *g) {
  dc__gemm all = *g;
  all.batch = place->count;
  all.alike = true;
  all.stride_a = dc__kin_stride(g->m * g->k);
  all.stride_b = dc__kin_stride(g->k * g->n);
  all.stride_c = dc__kin_stride(g->m * g->n);
  dc__linalg_gemm(place->there, &all, place->product);
}

static void square(const dc__block_place *place, bool trans, int64_t n, int64_t k, const float *a, double add,
                   double keep, float *c) {
  const dc__gemm g = dc__syrk_product(trans, n, k, a, add, keep, c);
  multiply(place, &g);
}

static dc__cuda_matrices dense(const dc__block_place *place, const float *data, int64_t rows, int64_t cols) {
  dc__cuda_matrices m = {.data = (void *)(uintptr_t)data, .row_stride = cols, .col_stride = 1, .count = place->count};
  m.rows = rows;
  m.cols = cols;
  m.batch_stride = dc__kin_stride(rows * cols);
  return m;
}

static void turn(const dc__block_place *place, const float *from, int64_t rows, int64_t cols, float *to) {
  dc__cuda_matrices turned = dense(place, from, cols, rows);
  turned.row_stride = 1;
  turned.col_stride = cols;
  dc__cuda_load_alike(stream_of(place), turned, dense(place, to, cols, rows), UINT32_MAX, 1);
}

static void copy(const dc__block_place *place, float *to, const float *from, int64_t count) {
  const int64_t all = (place->count - 1) * dc__kin_stride(count) + count;
  dc__stream_copy(stream_of(place), to, from, (size_t)all * sizeof *to);
}

static void scale(const dc__block_place *place, const dc__block *b, int32_t d, float factor) {
  const dc__side *side = &b->sides[d];
  const dc__cuda_matrices a = dense(place, side->matrix, side->n, side->n);
  uint32_t good = 0;
  for (int32_t i = 0; i < place->count; i++) {
    good |= (uint32_t)(place->blocks[i]->sides[d].info.status == DC_OK) << i;
  }
  dc__cuda_load_alike(stream_of(place), a, a, good, (double)factor);
}

/* ---- Shampoo's ---- */

static dc__cuda_graft_args args_of(const dc__block_place *place, const dc__graft *g) {
  return (dc__cuda_graft_args){.data = g->data,
                               .exp_avg = g->exp_avg,
                               .squares = g->squares,
                               .momentum = g->momentum,
                               .to = g->data,
                               .found = place->found,
                               .count = g->count,
                               .stride = dc__kin_stride(g->count),
                               .together = place->count,
                               .factors = g->factors};
}

static void graft_learn(const dc__block_place *place, const dc__graft *g) {
  const dc__cuda_graft_args args = args_of(place, g);
  dc__cuda_graft_learn(stream_of(place), &args);
}

static void graft_take(const dc__block_place *place, const dc__graft *g) {
  const dc__cuda_graft_args args = args_of(place, g);
  dc__cuda_graft_take(stream_of(place), &args);
}

/* The squares of the lengths of x, to the first reports or the second ones. */
static void fold(const dc__block_place *place, const dc__graft *g, const float *x, int32_t which) {
  const dc__cuda_fold_args args = {.from = dense(place, x, g->rows, g->count / g->rows),
                                   .sums = place->sums,
                                   .reports = place->lengths + which * place->count,
                                   .squares = 1};
  dc__cuda_fold(stream_of(place), &args);
}

static void graft_measure(dc__block_place *place, const dc__graft *g) {
  dc__cuda_graft_args args = args_of(place, g);
  args.to = place->temp;
  dc__cuda_graft_take(stream_of(place), &args);
  fold(place, g, args.to, 0);
}

static void graft_finish(const dc__block_place *place, const dc__graft *g, bool scaled) {
  dc__cuda_graft_args args = args_of(place, g);
  if (scaled) {
    fold(place, g, g->data, 1);
    args.lengths = place->lengths;
  }
  dc__cuda_graft_finish(stream_of(place), &args);
}

/* ---- SOAP's ---- */

static void adam(const dc__block_place *place, const dc__block *b, const dc__adamw_factors *factors) {
  const int64_t step = dc__kin_stride(b->count);
  dc__update_batch batch = {.grad_scale = 1};
  dc__stream_zero(stream_of(place), place->temp, (size_t)(place->count * step) * sizeof *place->temp);
  for (int32_t i = 0; i < place->count; i++) {
    batch.spans[batch.spans_used++] = (dc__update_span){.weight = place->temp + i * step,
                                                        .grad = b->data + i * step,
                                                        .state = {b->exp_avg + i * step, b->squares + i * step},
                                                        .count = b->count,
                                                        .dtype = DC_FLOAT32,
                                                        .grad_dtype = DC_FLOAT32,
                                                        .factors = {.adamw = *factors}};
    if (batch.spans_used == DC__UPDATE_SPANS || i == place->count - 1) {
      dc__update_there(stream_of(place), DC__UPDATE_ADAMW, &batch);
      batch.spans_used = 0;
    }
  }
  copy(place, b->data, place->temp, b->count);
}

/* Whether an order is another one is for the device to know. */
static void sort(const dc__block_place *place, const dc__block *b, int32_t d, int64_t inner) {
  dc__cuda_sort_args args = {.x = b->squares, .to = place->temp, .n = b->sides[d].n, .inner = inner, .count = b->count};
  args.stride = dc__kin_stride(b->count);
  args.together = place->count;
  for (int32_t i = 0; i < place->count; i++) {
    args.orders[i] = place->blocks[i]->sides[d].order;
  }
  dc__cuda_sort(stream_of(place), &args);
  copy(place, b->squares, place->temp, b->count);
}

/* ---- Muon's ---- */

static void polar(const dc__block_place *place, const dc__block *b, const dc__polar *p) {
  dc__polar all = *p;
  all.x = b->data;
  all.stride = dc__kin_stride(b->count);
  all.count = place->count;
  dc__polar_there(place->there, &all, place->temp, place->product, place->sums, place->lengths);
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
                                        .sort = sort,
                                        .polar = polar};

/* ---- places ---- */

bool dc__block_there_add(size_t *total, const dc_linalg *l, int64_t elements, int32_t temps, int64_t rows) {
  return dc__linalg_add_product(total, l) && dc__linalg_add(total, elements, (size_t)(temps + 1) * sizeof(float)) &&
         dc__linalg_add(total, rows, sizeof(double)) &&
         dc__linalg_add(total, 2 * DC__CUDA_FLIGHT, sizeof(dc__cuda_report));
}

dc__block_place dc__block_there_place(dc_linalg *l, void *memory, int64_t elements, int32_t temps, int64_t rows) {
  dc__block_place place = {.work = &dc__block_there, .there = l};
  size_t offset = 0;
  place.product = dc__linalg_product(l, memory, &offset);
  place.temp = dc__linalg_part(memory, &offset, elements, (size_t)(temps + 1) * sizeof(float));
  place.half = elements;
  place.stack = place.temp + temps * elements;
  place.sums = dc__linalg_part(memory, &offset, rows, sizeof(double));
  place.lengths = dc__linalg_part(memory, &offset, 2 * DC__CUDA_FLIGHT, sizeof(dc__cuda_report));
  return place;
}
