/* K-FAC: parameters of a layer step along the gradient times the layer's damped inverse curvature, all others along
 * the gradient. Both have SGD's momentum and weight decay. Each layer has one owner, which alone keeps its factors
 * and computes its direction. */
#include <math.h>

#include "optim/kfac/kfac_internal.h"

static const char *kfac_fixed_option_changed(const void *options, const void *old) {
  const dc_kfac_options *a = options;
  const dc_kfac_options *b = old;
  return (a->momentum == 0) != (b->momentum == 0) ? "whether there is momentum" : NULL;
}

/* ---- layers ---- */

static dc_status bad_param(const char *fn, const char *arg, int64_t index, dc_status status, const char *why) {
  return dc__fail(status, "%s: %s = %" PRId64 ", %s", fn, arg, index, why);
}

static dc_status check_param(const dc__kfac *k, const char *fn, const char *arg, int64_t index) {
  if (index < 0 || index >= k->head.count) {
    return bad_param(fn, arg, index, DC_E_NOT_FOUND, "there is no such parameter");
  }
  for (int64_t i = 0; i < k->layer_count; i++) {
    if (k->layers[i].weight == index || k->layers[i].bias == index) {
      return bad_param(fn, arg, index, DC_E_EXISTS, "that parameter has a layer already");
    }
  }
  return DC_OK;
}

/* Checks the layer's constants against the shapes of its parameters. */
static dc_status check_shapes(const dc__kfac *k, const char *fn, const dc__kfac_layer *layer) {
  const dc__optim_param *w = &k->head.params[layer->weight];
  bool conv = layer->layer.kind == DC_SAMPLE_CONV;
  if (conv ? w->ndim < 3 || w->ndim > 5 : w->ndim != 2) {
    return dc__fail(DC_E_SHAPE, "%s: the weight has %" PRId32 " dimension%s, must have %s", fn, w->ndim,
                    DC__PLURAL_S(w->ndim), conv ? "3 to 5" : "2");
  }
  if (w->numel == 0) {
    return dc__fail(DC_E_SHAPE, "%s: the weight is empty", fn);
  }
  if (layer->groups < 1 || w->shape[0] % layer->groups != 0) {
    return dc__fail(DC_E_INVALID,
                    "%s: layer.groups = %" PRId32 ", must be a divisor of the %" PRId64 " output channel%s", fn,
                    layer->groups, w->shape[0], DC__PLURAL_S(w->shape[0]));
  }
  for (int32_t i = 2; i < w->ndim; i++) {
    if (layer->layer.kernel[i - 2] != w->shape[i]) {
      return dc__fail(DC_E_SHAPE, "%s: layer.kernel[%" PRId32 "] = %" PRId64 ", the weight has %" PRId64, fn, i - 2,
                      layer->layer.kernel[i - 2], w->shape[i]);
    }
  }
  if (layer->bias >= 0) {
    const dc__optim_param *b = &k->head.params[layer->bias];
    if (b->ndim != 1 || b->shape[0] != w->shape[0]) {
      return dc__fail(DC_E_SHAPE, "%s: the bias must have the shape [%" PRId64 "]", fn, w->shape[0]);
    }
    if (b->group != w->group || layer->bias == layer->weight) {
      return bad_param(fn, "bias", layer->bias, DC_E_INVALID, "must be another parameter of the weight's group");
    }
  }
  return DC_OK;
}

/* Lays out the sums and their diagonals; with memory NULL, counts only. */
static bool layout_sums(dc__kfac_layer *layer) {
  bool fits = true;
  layer->bytes = 0;
  for (int32_t which = 0; which < DC__FACTORS && fits; which++) {
    dc__factor *f = &layer->factors[which];
    const int64_t rows = layer->groups * f->order;
    const size_t sum = layer->bytes;
    fits = dc__linalg_add_bytes(&layer->bytes, rows, (size_t)f->order * sizeof *f->sum);
    const size_t diagonal = layer->bytes;
    fits = fits && dc__linalg_add_bytes(&layer->bytes, rows, sizeof *f->diagonal);
    if (layer->memory != NULL) {
      f->sum = (float *)(void *)((char *)layer->memory + sum);
      f->diagonal = (float *)(void *)((char *)layer->memory + diagonal);
    }
  }
  return fits;
}

/* Sets the orders of the factors and allocates their sums. */
static dc_status make_factors(const dc__kfac *k, const char *fn, dc__kfac_layer *layer) {
  enum { MAX_ORDER = 32766 }; /* what LAPACK's 32-bit integers allow */
  const dc__optim_param *w = &k->head.params[layer->weight];
  layer->ndim = w->ndim;
  memcpy(layer->shape, w->shape, (size_t)w->ndim * sizeof *w->shape);
  layer->factors[DC__FACTOR_A].order = w->numel / w->shape[0] + (layer->bias >= 0 ? 1 : 0);
  layer->factors[DC__FACTOR_G].order = w->shape[0] / layer->groups;
  for (int32_t which = 0; which < DC__FACTORS; which++) {
    dc__factor *f = &layer->factors[which];
    if (f->order > MAX_ORDER) {
      return dc__fail(DC_E_UNSUPPORTED, "%s: a factor would have %" PRId64 " rows, at most %d are possible", fn,
                      f->order, (int)MAX_ORDER);
    }
  }
  if (!layout_sums(layer)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold the layer's factors", fn);
  }
  DC__TRY(dc__kfac_alloc(k->head.linalg, layer->bytes, &layer->memory));
  dc__stream_zero(k->head.linalg->device->internal_stream, layer->memory, layer->bytes);
  (void)layout_sums(layer);
  return DC_OK;
}

static int32_t spatial_of(const dc__optim_param *weight) {
  return weight->ndim < 3 ? 1 : weight->ndim > 5 ? 3 : weight->ndim - 2;
}

dc_status dc__kfac_add_layer(dc_optimizer *o, const char *fn, const dc_sample_layer *constants, int32_t approximation,
                             int64_t weight, int64_t bias, int64_t *index) {
  dc__kfac *k = dc__kfac_of(o);
  dc__kfac_layer layer = {.approximation = approximation, .weight = weight, .bias = bias};
  if (o->prepared > 0) {
    return dc__fail(DC_E_STATE, "%s: the optimizer has a state already; add layers before", fn);
  }
  DC__TRY(check_param(k, fn, "weight", weight));
  if (bias != -1) {
    DC__TRY(check_param(k, fn, "bias", bias));
  }
  DC__TRY(dc__per_sample_read_layer(fn, constants, spatial_of(&o->params[weight]), &layer.layer));
  layer.groups = layer.layer.groups == 0 || layer.layer.kind == DC_SAMPLE_LINEAR ? 1 : layer.layer.groups;
  DC__TRY(check_shapes(k, fn, &layer));
  if (!dc__array_reserve((void **)&k->layers, &k->layer_capacity, k->layer_count + 1, sizeof *k->layers)) {
    return DC_E_NO_MEMORY;
  }
  DC__TRY(make_factors(k, fn, &layer));
  if (index != NULL) {
    *index = k->layer_count;
  }
  k->layers[k->layer_count++] = layer;
  return DC_OK;
}

dc_status dc__kfac_add_batch(dc_optimizer *o, const char *fn, int64_t index, const dc_tensor *x, const dc_tensor *delta,
                             double loss_scale) {
  dc__kfac *k = dc__kfac_of(o);
  dc__per_sample sample;
  if (index < 0 || index >= k->layer_count) {
    return dc__fail(DC_E_NOT_FOUND, "%s: index = %" PRId64 ", there %s %" PRId64 " layer%s", fn, index,
                    k->layer_count == 1 ? "is" : "are", k->layer_count, DC__PLURAL_S(k->layer_count));
  }
  if (loss_scale == 0 || !isfinite(loss_scale * loss_scale)) {
    return dc__fail(DC_E_INVALID, "%s: loss_scale = %g, must be finite, as must its square, and not 0", fn, loss_scale);
  }
  DC__TRY(dc__optim_synchronize(o, fn)); /* the batch's producers */
  DC__TRY(dc__per_sample_read_mixed(o->linalg, fn, &k->layers[index].layer, x, delta, &sample));
  return dc__kfac_accumulate(o->linalg, &k->layers[index], &sample, loss_scale, dc__kfac_updates(o, &k->layers[index]));
}

/* ---- the state ---- */

/* Assigns layers to owners by the cost of their decompositions. */
static dc_status assign_owners(dc__kfac *k) {
  int32_t world = dc__kfac_world(k);
  size_t count = (size_t)k->layer_count;
  double load[DC__COMM_MAX_WORLD] = {0};
  double *costs = dc__calloc(count + 1, sizeof *costs);
  int64_t *order = dc__calloc(count + 1, sizeof *order);
  int32_t *owners = dc__calloc(count + 1, sizeof *owners);
  bool fits = costs != NULL && order != NULL && owners != NULL;
  for (size_t i = 0; i < count && fits; i++) {
    const dc__kfac_layer *layer = &k->layers[i];
    double a = (double)layer->factors[DC__FACTOR_A].order;
    double g = (double)layer->factors[DC__FACTOR_G].order;
    costs[i] = layer->groups * (a * a * a + g * g * g);
  }
  if (fits) {
    dc__assign_owners(costs, k->layer_count, world, load, order, owners);
  }
  for (size_t i = 0; i < count && fits; i++) {
    k->layers[i].owner = owners[i];
  }
  dc__free(costs);
  dc__free(order);
  dc__free(owners);
  return fits ? DC_OK : DC_E_NO_MEMORY;
}

enum { COUNT_UPDATES, COUNT_GOOD, COUNT_FAILED, COUNTS = COUNT_FAILED + 1 + DC__FACTORS };

/* The pieces of an owned layer belong to its weight. */
static bool kfac_add_pieces(dc_optimizer *o, dc__kfac_layer *layer) {
  static const char *const names[DC__FACTORS][3] = {{"factor_a", "vectors_a", "values_a"},
                                                    {"factor_g", "vectors_g", "values_g"}};
  const int64_t counts = COUNTS;
  dc__optim_param *p = &o->params[layer->weight];
  int64_t *count = dc__optim_add_piece(o, p, "counts", DC_INT64, &counts, 1);
  bool fits = count != NULL;
  for (int32_t which = 0; which < DC__FACTORS && fits; which++) {
    dc__factor *f = &layer->factors[which];
    const int64_t shape[2] = {layer->groups * f->order, f->order};
    f->mean = dc__optim_add_piece(o, p, names[which][0], DC_FLOAT32, shape, 2);
    f->vectors = dc__optim_add_piece(o, p, names[which][1], DC_FLOAT32, shape, 2);
    f->values = dc__optim_add_piece(o, p, names[which][2], DC_FLOAT32, shape, 1);
    f->successes = &count[COUNT_GOOD + 2 * which];
    f->failures = &count[COUNT_FAILED + 2 * which];
    fits = f->mean != NULL && f->vectors != NULL && f->values != NULL;
  }
  layer->updates = count;
  return fits;
}

static dc_status kfac_prepare(dc_optimizer *o, const char *fn, int64_t first) {
  (void)fn;
  dc__kfac *k = dc__kfac_of(o);
  if (!dc__array_reserve((void **)&k->params, &k->param_capacity, o->count, sizeof *k->params)) {
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = first; i < o->count; i++) {
    dc__optim_param *p = &o->params[i];
    const dc_kfac_options *options = dc__optim_options(o, p);
    k->params[i] = (dc__kfac_param){.entry = -1};
    if (options->momentum > 0) {
      k->params[i].momentum = dc__optim_add_piece(o, p, "momentum_buffer", DC_FLOAT32, &p->count, 1);
      if (k->params[i].momentum == NULL) {
        return DC_E_NO_MEMORY;
      }
    }
  }
  if (first > 0) {
    return DC_OK; /* layers are registered before the first state exists */
  }
  DC__TRY(assign_owners(k));
  int32_t rank = o->comm == NULL ? 0 : o->comm->rank;
  for (int64_t i = 0; i < k->layer_count; i++) {
    if (k->layers[i].owner == rank && !kfac_add_pieces(o, &k->layers[i])) {
      return DC_E_NO_MEMORY;
    }
  }
  return DC_OK;
}

/* ---- the rest ---- */

static void kfac_drop_batches(dc_optimizer *o) {
  const dc__kfac *k = dc__kfac_of(o);
  for (int64_t i = 0; i < k->layer_count; i++) {
    for (int32_t which = 0; which < DC__FACTORS; which++) {
      k->layers[i].factors[which].count = 0;
      k->layers[i].factors[which].bound = 0;
    }
  }
}

static void kfac_stats(const dc_optimizer *o, dc_optimizer_stats *s) {
  const dc__kfac *k = dc__kfac_of(o);
  s->blocks = k->layer_count;
  for (int64_t i = 0; i < k->layer_count; i++) {
    s->owned_blocks += k->layers[i].updates != NULL ? 1 : 0;
    s->scratch_bytes += (int64_t)k->layers[i].bytes;
  }
  s->scratch_bytes +=
      k->host_bytes + (int64_t)k->bytes + (k->redistribute == NULL ? 0 : dc__redistribute_bytes(k->redistribute));
}

static void kfac_destroy(dc_optimizer *o) {
  dc__kfac *k = dc__kfac_of(o);
  dc__kfac_release(k);
  for (int64_t i = 0; i < k->layer_count; i++) {
    dc__kfac_free(o->linalg, k->layers[i].memory, k->layers[i].bytes);
  }
  dc__free(k->layers);
  dc__free(k->params);
}

const dc__optim_kind dc__kfac_kind = {.name = "kfac",
                                      .size = sizeof(dc__kfac),
                                      .options_size = sizeof(dc_kfac_options),
                                      .matrices = true,
                                      .exponent = 128,
                                      .fixed_option_changed = kfac_fixed_option_changed,
                                      .prepare = kfac_prepare,
                                      .step = dc__kfac_step,
                                      .drop_collected = kfac_drop_batches,
                                      .stats = kfac_stats,
                                      .destroy = kfac_destroy};
