/* A step of K-FAC: factors to their owners, decompositions, gradients to the owners, directions back, and then SGD
 * along them. Everything that can fail comes before anything that is kept changes. */
#include <math.h>

#include "optim/kfac_inside.h"

static bool has_grad(const dc__kfac *k, int64_t index) {
  return index >= 0 && k->head.io[index].grad_dtype != DC_DTYPE_NONE;
}

static bool takes_part(const dc__kfac *k, const dc__kfac_layer *layer) {
  return has_grad(k, layer->weight) || has_grad(k, layer->bias);
}

static bool updates(const dc__kfac *k, const dc__kfac_layer *layer) {
  return takes_part(k, layer) && dc__kfac_updates(&k->head, layer);
}

/* How many vectors all ranks together have seen. */
static dc_status sum_counts(dc__kfac *k) {
  const dc__tag tag = {-1, -1, DC_OP_COMM_ALL_GATHER, NULL};
  const int64_t all = DC__FACTORS * k->layer_count;
  for (int64_t i = 0; i < all; i++) {
    k->counts[i] = k->layers[i / DC__FACTORS].factors[i % DC__FACTORS].count;
  }
  if (dc__kfac_world(k) == 1) {
    return DC_OK;
  }
  DC__TRY(dc__comm_exchange(k->head.comm, &tag, k->counts, all, k->table));
  for (int64_t i = 0; i < all; i++) {
    k->counts[i] = 0;
    for (int32_t r = 0; r < dc__kfac_world(k); r++) {
      k->counts[i] += k->table[r * all + i];
    }
  }
  return DC_OK;
}

/* The factors as they will be. */
static dc_status update_factors(dc__kfac *k) {
  bool any = false;
  for (int64_t i = 0; i < k->layer_count; i++) {
    any = any || updates(k, &k->layers[i]);
  }
  if (any) {
    DC__TRY(sum_counts(k));
  }
  for (int64_t i = 0; i < k->layer_count; i++) {
    dc__kfac_layer *layer = &k->layers[i];
    if (updates(k, layer)) {
      const dc_kfac_options *options = dc__kfac_options(&k->head, layer);
      DC__TRY(dc__kfac_update(k->head.linalg, k->head.comm, dc__exchange_moves(k->exchange), layer, options->decay,
                              k->counts + DC__FACTORS * i, k->packed));
    }
  }
  return DC_OK;
}

/* Whether an owned layer is decomposed in this step: when it is its time, or as soon as there is something. */
static bool is_due(const dc__kfac *k, const dc__kfac_layer *layer) {
  const dc__factor *a = &layer->factors[DC__FACTOR_A];
  const dc__factor *g = &layer->factors[DC__FACTOR_G];
  if (layer->updates == NULL || !takes_part(k, layer) || (*layer->updates == 0 && !a->changed)) {
    return false;
  }
  return *a->good == 0 || *g->good == 0 ||
         dc__kfac_steps(&k->head, layer) % dc__kfac_options(&k->head, layer)->refresh_frequency == 0;
}

static dc_status decompose(dc__kfac *k, const char *fn) {
  for (int64_t i = 0; i < k->layer_count; i++) {
    k->layers[i].due = is_due(k, &k->layers[i]);
    k->layers[i].tolerated = dc__kfac_options(&k->head, &k->layers[i])->tolerated_failures;
  }
  return dc__agree(fn, k->head.comm, dc__kfac_decompose(k->head.linalg, fn, &k->matrices, &k->head.stats));
}

static void fill(void *user, int64_t flow, float *part) {
  const dc__kfac *k = user;
  const dc__optim_param *p = &k->head.params[k->flows[flow].id];
  float tile[DC__OPTIM_TILE];
  for (int64_t from = 0; from < p->count; from += DC__OPTIM_TILE) {
    int64_t count = p->count - from < DC__OPTIM_TILE ? p->count - from : DC__OPTIM_TILE;
    memcpy(part + from, dc__optim_grad(&k->head, p, from, count, tile), (size_t)count * sizeof *part);
  }
}

static void take(void *user, int64_t flow, const float *part) {
  const dc__kfac *k = user;
  int64_t index = k->flows[flow].id;
  dc__stream_copy(k->head.linalg->device->here, k->params[index].direction, part,
                  (size_t)k->head.params[index].count * sizeof *part);
}

static float *block_of(const dc__kfac *k, int64_t index) {
  return has_grad(k, index) ? dc__exchange_block(k->exchange, k->params[index].flow, 0) : NULL;
}

/* Queues the direction of an owned layer, in the place of its gradient; before the first decomposition it is that. */
static dc_status direct(dc__kfac *k, const char *fn, int64_t i) {
  const dc__kfac_layer *layer = &k->layers[i];
  const dc_kfac_options *options = dc__kfac_options(&k->head, layer);
  dc__kfac_direction d = {.fn = fn, .layer = layer, .damping = options->damping, .product = &k->found[i]};
  d.factored = options->inverse == DC_KFAC_FACTORED;
  d.weight = block_of(k, layer->weight);
  d.bias = block_of(k, layer->bias);
  d.memory = k->work;
  return layer->updates != NULL && takes_part(k, layer) && dc__kfac_latest(layer, &d)
             ? dc__kfac_work_of(k->head.linalg)->direct(k->head.linalg, &d)
             : DC_OK;
}

/* The directions of this rank's layers, and their products with the gradients. */
static dc_status compute_directions(dc__kfac *k, const char *fn) {
  const size_t bytes = (size_t)k->layer_count * sizeof *k->found;
  dc_status status = DC_OK;
  int64_t count = 0;
  dc__stream_zero(k->head.linalg->device->here, k->found, bytes);
  while (count < k->layer_count && status == DC_OK) {
    status = direct(k, fn, count++);
  }
  DC__TRY(dc__linalg_bring(k->head.linalg, k->products, k->found, bytes));
  for (int64_t i = 0; i < count; i++) {
    double product;
    memcpy(&product, &k->products[i], sizeof product);
    if (!isfinite(product)) {
      return dc__fail(DC_E_NOT_FINITE, "%s: the direction of parameter %" PRId64 " is not finite", fn,
                      k->layers[i].weight);
    }
  }
  return status;
}

/* How much of its layers' directions a group takes: the sums go over layers in their order, on every rank alike. */
static dc_status clip(dc__kfac *k) {
  const dc__tag tag = {-1, -1, DC_OP_COMM_ALL_GATHER, NULL};
  memcpy(k->table, k->products, (size_t)k->layer_count * sizeof *k->table);
  if (k->head.comm != NULL) {
    DC__TRY(dc__comm_exchange(k->head.comm, &tag, k->products, k->layer_count, k->table));
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

static dc__sgd_factors factors_of(const dc_kfac_options *options, double lr, bool first) {
  dc__sgd_factors f = {.lr = (float)lr, .weight_decay = (float)options->weight_decay, .sign = 1, .add = 1};
  f.keep = first ? 0 : (float)options->momentum;
  f.look = options->nesterov == 1 ? (float)options->momentum : 0;
  return f;
}

static void update(dc_optimizer *o, const dc__optim_tile *tile, void *arg) {
  (void)arg;
  const dc__kfac_param *p = &dc__kfac_of(o)->params[tile->param - o->params];
  const float *direction = tile->grad;
  float scaled[DC__OPTIM_TILE];
  if (p->flow >= 0) {
    direction = p->direction + tile->from;
    if (p->nu < 1) {
      dc__update_scale(scaled, direction, tile->count, p->nu);
      direction = scaled;
    }
  }
  dc__update_sgd(tile->weight, p->momentum == NULL ? NULL : p->momentum + tile->from, direction, tile->count,
                 &p->factors);
}

/* The directions of all layers, in every rank's parts. */
static dc_status precondition(dc__kfac *k, const char *fn) {
  if (k->exchange == NULL) {
    DC__TRY(dc__kfac_set_up(k, fn));
  }
  for (int64_t i = 0; i < k->flow_count; i++) {
    k->skipped[i] = !has_grad(k, k->flows[i].id);
  }
  DC__TRY(update_factors(k));
  DC__TRY(decompose(k, fn));
  DC__TRY(dc__exchange_in(k->exchange, k->skipped, fill, k));
  DC__TRY(dc__agree(fn, k->head.comm, compute_directions(k, fn)));
  DC__TRY(clip(k));
  DC__TRY(dc__exchange_out(k->exchange, k->skipped, take, k));
  return DC_OK;
}

dc_status dc__kfac_step(dc_optimizer *o, const char *fn) {
  dc__kfac *k = dc__kfac_of(o);
  dc_status status = k->layer_count > 0 ? precondition(k, fn) : DC_OK;
  for (int64_t i = 0; i < k->layer_count; i++) {
    if (status == DC_OK) {
      dc__kfac_commit(o->linalg, &k->layers[i], &o->stats);
    } else {
      dc__kfac_undo(o->linalg, &k->layers[i]);
    }
  }
  DC__TRY(status);
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    k->params[i].factors = factors_of(dc__optim_options(o, p), o->groups[p->group].lr, *p->step == 0);
  }
  dc__optim_each_tile(o, update, NULL);
  return DC_OK;
}
