/* Gradients per sample on a device: memory, sums over positions, norms and embeddings. Products are the neighbour's. */
#include "linalg/sample_there.h"

typedef dc__sample_there way;

enum { FLIGHT_PAIRS = 1 << 15 }; /* of one batched product */

/* ---- memory: laid out twice, to count it and to place it ---- */

static bool is_pair(const dc__sample *s) {
  return !dc__is_embedding(s->layer.kind) && !dc__is_norm(s->layer.kind);
}

/* As many samples as fit into a flight, at least one. */
static int64_t flight_of(const way *w, const dc__pair_needs *needs) {
  const double size = (double)dc_dtype_size(w->s->dtype);
  const double bytes = ((double)needs->patches + (double)needs->own) * size + (double)needs->sums * sizeof(double);
  const double fits = bytes > 0 ? DC__FLIGHT_BYTES / bytes : FLIGHT_PAIRS;
  int64_t most = FLIGHT_PAIRS / w->groups;
  most = (double)most < fits ? most : (int64_t)fits;
  most = most < w->s->samples ? most : w->s->samples;
  return most > 0 ? most : 1;
}

static void place_pairs(way *w, dc__layout *to) {
  const size_t size = dc_dtype_size(w->s->dtype);
  dc__pair_needs needs = {0};
  to->fits = to->fits && dc__pair_needs_there(w, &needs);
  w->most = flight_of(w, &needs);
  to->fits = to->fits && dc__linalg_add_product(&to->bytes, w->l);
  if (to->memory != NULL) {
    size_t offset = 0; /* the product's is first */
    w->product = dc__linalg_product(w->l, to->memory, &offset);
  }
  w->patches = dc__layout_take(to, true, w->most, needs.patches, size);
  w->own = dc__layout_take(to, true, w->most, needs.own, size);
  w->sums = dc__layout_take(to, true, w->most, needs.sums, sizeof(double));
}

static void place(way *w, dc__layout *to) {
  const dc__sample *s = w->s;
  const bool norm = dc__is_norm(s->layer.kind);
  const bool embedding = dc__is_embedding(s->layer.kind);
  const bool squares = w->call->use == DC__SAMPLE_SQUARES;
  const bool weight = w->call->weight;
  if (weight && is_pair(s)) {
    place_pairs(w, to);
  }
  const int64_t rows = s->layer.kind == DC_SAMPLE_GROUP_NORM ? s->layer.groups : s->positions;
  w->mean = dc__layout_take(to, norm && weight, s->samples, rows, sizeof(double));
  w->rate = dc__layout_take(to, norm && weight, s->samples, rows, sizeof(double));
  w->weights = dc__layout_take(to, norm && weight, s->samples, s->out, sizeof(double));
  w->biases = dc__layout_take(to, w->call->bias, s->samples, s->out, sizeof(double));
  w->width = (weight ? w->groups : 0) + (w->call->bias ? 1 : 0);
  w->parts = dc__layout_take(to, squares, s->samples, w->width, sizeof(double));
  w->shares = dc__layout_take(to, embedding, s->samples, 1, sizeof(double));
  w->places = dc__layout_take(to, embedding && squares, s->samples, s->positions, sizeof(int64_t));
}

/* ---- sums over positions ---- */

static void make_statistics(const way *w) {
  const dc__sample *s = w->s;
  const bool channels = s->layer.kind == DC_SAMPLE_GROUP_NORM;
  dc__cuda_statistics_args args = {.x = s->x, .mean = w->mean, .rate = w->rate, .eps = s->layer.eps};
  args.rows = s->samples * (channels ? s->layer.groups : s->positions);
  args.width = channels ? s->in / s->layer.groups * s->positions : s->in;
  args.centred = s->layer.kind != DC_SAMPLE_RMS_NORM;
  args.wide = s->dtype == DC_FLOAT64;
  dc__cuda_statistics(w->stream, &args);
}

/* A norm's weight, or a bias. */
static void make_columns(const way *w, bool weight) {
  const dc__sample *s = w->s;
  dc__cuda_columns_args args = {.delta = s->delta, .samples = s->samples, .positions = s->positions, .columns = s->out};
  args.sums = weight ? w->weights : w->biases;
  if (weight) {
    args.x = s->x;
    args.mean = w->mean;
    args.rate = w->rate;
  }
  args.by_rows = s->layer.kind == DC_SAMPLE_GROUP_NORM || s->layer.kind == DC_SAMPLE_CONV;
  args.group = s->layer.kind == DC_SAMPLE_GROUP_NORM ? s->in / s->layer.groups : 1;
  args.wide = s->dtype == DC_FLOAT64;
  if (s->positions > 0) {
    dc__cuda_columns(w->stream, &args);
  } else {
    dc__stream_zero(w->stream, args.sums, (size_t)(s->samples * s->out) * sizeof(double));
  }
}

/* What was made of one part becomes what was asked for; `at` is its place among a sample's squares. */
static void finish_columns(const way *w, double *columns, int64_t at, void *out) {
  const dc__sample *s = w->s;
  const bool wide = s->dtype == DC_FLOAT64;
  if (w->call->use == DC__SAMPLE_SQUARES) {
    const dc__cuda_dots_args args = {columns, columns, w->parts + at, s->samples, s->out, w->width, true};
    dc__cuda_dots(w->stream, &args);
  } else if (w->call->use == DC__SAMPLE_SUM) {
    const dc__cuda_weigh_args args = {columns, w->call->factors, out, s->samples, s->out, w->call->accumulate, wide};
    dc__cuda_weigh(w->stream, &args);
  } else {
    dc__cuda_cast(w->stream, out, s->dtype, columns, DC_FLOAT64, s->samples * s->out);
  }
}

/* ---- embeddings ---- */

static void run_embedding(const way *w) {
  const dc__sample *s = w->s;
  const int64_t tables = w->call->use == DC__SAMPLE_SUM ? 1 : s->samples;
  dc__cuda_indices of = {.ids = s->x, .delta = s->delta, .samples = s->samples, .positions = s->positions};
  of.rows = s->in;
  of.columns = s->out;
  of.padding = s->layer.padding_row - 1;
  of.long_ids = s->x_dtype == DC_INT64;
  of.bag = dc__is_bag(s->layer.kind);
  of.wide = s->dtype == DC_FLOAT64;
  dc__cuda_shares_args shares = {.of = of, .factors = w->call->factors, .shares = w->shares};
  shares.mean = s->layer.kind == DC_SAMPLE_BAG_MEAN;
  if (s->positions > 0) {
    dc__cuda_shares(w->stream, &shares);
  }
  of.shares = w->shares;
  if (w->call->use == DC__SAMPLE_SQUARES) {
    const dc__cuda_rows_squared_args args = {of, w->places, w->parts};
    dc__cuda_rows_squared(w->stream, &args);
    return;
  }
  const dc__cuda_scatter_args args = {of, w->call->to_weight, w->call->use != DC__SAMPLE_SUM};
  if (!w->call->accumulate) {
    dc__stream_zero(w->stream, w->call->to_weight, (size_t)(tables * s->in * s->out) * dc_dtype_size(s->dtype));
  }
  dc__cuda_scatter(w->stream, &args);
}

/* ---- all kinds ---- */

static void run_pairs(const way *w) {
  if (w->call->use == DC__SAMPLE_SQUARES) {
    dc__pair_squares_there(w);
  } else if (w->call->use == DC__SAMPLE_SUM) {
    dc__pair_sum_there(w);
  } else {
    dc__pair_grads_there(w);
  }
}

static void run(const way *w) {
  const dc__sample *s = w->s;
  if (w->call->use == DC__SAMPLE_SQUARES) { /* what is empty has no gradient */
    dc__stream_zero(w->stream, w->parts, (size_t)(s->samples * w->width) * sizeof(double));
  }
  if (w->call->weight && dc__is_embedding(s->layer.kind)) {
    run_embedding(w);
  } else if (w->call->weight && is_pair(s)) {
    run_pairs(w);
  } else if (w->call->weight) {
    make_statistics(w);
    make_columns(w, true);
    finish_columns(w, w->weights, 0, w->call->to_weight);
  }
  if (w->call->bias) {
    make_columns(w, false);
    finish_columns(w, w->biases, w->width - 1, w->call->to_bias);
  }
  if (w->call->use == DC__SAMPLE_SQUARES) {
    const bool wide = s->dtype == DC_FLOAT64;
    const dc__cuda_squares_args args = {w->parts, w->call->squares, s->samples, w->width, w->call->accumulate, wide};
    dc__cuda_squares(w->stream, &args);
  }
}

dc_status dc__sample_there_run(dc_linalg *l, const dc__sample *s, const dc__sample_call *call) {
  way w = {.l = l, .s = s, .call = call, .stream = l->device->here, .groups = 1, .in = s->in, .out = s->out};
  dc__layout to = {.fits = true};
  void *memory;
  if (s->layer.kind == DC_SAMPLE_CONV) {
    const int64_t *k = s->layer.kernel;
    w.groups = s->layer.groups;
    w.in = s->in / w.groups * k[0] * k[1] * k[2];
    w.out = s->out / w.groups;
  }
  place(&w, &to);
  if (!to.fits) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold what a sample needs", s->fn);
  }
  DC__TRY(dc__linalg_scratch(l, s->fn, to.bytes, &memory));
  if (memory == NULL || (s->samples == 0 && call->use != DC__SAMPLE_SUM)) {
    return DC_OK;
  }
  to = (dc__layout){.memory = memory, .fits = true};
  place(&w, &to);
  run(&w);
  return dc__linalg_done(l);
}
