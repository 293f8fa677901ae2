/* What K-FAC's first step makes: memory, the ways of gradients and directions, the matrices of this rank. */
#include "optim/kfac_inside.h"

void dc__kfac_release(dc__kfac *k) {
  dc__exchange_destroy(k->exchange);
  dc__kfac_matrices_destroy(&k->matrices);
  dc__free(k->flows);
  dc__free(k->cuts);
  dc__free(k->skipped);
  dc__free(k->counts);
  dc__free(k->seen);
  dc__free(k->products);
  dc__free(k->table);
  dc__kfac_free(k->head.linalg, k->memory, k->bytes);
  k->exchange = NULL;
  k->flows = NULL;
  k->cuts = NULL;
  k->skipped = NULL;
  k->counts = k->products = k->table = NULL;
  k->seen = NULL;
  k->memory = NULL;
  k->bytes = 0;
  k->flow_count = k->host_bytes = 0;
}

static void *room(dc__kfac *k, int64_t count, size_t size) {
  k->host_bytes += count * (int64_t)size;
  return dc__calloc((size_t)count + 1, size);
}

static size_t most(size_t a, size_t b) {
  return a > b ? a : b;
}

/* The next part of k->memory, or, without one, what it adds to it. */
static void *take(dc__kfac *k, int64_t count, size_t size, bool *fits) {
  const size_t at = k->bytes;
  *fits = *fits && dc__linalg_add(&k->bytes, count, size);
  return k->memory == NULL ? NULL : (char *)k->memory + at;
}

/* Places for the decompositions of the layers that this rank owns. */
static void place_fresh(dc__kfac *k, bool *fits) {
  for (int64_t i = 0; i < DC__FACTORS * k->layer_count; i++) {
    dc__kfac_layer *layer = &k->layers[i / DC__FACTORS];
    dc__factor *f = &layer->factors[i % DC__FACTORS];
    if (layer->updates != NULL) {
      f->fresh_vectors = take(k, layer->groups * f->order, (size_t)f->order * sizeof *f->fresh_vectors, fits);
      f->fresh_values = take(k, layer->groups * f->order, sizeof *f->fresh_values, fits);
    }
  }
}

static bool place(dc__kfac *k) {
  bool fits = true;
  size_t packed = 0;
  size_t work = 0;
  int64_t parts = 0;
  for (int64_t i = 0; i < k->layer_count; i++) {
    const dc__kfac_layer *layer = &k->layers[i];
    size_t bytes = 0;
    fits = fits && dc__kfac_work_of(k->head.linalg)->room(k->head.linalg, layer, &bytes);
    work = most(work, bytes);
    packed = most(packed, (size_t)dc__kfac_packed(layer));
    parts += k->head.params[layer->weight].count + (layer->bias < 0 ? 0 : k->head.params[layer->bias].count);
  }
  k->bytes = 0;
  k->packed = take(k, (dc__kfac_world(k) > 1 ? 2 : 1) * (int64_t)packed, sizeof *k->packed, &fits);
  k->found = take(k, k->layer_count, sizeof *k->found, &fits);
  k->directions = take(k, parts, sizeof *k->directions, &fits);
  k->work = take(k, (int64_t)work, 1, &fits);
  place_fresh(k, &fits);
  return fits;
}

static dc_status allocate(dc__kfac *k, const char *fn) {
  k->flows = room(k, 2 * k->layer_count, sizeof *k->flows);
  k->cuts = room(k, 2 * k->layer_count, sizeof *k->cuts);
  k->skipped = room(k, 2 * k->layer_count, sizeof *k->skipped);
  k->counts = room(k, DC__FACTORS * k->layer_count, sizeof *k->counts);
  k->seen = room(k, k->layer_count, sizeof *k->seen);
  k->products = room(k, k->layer_count, sizeof *k->products);
  k->table = room(k, DC__FACTORS * dc__kfac_world(k) * k->layer_count, sizeof *k->table);
  if (k->flows == NULL || k->cuts == NULL || k->skipped == NULL || k->counts == NULL || k->seen == NULL ||
      k->products == NULL || k->table == NULL) {
    return DC_E_NO_MEMORY;
  }
  if (!place(k)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold what the layers need", fn);
  }
  DC__TRY(dc__kfac_alloc(k->head.linalg, k->bytes, &k->memory));
  (void)place(k);
  DC__TRY(dc__kfac_matrices_create(k->layers, k->layer_count, &k->matrices));
  return dc__kfac_reserve(k->head.linalg, fn, &k->matrices);
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

dc_status dc__kfac_set_up(dc__kfac *k, const char *fn) {
  dc__kfac_release(k);
  DC__TRY(dc__agree(fn, k->head.comm, allocate(k, fn)));
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
