/* A step of K-FAC: factors to their owners, decompositions, gradients to the owners, directions back, and then SGD
 * along them. Everything that can fail comes before anything that is kept changes. */
#include <math.h>

#include "optim/kfac_inside.h"

/* ---- the first step ---- */

void dc__kfac_release(dc__kfac *k) {
  dc__exchange_destroy(k->exchange);
  dc__kfac_matrices_destroy(&k->matrices);
  dc__free(k->flows);
  dc__free(k->cuts);
  dc__free(k->skipped);
  dc__free(k->packed);
  dc__free(k->work);
  dc__free(k->directions);
  for (int64_t i = 0; i < DC__FACTORS * k->layer_count; i++) {
    dc__factor *f = &k->layers[i / DC__FACTORS].factors[i % DC__FACTORS];
    dc__free(f->fresh_vectors);
    f->fresh_vectors = NULL;
  }
  dc__free(k->products);
  dc__free(k->table);
  k->exchange = NULL;
  k->flows = NULL;
  k->cuts = NULL;
  k->skipped = NULL;
  k->packed = NULL;
  k->work = k->directions = NULL;
  k->products = k->table = NULL;
  k->flow_count = k->scratch_bytes = 0;
}

static void *room(dc__kfac *k, int64_t count, size_t size) {
  k->scratch_bytes += count * (int64_t)size;
  return dc__calloc((size_t)count + 1, size);
}

static int64_t most(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* Places for the decompositions of the layers that this rank owns. */
static bool allocate_fresh(dc__kfac *k) {
  bool enough = true;
  for (int64_t i = 0; i < DC__FACTORS * k->layer_count && enough; i++) {
    dc__kfac_layer *layer = &k->layers[i / DC__FACTORS];
    dc__factor *f = &layer->factors[i % DC__FACTORS];
    int64_t rows = layer->groups * f->order;
    if (layer->updates != NULL) {
      f->fresh_vectors = room(k, rows * (f->order + 1), sizeof *f->fresh_vectors);
      enough = f->fresh_vectors != NULL;
      f->fresh_values = enough ? f->fresh_vectors + rows * f->order : NULL;
    }
  }
  return enough;
}

static dc_status allocate(dc__kfac *k) {
  int32_t world = k->head.comm == NULL ? 1 : k->head.comm->world;
  int64_t packed = 0;
  int64_t work = 0;
  int64_t parts = 0;
  for (int64_t i = 0; i < k->layer_count; i++) {
    const dc__kfac_layer *layer = &k->layers[i];
    packed = most(packed, dc__kfac_packed(layer));
    work = most(work, dc__kfac_direction_room(layer));
    parts += k->head.params[layer->weight].count + (layer->bias < 0 ? 0 : k->head.params[layer->bias].count);
  }
  k->flows = room(k, 2 * k->layer_count, sizeof *k->flows);
  k->cuts = room(k, 2 * k->layer_count, sizeof *k->cuts);
  k->skipped = room(k, 2 * k->layer_count, sizeof *k->skipped);
  k->packed = room(k, (world > 1 ? 2 : 1) * packed, sizeof *k->packed);
  k->work = room(k, work, sizeof *k->work);
  k->directions = room(k, parts, sizeof *k->directions);
  k->products = room(k, k->layer_count, sizeof *k->products);
  k->table = room(k, world * k->layer_count, sizeof *k->table);
  return k->flows != NULL && k->cuts != NULL && k->skipped != NULL && k->packed != NULL && k->work != NULL &&
                 k->directions != NULL && k->products != NULL && k->table != NULL && allocate_fresh(k)
             ? dc__kfac_matrices_create(k->layers, k->layer_count, &k->matrices)
             : DC_E_NO_MEMORY;
}

/* Gives a parameter of a layer its flow, and its part of the directions. */
static void add_flow(dc__kfac *k, const dc__kfac_layer *layer, int64_t index, float **direction) {
  const dc__optim_param *p = &k->head.params[index];
  dc__cut *cut = &k->cuts[k->flow_count];
  dc__cut_whole(p->numel, cut);
  k->flows[k->flow_count] =
      (dc__flow){.id = index, .cut = cut, .owners = &layer->owner, .offset = p->offset, .count = p->count};
  k->params[index].flow = k->flow_count++;
  k->params[index].direction = *direction;
  *direction += p->count;
}

static uint64_t hash_of(const dc__kfac_layer *layer, uint64_t hash) {
  const int64_t head[5] = {layer->layer.kind, layer->approximation, layer->groups, layer->weight, layer->bias};
  hash = dc__checksum(hash, head, sizeof head);
  hash = dc__checksum(hash, layer->layer.stride, sizeof layer->layer.stride);
  hash = dc__checksum(hash, layer->layer.padding, sizeof layer->layer.padding);
  return dc__checksum(hash, layer->layer.dilation, sizeof layer->layer.dilation);
}

/* The ranks have the same layers. */
static dc_status compare_layers(const dc__kfac *k, const char *fn) {
  const dc__tag tag = {-1, -1, DC_OP_COMM_ALL_GATHER, NULL};
  const dc_comm *comm = k->head.comm;
  int64_t table[DC__COMM_MAX_WORLD];
  uint64_t hash = DC__CHECKSUM;
  for (int64_t i = 0; i < k->layer_count; i++) {
    hash = hash_of(&k->layers[i], hash);
  }
  const int64_t mine = (int64_t)hash;
  DC__TRY(dc__comm_exchange(k->head.comm, &tag, &mine, 1, table));
  for (int32_t r = 0; r < comm->world; r++) {
    if (table[r] != mine) {
      return dc__fail(DC_E_MISMATCH, "%s: rank %" PRId32 " added other layers than rank %" PRId32, fn, r, comm->rank);
    }
  }
  return DC_OK;
}

static dc_status set_up(dc__kfac *k, const char *fn) {
  dc__kfac_release(k);
  DC__TRY(dc__agree(fn, k->head.comm, allocate(k)));
  if (k->head.comm != NULL) {
    DC__TRY(compare_layers(k, fn));
  }
  float *direction = k->directions;
  for (int64_t i = 0; i < k->layer_count; i++) {
    add_flow(k, &k->layers[i], k->layers[i].weight, &direction);
    if (k->layers[i].bias >= 0) {
      add_flow(k, &k->layers[i], k->layers[i].bias, &direction);
    }
  }
  return dc__exchange_create(fn, k->head.linalg->device, k->head.comm, k->flows, k->flow_count, &k->exchange);
}

/* ---- a step ---- */

static bool has_grad(const dc__kfac *k, int64_t index) {
  return index >= 0 && k->head.io[index].grad_dtype != DC_DTYPE_NONE;
}

static bool takes_part(const dc__kfac *k, const dc__kfac_layer *layer) {
  return has_grad(k, layer->weight) || has_grad(k, layer->bias);
}

/* The factors as they will be. */
static dc_status update_factors(dc__kfac *k) {
  for (int64_t i = 0; i < k->layer_count; i++) {
    dc__kfac_layer *layer = &k->layers[i];
    if (takes_part(k, layer) && dc__kfac_updates(&k->head, layer)) {
      const dc_kfac_options *options = dc__kfac_options(&k->head, layer);
      DC__TRY(dc__kfac_update(k->head.linalg, k->head.comm, layer, options->decay, k->packed));
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
  memcpy(k->params[index].direction, part, (size_t)k->head.params[index].count * sizeof *part);
}

static float *block_of(const dc__kfac *k, int64_t index) {
  return has_grad(k, index) ? dc__exchange_block(k->exchange, k->params[index].flow, 0) : NULL;
}

/* The directions of this rank's layers, in the places of their gradients. */
static dc_status compute_directions(dc__kfac *k, const char *fn) {
  for (int64_t i = 0; i < k->layer_count; i++) {
    const dc__kfac_layer *layer = &k->layers[i];
    const dc_kfac_options *options = dc__kfac_options(&k->head, layer);
    double product = 0;
    if (layer->updates != NULL && takes_part(k, layer)) {
      DC__TRY(dc__kfac_direction(k->head.linalg, fn, layer, options->damping, options->inverse == DC_KFAC_FACTORED,
                                 block_of(k, layer->weight), block_of(k, layer->bias), k->work, &product));
    }
    memcpy(&k->products[i], &product, sizeof product);
  }
  return DC_OK;
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
    DC__TRY(set_up(k, fn));
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
      dc__kfac_undo(&k->layers[i]);
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
