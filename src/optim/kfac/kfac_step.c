/* A step of K-FAC: factors to their owners, decompositions, gradients to the owners, directions back. Everything
 * that can fail runs before any state changes. */
#include <math.h>

#include "optim/kfac/kfac_internal.h"

static bool has_grad(const dc__kfac *k, int64_t index) {
  return index >= 0 && k->head.io[index].grad_dtype != DC_DTYPE_NONE;
}

static bool layer_has_grad(const dc__kfac *k, const dc__kfac_layer *layer) {
  return has_grad(k, layer->weight) || has_grad(k, layer->bias);
}

static bool updates_factors(const dc__kfac *k, const dc__kfac_layer *layer) {
  return layer_has_grad(k, layer) && dc__kfac_updates(&k->head, layer);
}

/* Sums the ranks' numbers of vectors, for each factor. */
static dc_status sum_counts(dc__kfac *k) {
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_ALL_GATHER};
  const int64_t all = DC__FACTORS * k->layer_count;
  for (int64_t i = 0; i < all; i++) {
    k->counts[i] = k->layers[i / DC__FACTORS].factors[i % DC__FACTORS].count;
  }
  if (dc__kfac_world(k) == 1) {
    return DC_OK;
  }
  DC__TRY(dc__comm_all_gather_int64(k->head.comm, &tag, k->counts, all, k->table));
  for (int64_t i = 0; i < all; i++) {
    k->counts[i] = 0;
    for (int32_t r = 0; r < dc__kfac_world(k); r++) {
      k->counts[i] += k->table[r * all + i];
    }
  }
  return DC_OK;
}

/* Computes the new factors. */
static dc_status update_factors(dc__kfac *k) {
  bool any = false;
  for (int64_t i = 0; i < k->layer_count; i++) {
    any = any || updates_factors(k, &k->layers[i]);
  }
  if (any) {
    DC__TRY(sum_counts(k));
  }
  for (int64_t i = 0; i < k->layer_count; i++) {
    dc__kfac_layer *layer = &k->layers[i];
    if (updates_factors(k, layer)) {
      const dc_kfac_options *options = dc__kfac_options(&k->head, layer);
      DC__TRY(dc__kfac_update(k->head.linalg, k->head.comm, dc__redistribute_comm_stream(k->redistribute), layer,
                              options->decay, k->counts + DC__FACTORS * i, k->packed));
    }
  }
  return DC_OK;
}

/* Whether an owned layer is decomposed in this step: at its interval, or as soon as it has data. */
static bool is_due(const dc__kfac *k, const dc__kfac_layer *layer) {
  const dc__factor *a = &layer->factors[DC__FACTOR_A];
  const dc__factor *g = &layer->factors[DC__FACTOR_G];
  if (layer->updates == NULL || !layer_has_grad(k, layer) || (*layer->updates == 0 && !a->changed)) {
    return false;
  }
  return *a->successes == 0 || *g->successes == 0 ||
         dc__kfac_steps(&k->head, layer) % dc__kfac_options(&k->head, layer)->refresh_frequency == 0;
}

static dc_status kfac_decompose_due(dc__kfac *k, const char *fn) {
  for (int64_t i = 0; i < k->layer_count; i++) {
    k->layers[i].due = is_due(k, &k->layers[i]);
    k->layers[i].tolerated = dc__kfac_options(&k->head, &k->layers[i])->tolerated_failures;
  }
  return dc__optim_agree_status(fn, k->head.comm, dc__kfac_decompose(k->head.linalg, fn, &k->matrices, &k->head.stats));
}

static void copy_direction(void *user, int64_t entry, const float *part) {
  const dc__kfac *k = user;
  int64_t index = k->entries[entry].id;
  dc__stream_copy(k->head.linalg->device->internal_stream, k->params[index].direction, part,
                  (size_t)k->head.params[index].count * sizeof *part);
}

static float *block_of(const dc__kfac *k, int64_t index) {
  return has_grad(k, index) ? dc__redistribute_block(k->redistribute, k->params[index].entry, 0) : NULL;
}

static dc__kfac_direction direction_of(const dc__kfac *k, const char *fn, int64_t i) {
  const dc__kfac_layer *layer = &k->layers[i];
  const dc_kfac_options *options = dc__kfac_options(&k->head, layer);
  return (dc__kfac_direction){.fn = fn,
                              .layer = layer,
                              .damping = options->damping,
                              .factored = options->inverse == DC_KFAC_FACTORED,
                              .weight = block_of(k, layer->weight),
                              .bias = block_of(k, layer->bias),
                              .found = &k->found[i],
                              .memory = k->work};
}

/* Replaces an owned layer's gradient by its direction; unchanged before the first decomposition. */
static dc_status precondition_layer(dc__kfac *k, const char *fn, int64_t i) {
  dc__kfac_direction d = direction_of(k, fn, i);
  return d.layer->updates != NULL && layer_has_grad(k, d.layer) && dc__kfac_latest(d.layer, &d)
             ? dc__kfac_work_of(k->head.linalg)->precondition(k->head.linalg, &d)
             : DC_OK;
}

/* Checks the result of a direction. */
static dc_status check_direction(dc__kfac *k, const char *fn, int64_t i) {
  dc__kfac_direction d = direction_of(k, fn, i);
  if (k->host_found[i].not_positive != 0) {
    (void)dc__kfac_latest(d.layer, &d);
    DC__TRY(dc__kfac_work_of(k->head.linalg)->report_not_positive(k->head.linalg, &d));
  }
  memcpy(&k->products[i], &k->host_found[i].product, sizeof k->host_found[i].product);
  return isfinite(k->host_found[i].product)
             ? DC_OK
             : dc__fail(DC_E_NOT_FINITE, "%s: the direction of parameter %" PRId64 " is not finite", fn,
                        d.layer->weight);
}

/* Computes the directions of this rank's layers, and their products with the gradients. */
static dc_status compute_directions(dc__kfac *k, const char *fn) {
  const size_t bytes = (size_t)k->layer_count * sizeof *k->found;
  dc_status status = DC_OK;
  int64_t count = 0;
  dc__stream_zero(k->head.linalg->device->internal_stream, k->found, bytes);
  while (count < k->layer_count && status == DC_OK) {
    status = precondition_layer(k, fn, count++);
  }
  DC__TRY(dc__linalg_copy_to_host(k->head.linalg, k->host_found, k->found, bytes));
  for (int64_t i = 0; i < count; i++) {
    DC__TRY(check_direction(k, fn, i));
  }
  return status;
}

/* A group's clipping factor for its layers' directions. Sums go over layers in order, the same on every rank. */
static dc_status kfac_clip(dc__kfac *k) {
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_ALL_GATHER};
  memcpy(k->table, k->products, (size_t)k->layer_count * sizeof *k->table);
  if (k->head.comm != NULL) {
    DC__TRY(dc__comm_all_gather_int64(k->head.comm, &tag, k->products, k->layer_count, k->table));
  }
  for (int32_t group = 0; group < k->head.group_count; group++) {
    const dc_kfac_options *options = k->head.groups[group].options;
    double lr = k->head.groups[group].lr;
    double sum = 0;
    for (int64_t i = 0; i < k->layer_count; i++) {
      const dc__kfac_layer *layer = &k->layers[i];
      double product = 0;
      int64_t from = k->head.comm == NULL ? i : layer->owner * k->layer_count + i;
      memcpy(&product, &k->table[from], sizeof product);
      sum += k->head.params[layer->weight].group == group ? product : 0;
    }
    double change = fabs(sum) * lr * lr;
    double nu = options->kl_clip > 0 && change > options->kl_clip ? sqrt(options->kl_clip / change) : 1;
    for (int64_t i = 0; i < k->head.count; i++) {
      if (k->head.params[i].group == group) {
        k->params[i].nu = (float)nu;
      }
    }
  }
  return DC_OK;
}

/* Computes the directions of all layers and sends every rank its parts. */
static dc_status precondition_all(dc__kfac *k, const char *fn) {
  if (k->redistribute == NULL) {
    DC__TRY(dc__kfac_set_up_steps(k, fn));
  }
  for (int64_t i = 0; i < k->entry_count; i++) {
    k->skipped[i] = !has_grad(k, k->entries[i].id);
  }
  DC__TRY(update_factors(k));
  DC__TRY(kfac_decompose_due(k, fn));
  DC__TRY(dc__redistribute_to_owners(k->redistribute, k->skipped, dc__kfac_fill_gradient, k));
  DC__TRY(dc__optim_agree_status(fn, k->head.comm, compute_directions(k, fn)));
  DC__TRY(kfac_clip(k));
  DC__TRY(dc__redistribute_from_owners(k->redistribute, k->skipped, copy_direction, k));
  return DC_OK;
}

dc_status dc__kfac_step(dc_optimizer *o, const char *fn) {
  dc__kfac *k = dc__kfac_of(o);
  dc_status status = k->layer_count > 0 ? precondition_all(k, fn) : DC_OK;
  for (int64_t i = 0; i < k->layer_count; i++) {
    if (status == DC_OK) {
      dc__kfac_commit(o->linalg, &k->layers[i], &o->stats);
    } else {
      dc__kfac_undo(o->linalg, &k->layers[i]);
    }
  }
  DC__TRY(status);
  return dc__kfac_update_weights(k);
}
