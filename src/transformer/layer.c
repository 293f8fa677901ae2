/* Creating and destroying a layer, and its initial weights. */
#include <inttypes.h>
#include <math.h>

#include "transformer/transformer_internal.h"

dc_status dc__layer_create(const char *fn, dc_device *device, const dc_layer_config *config, dc_layer **layer) {
  dc_layer *l = dc__calloc(1, sizeof *l);
  if (l == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__threadpool_open(config->threads, &l->pool);
  if (status != DC_OK) {
    dc__free(l);
    return dc__fail(status, "%s: %s", fn, dc_last_error());
  }
  l->handle = DC__HANDLE_LAYER;
  atomic_init(&l->refs, 1);
  l->device = dc__device_retain(device);
  l->config = *config;
  l->work = dc__layer_is_cuda(l) ? &dc__layer_work_cuda : &dc__layer_work_cpu;
  *layer = l;
  return DC_OK;
}

dc_layer *dc__layer_retain(dc_layer *layer) {
  atomic_fetch_add(&layer->refs, 1);
  return layer;
}

void dc__layer_release(dc_layer *layer) {
  if (layer != NULL && atomic_fetch_sub(&layer->refs, 1) == 1) {
    dc__threadpool_close(layer->pool);
    dc__device_release(layer->device);
    dc__free(layer);
  }
}

int64_t dc__layer_weight_numel(const dc_layer *layer, int32_t index, int64_t *rows, int64_t *columns) {
  int64_t h = layer->config.hidden_size;
  int64_t i = layer->config.intermediate_size;
  const int64_t shapes[DC_LAYER_WEIGHTS][2] = {{3 * h, h}, {3 * h, 0}, {h, h}, {h, 0}, {h, 0}, {h, 0},
                                               {i, h},     {i, 0},     {h, i}, {h, 0}, {h, 0}, {h, 0}};
  *rows = shapes[index][0];
  *columns = shapes[index][1]; /* 0 for a vector */
  return *rows * (*columns > 0 ? *columns : 1);
}

dc__token_cursor dc__token_cursor_at(const dc__layer_size *size, int64_t token) {
  if (size->cu_seqlens == NULL) {
    return (dc__token_cursor){token / size->max_seqlen, token % size->max_seqlen};
  }
  int64_t low = 0; /* the last sample that begins at or before the token */
  int64_t high = size->batch;
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    if (size->cu_seqlens[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return (dc__token_cursor){low, token - size->cu_seqlens[low]};
}

/* ---- initial weights ---- */

enum { PIECE_NUMEL = 4096 };

typedef struct init_task {
  void *weight;
  int32_t dtype;
  int64_t numel;
  double deviation;
  uint32_t key[2];
} init_task;

/* A piece of a matrix: Box-Muller transform of Philox, two numbers per call, computed in float64. */
static void init_piece(void *arg, int64_t index, void *scratch) {
  const init_task *w = arg;
  float *row = scratch;
  int64_t first = index * PIECE_NUMEL;
  int64_t count = w->numel - first < PIECE_NUMEL ? w->numel - first : PIECE_NUMEL;
  for (int64_t i = 0; i < count; i += 2) {
    uint64_t block = (uint64_t)(first + i) / 2;
    uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), 0, 0};
    uint32_t r[4];
    dc__philox(r, counter, w->key);
    double u = ((double)(((uint64_t)r[0] << 20) ^ (r[1] >> 12)) + 1.0) * 0x1p-52; /* 0 < u <= 1 */
    double angle = (double)(((uint64_t)r[2] << 20) ^ (r[3] >> 12)) * (0x1p-52 * 6.283185307179586);
    double radius = w->deviation * sqrt(-2.0 * log(u));
    row[i] = (float)(radius * cos(angle));
    row[i + 1] = (float)(radius * sin(angle));
  }
  dc__cast((char *)w->weight + (size_t)first * dc_dtype_size(w->dtype), w->dtype, row, DC_FLOAT32, count);
}

static void init_constant(void *weight, int32_t dtype, int64_t numel, float value) {
  for (int64_t i = 0; i < numel; i++) {
    dc__cast((char *)weight + (size_t)i * dc_dtype_size(dtype), dtype, &value, DC_FLOAT32, 1);
  }
}

void dc__layer_init_weight(const dc_layer *layer, int32_t index, void *weight, int32_t dtype) {
  const dc_layer_config *c = &layer->config;
  int64_t rows;
  int64_t columns;
  int64_t numel = dc__layer_weight_numel(layer, index, &rows, &columns);
  if (columns == 0) {
    bool scale = index == DC_LAYER_ATTN_NW || index == DC_LAYER_NORM_W;
    init_constant(weight, dtype, numel, scale ? 1.0f : 0.0f);
    return;
  }
  bool output = index == DC_LAYER_ATTN_OW || index == DC_LAYER_OUTPUT_W;
  init_task w = {.weight = weight, .dtype = dtype, .numel = numel, .deviation = c->initializer_range};
  if (output && c->adjust_init_range) {
    w.deviation /= sqrt(2.0 * (double)c->num_hidden_layers);
  }
  uint64_t seed = (uint64_t)c->seed;
  uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  uint32_t counter[4] = {(uint32_t)index, 0, (uint32_t)c->layer_id, 0}; /* dropout does not use site 0 */
  uint32_t words[4];
  dc__philox(words, counter, key);
  memcpy(w.key, words, sizeof w.key);
  dc__parallel_for(layer->pool, (numel + PIECE_NUMEL - 1) / PIECE_NUMEL, init_piece, &w);
}
