/* Per-sample gradients on a device: memory, sums over positions, norms and embeddings. Products are in
 * per_sample_linear_cuda.c. */
#include "linalg/per_sample/per_sample_cuda.h"

typedef dc__per_sample_cuda per_sample_cuda;

enum { SLICE_PAIRS = 1 << 15 }; /* pairs in one batched product */

/* ---- memory: laid out twice, to count it and to assign it ---- */

static bool is_linear_or_conv(const dc__per_sample *s) {
  return !dc__is_embedding(s->layer.kind) && !dc__is_norm_layer(s->layer.kind);
}

/* Returns the number of samples in a slice: as many as fit, but at least one. */
static int64_t slice_samples(const per_sample_cuda *w, const dc__per_sample_linear_sizes *needs) {
  const double size = (double)dc_dtype_size(w->s->dtype);
  const double bytes = ((double)needs->patches + (double)needs->own) * size + (double)needs->sums * sizeof(double);
  const double fits = bytes > 0 ? DC__BATCH_SLICE_BYTES / bytes : SLICE_PAIRS;
  int64_t max_samples = SLICE_PAIRS / w->groups;
  max_samples = (double)max_samples < fits ? max_samples : (int64_t)fits;
  max_samples = max_samples < w->s->samples ? max_samples : w->s->samples;
  return max_samples > 0 ? max_samples : 1;
}

static void layout_linear(per_sample_cuda *w, dc__scratch_layout *to) {
  const size_t size = dc_dtype_size(w->s->dtype);
  dc__per_sample_linear_sizes needs = {0};
  to->fits = to->fits && dc__per_sample_linear_sizes_cuda(w, &needs);
  w->max_samples = slice_samples(w, &needs);
  to->fits = to->fits && dc__linalg_add_gemm_workspace(&to->bytes, w->l);
  if (to->memory != NULL) {
    size_t offset = 0; /* the product's workspace is first */
    w->product = dc__linalg_gemm_workspace(w->l, to->memory, &offset);
  }
  w->patches = dc__scratch_layout_alloc(to, true, w->max_samples, needs.patches, size);
  w->own = dc__scratch_layout_alloc(to, true, w->max_samples, needs.own, size);
  w->sums = dc__scratch_layout_alloc(to, true, w->max_samples, needs.sums, sizeof(double));
}

static void layout_call(per_sample_cuda *w, dc__scratch_layout *to) {
  const dc__per_sample *s = w->s;
  const bool norm = dc__is_norm_layer(s->layer.kind);
  const bool embedding = dc__is_embedding(s->layer.kind);
  const bool squares = w->call->op == DC__PER_SAMPLE_NORMS;
  const bool weight = w->call->weight;
  if (weight && is_linear_or_conv(s)) {
    layout_linear(w, to);
  }
  const int64_t rows = s->layer.kind == DC_SAMPLE_GROUP_NORM ? s->layer.groups : s->positions;
  w->mean = dc__scratch_layout_alloc(to, norm && weight, s->samples, rows, sizeof(double));
  w->rstd = dc__scratch_layout_alloc(to, norm && weight, s->samples, rows, sizeof(double));
  w->weights = dc__scratch_layout_alloc(to, norm && weight, s->samples, s->out, sizeof(double));
  w->biases = dc__scratch_layout_alloc(to, w->call->bias, s->samples, s->out, sizeof(double));
  w->width = (weight ? w->groups : 0) + (w->call->bias ? 1 : 0);
  w->parts = dc__scratch_layout_alloc(to, squares, s->samples, w->width, sizeof(double));
  w->sample_weights = dc__scratch_layout_alloc(to, embedding, s->samples, 1, sizeof(double));
  w->sorted = dc__scratch_layout_alloc(to, embedding && squares, s->samples, s->positions, sizeof(int64_t));
}

/* ---- sums over positions ---- */

static void queue_statistics(const per_sample_cuda *w) {
  const dc__per_sample *s = w->s;
  const bool channels = s->layer.kind == DC_SAMPLE_GROUP_NORM;
  dc__cuda_statistics_args args = {.x = s->x, .mean = w->mean, .rstd = w->rstd, .eps = s->layer.eps};
  args.rows = s->samples * (channels ? s->layer.groups : s->positions);
  args.width = channels ? s->in / s->layer.groups * s->positions : s->in;
  args.centred = s->layer.kind != DC_SAMPLE_RMS_NORM;
  args.wide = s->dtype == DC_FLOAT64;
  dc__cuda_statistics(w->stream, &args);
}

/* Queues the gradients of a norm layer's weight, or of any layer's bias. */
static void queue_columns(const per_sample_cuda *w, bool weight) {
  const dc__per_sample *s = w->s;
  dc__cuda_columns_args args = {.delta = s->delta, .samples = s->samples, .positions = s->positions, .columns = s->out};
  args.sums = weight ? w->weights : w->biases;
  if (weight) {
    args.x = s->x;
    args.mean = w->mean;
    args.rstd = w->rstd;
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

/* Converts the result of one part to the requested output; `at` is its column among a sample's squares. */
static void store_columns(const per_sample_cuda *w, double *columns, int64_t at, void *out) {
  const dc__per_sample *s = w->s;
  const bool wide = s->dtype == DC_FLOAT64;
  if (w->call->op == DC__PER_SAMPLE_NORMS) {
    const dc__cuda_dots_args args = {.a = columns,
                                     .b = columns,
                                     .sums = w->parts + at,
                                     .rows = s->samples,
                                     .columns = s->out,
                                     .step = w->width,
                                     .wide = true};
    dc__cuda_dots(w->stream, &args);
  } else if (w->call->op == DC__PER_SAMPLE_SUM) {
    const dc__cuda_weighted_sum_args args = {.columns = columns,
                                             .factors = w->call->factors,
                                             .out = out,
                                             .samples = s->samples,
                                             .count = s->out,
                                             .accumulate = w->call->accumulate,
                                             .wide = wide};
    dc__cuda_weighted_sum(w->stream, &args);
  } else {
    dc__cuda_cast(w->stream, out, s->dtype, columns, DC_FLOAT64, s->samples * s->out);
  }
}

/* ---- embeddings ---- */

static void run_embedding_cuda(const per_sample_cuda *w) {
  const dc__per_sample *s = w->s;
  const int64_t tables = w->call->op == DC__PER_SAMPLE_SUM ? 1 : s->samples;
  dc__cuda_indices indices = {.ids = s->x, .delta = s->delta, .samples = s->samples, .positions = s->positions};
  indices.rows = s->in;
  indices.columns = s->out;
  indices.padding = s->layer.has_padding_row == 1 ? s->layer.padding_row : -1;
  indices.wide_ids = s->x_dtype == DC_INT64;
  indices.bag = dc__is_embedding_bag(s->layer.kind);
  indices.wide = s->dtype == DC_FLOAT64;
  dc__cuda_sample_weights_args shares = {
      .indices = indices, .factors = w->call->factors, .sample_weights = w->sample_weights};
  shares.mean = s->layer.kind == DC_SAMPLE_BAG_MEAN;
  if (s->positions > 0) {
    dc__cuda_sample_weights(w->stream, &shares);
  }
  indices.sample_weights = w->sample_weights;
  if (w->call->op == DC__PER_SAMPLE_NORMS) {
    const dc__cuda_rows_squared_args args = {indices, w->sorted, w->parts};
    dc__cuda_rows_squared(w->stream, &args);
    return;
  }
  const dc__cuda_scatter_args args = {indices, w->call->to_weight, w->call->op != DC__PER_SAMPLE_SUM};
  if (!w->call->accumulate) {
    dc__stream_zero(w->stream, w->call->to_weight, (size_t)(tables * s->in * s->out) * dc_dtype_size(s->dtype));
  }
  dc__cuda_scatter(w->stream, &args);
}

/* ---- all layer types ---- */

static void run_linear_cuda(const per_sample_cuda *w) {
  if (w->call->op == DC__PER_SAMPLE_NORMS) {
    dc__per_sample_linear_norms_cuda(w);
  } else if (w->call->op == DC__PER_SAMPLE_SUM) {
    dc__per_sample_linear_sum_cuda(w);
  } else {
    dc__per_sample_linear_grads_cuda(w);
  }
}

static void run_call(const per_sample_cuda *w) {
  const dc__per_sample *s = w->s;
  if (w->call->op == DC__PER_SAMPLE_NORMS) { /* an empty part adds nothing */
    dc__stream_zero(w->stream, w->parts, (size_t)(s->samples * w->width) * sizeof(double));
  }
  if (w->call->weight && dc__is_embedding(s->layer.kind)) {
    run_embedding_cuda(w);
  } else if (w->call->weight && is_linear_or_conv(s)) {
    run_linear_cuda(w);
  } else if (w->call->weight) {
    queue_statistics(w);
    queue_columns(w, true);
    store_columns(w, w->weights, 0, w->call->to_weight);
  }
  if (w->call->bias) {
    queue_columns(w, false);
    store_columns(w, w->biases, w->width - 1, w->call->to_bias);
  }
  if (w->call->op == DC__PER_SAMPLE_NORMS) {
    const bool wide = s->dtype == DC_FLOAT64;
    const dc__cuda_squares_args args = {.parts = w->parts,
                                        .squares = w->call->squares,
                                        .samples = s->samples,
                                        .width = w->width,
                                        .accumulate = w->call->accumulate,
                                        .wide = wide};
    dc__cuda_squares(w->stream, &args);
  }
}

dc_status dc__per_sample_run_cuda(dc_linalg *l, const dc__per_sample *s, const dc__per_sample_call *call) {
  per_sample_cuda w = {
      .l = l, .s = s, .call = call, .stream = l->device->internal_stream, .groups = 1, .in = s->in, .out = s->out};
  dc__scratch_layout to = {.fits = true};
  void *memory;
  if (s->layer.kind == DC_SAMPLE_CONV) {
    const int64_t *k = s->layer.kernel;
    w.groups = s->layer.groups;
    w.in = s->in / w.groups * k[0] * k[1] * k[2];
    w.out = s->out / w.groups;
  }
  layout_call(&w, &to);
  if (!to.fits) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold what a sample needs", s->fn);
  }
  DC__TRY(dc__linalg_scratch(l, s->fn, to.bytes, &memory));
  if (memory == NULL || (s->samples == 0 && call->op != DC__PER_SAMPLE_SUM)) {
    return DC_OK;
  }
  to = (dc__scratch_layout){.memory = memory, .fits = true};
  layout_call(&w, &to);
  run_call(&w);
  return dc__linalg_synchronize(l);
}
