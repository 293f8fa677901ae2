/* Setup at K-FAC's first step: memory, redistribution of gradients and directions, this rank's matrices. */
#include "optim/kfac/kfac_internal.h"

void dc__kfac_release(dc__kfac *k) {
  dc__redistribute_destroy(k->redistribute);
  dc__kfac_matrices_destroy(&k->matrices);
  dc__free(k->entries);
  dc__free(k->partitions);
  dc__free(k->skipped);
  dc__free(k->counts);
  dc__free(k->host_found);
  dc__free(k->products);
  dc__free(k->table);
  dc__kfac_free(k->head.linalg, k->memory, k->bytes);
  k->redistribute = NULL;
  k->entries = NULL;
  k->partitions = NULL;
  k->skipped = NULL;
  k->counts = k->products = k->table = NULL;
  k->host_found = NULL;
  k->memory = NULL;
  k->bytes = 0;
  k->entry_count = k->host_bytes = 0;
}

static void *kfac_alloc_host(dc__kfac *k, int64_t count, size_t size) {
  k->host_bytes += count * (int64_t)size;
  return dc__calloc((size_t)count + 1, size);
}

static size_t max_size(size_t a, size_t b) {
  return a > b ? a : b;
}

/* The next part of k->memory; without memory, adds its size. */
static void *kfac_suballoc(dc__kfac *k, int64_t count, size_t size, bool *fits) {
  const size_t at = k->bytes;
  *fits = *fits && dc__linalg_add_bytes(&k->bytes, count, size);
  return k->memory == NULL ? NULL : (char *)k->memory + at;
}

/* Allocates decompositions of the layers that this rank owns. */
static void layout_new(dc__kfac *k, bool *fits) {
  for (int64_t i = 0; i < DC__FACTORS * k->layer_count; i++) {
    dc__kfac_layer *layer = &k->layers[i / DC__FACTORS];
    dc__factor *f = &layer->factors[i % DC__FACTORS];
    if (layer->updates != NULL) {
      f->new_vectors = kfac_suballoc(k, layer->groups * f->order, (size_t)f->order * sizeof *f->new_vectors, fits);
      f->new_values = kfac_suballoc(k, layer->groups * f->order, sizeof *f->new_values, fits);
    }
  }
}

static bool kfac_layout(dc__kfac *k) {
  bool fits = true;
  size_t packed = 0;
  size_t work = 0;
  int64_t parts = 0;
  for (int64_t i = 0; i < k->layer_count; i++) {
    const dc__kfac_layer *layer = &k->layers[i];
    size_t bytes = 0;
    fits = fits && dc__kfac_work_of(k->head.linalg)->direction_size(k->head.linalg, layer, &bytes);
    work = max_size(work, bytes);
    packed = max_size(packed, (size_t)dc__kfac_packed_count(layer));
    parts += k->head.params[layer->weight].count + (layer->bias < 0 ? 0 : k->head.params[layer->bias].count);
  }
  k->bytes = 0;
  k->packed = kfac_suballoc(k, (dc__kfac_world(k) > 1 ? 2 : 1) * (int64_t)packed, sizeof *k->packed, &fits);
  k->found = kfac_suballoc(k, k->layer_count, sizeof *k->found, &fits);
  k->directions = kfac_suballoc(k, parts, sizeof *k->directions, &fits);
  k->work = kfac_suballoc(k, (int64_t)work, 1, &fits);
  layout_new(k, &fits);
  return fits;
}

static dc_status kfac_alloc_buffers(dc__kfac *k, const char *fn) {
  k->entries = kfac_alloc_host(k, 2 * k->layer_count, sizeof *k->entries);
  k->partitions = kfac_alloc_host(k, 2 * k->layer_count, sizeof *k->partitions);
  k->skipped = kfac_alloc_host(k, 2 * k->layer_count, sizeof *k->skipped);
  k->counts = kfac_alloc_host(k, DC__FACTORS * k->layer_count, sizeof *k->counts);
  k->host_found = kfac_alloc_host(k, k->layer_count, sizeof *k->host_found);
  k->products = kfac_alloc_host(k, k->layer_count, sizeof *k->products);
  k->table = kfac_alloc_host(k, DC__FACTORS * dc__kfac_world(k) * k->layer_count, sizeof *k->table);
  if (k->entries == NULL || k->partitions == NULL || k->skipped == NULL || k->counts == NULL || k->host_found == NULL ||
      k->products == NULL || k->table == NULL) {
    return DC_E_NO_MEMORY;
  }
  if (!kfac_layout(k)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold what the layers need", fn);
  }
  DC__TRY(dc__kfac_alloc(k->head.linalg, k->bytes, &k->memory));
  (void)kfac_layout(k);
  DC__TRY(dc__kfac_matrices_create(k->layers, k->layer_count, &k->matrices));
  return dc__kfac_reserve(k->head.linalg, fn, &k->matrices);
}

/* Gives a parameter of a layer its redistribution entry and its part of the directions. */
static void add_entry(dc__kfac *k, const dc__kfac_layer *layer, int64_t index, float **direction) {
  const dc__optim_param *p = &k->head.params[index];
  dc__partition *partition = &k->partitions[k->entry_count];
  dc__partition_whole(p->numel, partition);
  k->entries[k->entry_count] = (dc__redist_entry){
      .id = index, .partition = partition, .owners = &layer->owner, .offset = p->offset, .count = p->count};
  k->params[index].entry = k->entry_count++;
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

/* Checks that the ranks have the same layers. */
static dc_status compare_layers(const dc__kfac *k, const char *fn) {
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_ALL_GATHER};
  const dc_comm *comm = k->head.comm;
  int64_t table[DC__COMM_MAX_WORLD];
  uint64_t hash = DC__CHECKSUM;
  for (int64_t i = 0; i < k->layer_count; i++) {
    hash = hash_of(&k->layers[i], hash);
  }
  const int64_t own = (int64_t)hash;
  DC__TRY(dc__comm_all_gather_int64(k->head.comm, &tag, &own, 1, table));
  for (int32_t r = 0; r < comm->world; r++) {
    if (table[r] != own) {
      return dc__fail(DC_E_MISMATCH, "%s: rank %" PRId32 " added other layers than rank %" PRId32, fn, r, comm->rank);
    }
  }
  return DC_OK;
}

dc_status dc__kfac_set_up_steps(dc__kfac *k, const char *fn) {
  dc__kfac_release(k);
  DC__TRY(dc__optim_agree_status(fn, k->head.comm, kfac_alloc_buffers(k, fn)));
  if (k->head.comm != NULL) {
    DC__TRY(compare_layers(k, fn));
  }
  float *direction = k->directions;
  for (int64_t i = 0; i < k->layer_count; i++) {
    add_entry(k, &k->layers[i], k->layers[i].weight, &direction);
    if (k->layers[i].bias >= 0) {
      add_entry(k, &k->layers[i], k->layers[i].bias, &direction);
    }
  }
  return dc__redistribute_create(fn, k->head.linalg->device, k->head.comm, k->entries, k->entry_count,
                                 &k->redistribute);
}
