/* Dropout's keys and masks. A site's key comes from Philox itself: key = the layer's seed, counter = (offset,
 * layer_id, site). Two words of the result are the key for the site's elements. */
#include "transformer/transformer_internal.h"

dc__dropout dc__layer_dropout(const dc_layer *layer, int64_t offset, int32_t site, bool on) {
  const dc_layer_config *c = &layer->config;
  double ratio = site == DC_DROPOUT_ATTENTION ? c->attn_dropout_ratio : c->hidden_dropout_ratio;
  uint64_t seed = (uint64_t)c->seed;
  uint64_t at = (uint64_t)offset;
  uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  uint32_t counter[4] = {(uint32_t)at, (uint32_t)(at >> 32), (uint32_t)c->layer_id, (uint32_t)site};
  uint32_t words[4];
  dc__philox(words, counter, key);
  uint32_t threshold = on ? (uint32_t)(ratio * 65536.0 + 0.5) : 0;
  threshold = threshold < 65535 ? threshold : 65535; /* some elements are always kept */
  return (dc__dropout){{words[0], words[1]}, threshold, 65536.0f / (float)(65536 - threshold)};
}

typedef struct export_task {
  const dc_layer *layer;
  const dc__layer_size *size;
  dc__dropout dropout;
  int32_t site;
  uint8_t *mask;
} export_task;

/* Exports row `index` of the mask, which has a row for each query of each head, or for each token. */
static void export_row(void *arg, int64_t index, void *scratch) {
  const export_task *e = arg;
  bool attention = e->site == DC_DROPOUT_ATTENTION;
  int64_t width = attention ? e->size->max_seqlen : e->layer->config.hidden_size;
  uint32_t row = (uint32_t)(index % e->size->max_seqlen);
  uint32_t plane = (uint32_t)(index / e->size->max_seqlen);
  float *m = scratch;
  enum { PIECE = 1 << 16 };
  for (int64_t at = 0; at < width; at += PIECE) {
    int64_t count = width - at < PIECE ? width - at : PIECE;
    dc__dropout_row(m, count, at, row, plane, &e->dropout);
    for (int64_t j = 0; j < count; j++) {
      e->mask[index * width + at + j] = m[j] > 0;
    }
  }
}

void dc__layer_export_mask(const dc_layer *layer, const dc__layer_size *size, int64_t offset, int32_t site,
                           uint8_t *mask) {
  export_task e = {.layer = layer,
                   .size = size,
                   .dropout = dc__layer_dropout(layer, offset, site, layer->config.training),
                   .site = site,
                   .mask = mask};
  int64_t planes = site == DC_DROPOUT_ATTENTION ? layer->config.heads : 1;
  dc__parallel_for(layer->pool, size->batch * planes * size->max_seqlen, export_row, &e);
}
