/* Gathers and reductions through the caller's callbacks, which support equal counts and sums only. Ragged ranges are
 * padded, groups packed, 16-bit floats summed in float32, and means divided here. */
#include <string.h>

#include "comm/external/external.h"
#include "kernels/kernels.h"

/* Memory that only grows, for packed data. */
static dc_status external_reserve_scratch(dc__external *self, int32_t which, int64_t bytes, char **ptr) {
  if (self->scratch_bytes[which] < bytes) {
    dc__free(self->scratch[which]);
    self->scratch_bytes[which] = 0;
    self->scratch[which] = dc__calloc(1, (size_t)bytes);
    if (self->scratch[which] == NULL) {
      return DC_E_NO_MEMORY;
    }
    self->scratch_bytes[which] = bytes;
  }
  *ptr = self->scratch[which];
  return DC_OK;
}

static int64_t max_count(const dc__coll_item *item, int32_t world) {
  int64_t count = 0;
  for (int32_t r = 0; r < world; r++) {
    count = item->ranges[r].count > count ? item->ranges[r].count : count;
  }
  return count;
}

static int64_t item_size(const dc__coll_item *item) {
  return (int64_t)dc_dtype_size(item->dtype);
}

static int64_t bytes_of_others(const dc__external *self, const dc__coll_item *item) {
  int64_t count = 0;
  for (int32_t r = 0; r < self->head.world; r++) {
    count += r == self->head.rank ? 0 : item->ranges[r].count;
  }
  return count * item_size(item);
}

/* One call for the whole group: in the items' type if they have one in common, else in bytes. */
dc_status dc__external_gather(dc__external *self, const dc__coll *coll) {
  int32_t world = self->head.world;
  int64_t block = 0; /* bytes of a rank's packed part */
  bool common = true;
  for (int32_t i = 0; i < coll->count; i++) {
    block += max_count(&coll->items[i], world) * item_size(&coll->items[i]);
    common = common && coll->items[i].dtype == coll->items[0].dtype;
  }
  if (block == 0) {
    return DC_OK;
  }
  char *send;
  char *recv;
  DC__TRY(external_reserve_scratch(self, 0, block, &send));
  DC__TRY(external_reserve_scratch(self, 1, block * world, &recv));
  int64_t pos = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    size_t bytes = (size_t)(item->ranges[self->head.rank].count * item_size(item));
    if (bytes > 0) {
      memcpy(send + pos, item->send, bytes);
    }
    pos += max_count(item, world) * item_size(item);
  }
  int32_t dtype = common ? coll->items[0].dtype : DC_INT8;
  const dc_comm_callbacks *c = &self->callbacks;
  int64_t count = block / (int64_t)dc_dtype_size(dtype);
  dc__external_callback_begin(self, coll, "all_gather");
  DC__TRY(dc__external_callback_end(self, coll, c->all_gather(send, recv, count, dtype, c->user)));
  int64_t moved = 0;
  pos = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    for (int32_t r = 0; r < world; r++) {
      size_t bytes = (size_t)(item->ranges[r].count * item_size(item));
      if (bytes > 0) {
        memcpy((char *)item->recv + item->ranges[r].begin * item_size(item), recv + r * block + pos, bytes);
      }
    }
    pos += max_count(item, world) * item_size(item);
    moved += bytes_of_others(self, item);
  }
  atomic_fetch_add(&self->head.wire_bytes, moved);
  return DC_OK;
}

/* The type in which the caller's library adds. */
static int32_t sum_dtype(const dc__coll_item *item) {
  return item->dtype == DC_FLOAT16 || item->dtype == DC_BFLOAT16 ? DC_FLOAT32 : item->dtype;
}

static void divide_by_world(void *data, int32_t dtype, int64_t count, int32_t world) {
  if (dtype == DC_FLOAT32) {
    float *values = data;
    for (int64_t i = 0; i < count; i++) {
      values[i] /= (float)world;
    }
  } else if (dtype == DC_FLOAT64) {
    double *values = data;
    for (int64_t i = 0; i < count; i++) {
      values[i] /= (double)world;
    }
  }
}

/* Rank-major: block r holds this rank's contribution to what rank r receives. Padding is zero. */
static void pack_sends(const dc__external *self, const dc__coll *coll, int32_t dtype, char *send) {
  int64_t size = (int64_t)dc_dtype_size(dtype);
  for (int32_t r = 0; r < self->head.world; r++) {
    for (int32_t i = 0; i < coll->count; i++) {
      const dc__coll_item *item = &coll->items[i];
      if (sum_dtype(item) == dtype) {
        dc__range range = item->ranges[r];
        int64_t padded = max_count(item, self->head.world);
        dc__cast(send, dtype, (const char *)item->send + range.begin * item_size(item), item->dtype, range.count);
        memset(send + range.count * size, 0, (size_t)((padded - range.count) * size));
        send += padded * size;
      }
    }
  }
}

static void unpack_sums(dc__external *self, const dc__coll *coll, int32_t dtype, char *recv) {
  int64_t size = (int64_t)dc_dtype_size(dtype);
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    if (sum_dtype(item) == dtype) {
      int64_t count = item->ranges[self->head.rank].count;
      const void *source = recv;
      if (item->reduce_op == DC_MEAN) {
        divide_by_world(recv, dtype, count, self->head.world);
      }
      /* With one source this converts and accumulates as the other transports do. */
      const dc__reduction sum = {.dst = item->recv,
                                 .src = &source,
                                 .count = count,
                                 .dst_dtype = item->recv_dtype,
                                 .src_dtype = dtype,
                                 .n = 1,
                                 .accumulate = item->accumulate != 0};
      dc__reduce(&sum);
      recv += max_count(item, self->head.world) * size;
      atomic_fetch_add(&self->head.wire_bytes, count * item_size(item) * (self->head.world - 1));
    }
  }
}

static dc_status reduce_dtype(dc__external *self, const dc__coll *coll, int32_t dtype) {
  int64_t block = 0; /* elements */
  for (int32_t i = 0; i < coll->count; i++) {
    block += sum_dtype(&coll->items[i]) == dtype ? max_count(&coll->items[i], self->head.world) : 0;
  }
  if (block == 0) {
    return DC_OK;
  }
  char *send;
  char *recv;
  int64_t bytes = block * (int64_t)dc_dtype_size(dtype);
  DC__TRY(external_reserve_scratch(self, 0, bytes * self->head.world, &send));
  DC__TRY(external_reserve_scratch(self, 1, bytes, &recv));
  pack_sends(self, coll, dtype, send);
  const dc_comm_callbacks *c = &self->callbacks;
  dc__external_callback_begin(self, coll, "reduce_scatter");
  DC__TRY(dc__external_callback_end(self, coll, c->reduce_scatter(send, recv, block, dtype, c->user)));
  unpack_sums(self, coll, dtype, recv);
  return DC_OK;
}

dc_status dc__external_reduce(dc__external *self, const dc__coll *coll) {
  for (int32_t dtype = DC_FLOAT32; dtype <= DC_INT64; dtype++) {
    DC__TRY(reduce_dtype(self, coll, dtype)); /* does nothing for a type that no item is summed in */
  }
  return DC_OK;
}
