/* Gathers and reductions through the caller's callbacks. With all_to_all, parts are exchanged as they are, and added
 * here. Without it, callbacks offer only equal counts and sums: ragged ranges are padded, 16-bit floats are summed in
 * float32, and means are divided here. */
#include <string.h>

#include "comm/external/external.h"
#include "comm/windows.h"
#include "kernels/kernels.h"

dc_status dc__external_reserve_scratch(dc__external *self, int32_t which, int64_t bytes, char **ptr) {
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

/* The type of all items, or bytes if they differ. */
static int32_t common_dtype(const dc__coll *coll) {
  for (int32_t i = 1; i < coll->count; i++) {
    if (coll->items[i].dtype != coll->items[0].dtype) {
      return DC_INT8;
    }
  }
  return coll->items[0].dtype;
}

/* ---- exchanges ---- */

/* Bytes of a rank's parts of all items, one behind the other. */
static int64_t part_bytes(const dc__coll *coll, int32_t rank) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    bytes += dc__item_bytes(&coll->items[i], rank);
  }
  return bytes;
}

/* Packs a rank's parts of all items one behind the other, and returns the end. In a gather, `send` holds only this
 * rank's. */
static char *external_pack_parts(const dc__coll *coll, int32_t rank, char *packed) {
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    const int64_t bytes = dc__item_bytes(item, rank);
    const int64_t begin = coll->kind == DC__COLL_REDUCE ? item->ranges[rank].begin : 0;
    if (bytes > 0) {
      memcpy(packed, dc__bytes_at(item->send, begin, item->dtype), (size_t)bytes);
      packed += bytes;
    }
  }
  return packed;
}

static void external_unpack_parts(const dc__coll *coll, int32_t world, const char *packed) {
  for (int32_t r = 0; r < world; r++) {
    for (int32_t i = 0; i < coll->count; i++) {
      const dc__coll_item *item = &coll->items[i];
      const int64_t bytes = dc__item_bytes(item, r);
      if (bytes > 0) {
        memcpy((char *)item->recv + item->ranges[r].begin * item_size(item), packed, (size_t)bytes);
        packed += bytes;
      }
    }
  }
}

/* Adds all ranks' contributions to this rank's parts, in the same order as every transport. */
static void add_parts(const dc__external *self, const dc__coll *coll, const char *packed, const void **sources) {
  const int64_t stride = part_bytes(coll, self->head.rank);
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    const int64_t count = item->ranges[self->head.rank].count;
    if (count == 0) {
      continue; /* packed may be NULL */
    }
    for (int32_t r = 0; r < self->head.world; r++) {
      sources[r] = packed + r * stride;
    }
    const dc__reduction sum = dc__item_reduction(item, item->recv, sources, self->head.world, count);
    dc__reduce(&sum);
    packed += dc__item_bytes(item, self->head.rank);
  }
}

/* Exchanges items of one type. */
static dc_status exchange_once(dc__external *self, const dc__coll *coll) {
  const int32_t world = self->head.world, rank = self->head.rank, dtype = coll->items[0].dtype;
  const int64_t size = (int64_t)dc_dtype_size(dtype), own = part_bytes(coll, rank);
  const bool reduce = coll->kind == DC__COLL_REDUCE;
  char *send, *recv, *table;
  int64_t whole = 0;
  for (int32_t r = 0; r < world; r++) {
    whole += part_bytes(coll, r);
  }
  if (whole == 0) {
    return DC_OK;
  }
  DC__TRY(dc__external_reserve_scratch(self, 0, reduce ? whole : own * world, &send));
  DC__TRY(dc__external_reserve_scratch(self, 1, reduce ? own * world : whole, &recv));
  DC__TRY(dc__external_reserve_scratch(self, 2, world * (int64_t)(2 * sizeof(int64_t) + sizeof(void *)), &table));
  int64_t *counts = (int64_t *)(void *)table;
  int64_t *send_counts = reduce ? counts : counts + world, *recv_counts = reduce ? counts + world : counts;
  for (int32_t r = 0; r < world; r++) {
    counts[r] = part_bytes(coll, r) / size; /* the part of each rank, and this rank's part, once for each rank */
    counts[world + r] = own / size;
  }
  char *end = send;
  for (int32_t r = 0; r < world; r++) {
    end = external_pack_parts(coll, reduce ? r : rank, end);
  }
  const dc_comm_callbacks *c = &self->callbacks;
  DC__TRY(dc__external_callback_begin(self, coll, "all_to_all"));
  DC__TRY(dc__external_callback_end(self, coll, c->all_to_all(send, send_counts, recv, recv_counts, dtype, c->user)));
  if (reduce) {
    add_parts(self, coll, recv, (const void **)(counts + 2 * world));
  } else {
    external_unpack_parts(coll, world, recv);
  }
  atomic_fetch_add(&self->head.wire_bytes, dc__received_bytes(coll, rank, world));
  return DC_OK;
}

/* One call for each type, in the order of their numbers. */
static dc_status exchange_by_dtype(dc__external *self, const dc__coll *coll) {
  for (int32_t dtype = DC_FLOAT32; dtype <= DC_INT64; dtype++) {
    dc__coll one = *coll;
    one.count = 0;
    for (int32_t i = 0; i < coll->count; i++) {
      if (coll->items[i].dtype == dtype) {
        one.items[one.count++] = coll->items[i];
      }
    }
    if (one.count > 0) {
      DC__TRY(exchange_once(self, &one));
    }
  }
  return DC_OK;
}

static bool is_ragged(const dc__external *self, const dc__coll *coll) {
  for (int32_t r = 1; r < self->head.world; r++) {
    if (part_bytes(coll, r) != part_bytes(coll, 0)) {
      return true;
    }
  }
  return false;
}

/* ---- without all_to_all ---- */

/* One call for the whole group: in the items' type if they have one in common, else in bytes. */
dc_status dc__external_gather(dc__external *self, const dc__coll *coll) {
  int32_t world = self->head.world;
  int64_t block = 0; /* bytes of a rank's packed part */
  if (self->callbacks.all_to_all != NULL && is_ragged(self, coll)) {
    return exchange_by_dtype(self, coll);
  }
  for (int32_t i = 0; i < coll->count; i++) {
    block += max_count(&coll->items[i], world) * item_size(&coll->items[i]);
  }
  if (block == 0) {
    return DC_OK;
  }
  char *send;
  char *recv;
  DC__TRY(dc__external_reserve_scratch(self, 0, block, &send));
  DC__TRY(dc__external_reserve_scratch(self, 1, block * world, &recv));
  int64_t pos = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    size_t bytes = (size_t)(item->ranges[self->head.rank].count * item_size(item));
    if (bytes > 0) {
      memcpy(send + pos, item->send, bytes);
    }
    pos += max_count(item, world) * item_size(item);
  }
  int32_t dtype = common_dtype(coll);
  const dc_comm_callbacks *c = &self->callbacks;
  int64_t count = block / (int64_t)dc_dtype_size(dtype);
  DC__TRY(dc__external_callback_begin(self, coll, "all_gather"));
  DC__TRY(dc__external_callback_end(self, coll, c->all_gather(send, recv, count, dtype, c->user)));
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
  }
  atomic_fetch_add(&self->head.wire_bytes, block * (world - 1));
  return DC_OK;
}

/* The type in which the caller's library adds. */
static int32_t external_sum_dtype(const dc__coll_item *item) {
  return item->dtype == DC_FLOAT16 || item->dtype == DC_BFLOAT16 ? DC_FLOAT32 : item->dtype;
}

/* Rank-major: block r holds this rank's contribution to what rank r receives. Padding is zero. */
static void pack_sends(const dc__external *self, const dc__coll *coll, int32_t dtype, char *send) {
  int64_t size = (int64_t)dc_dtype_size(dtype);
  for (int32_t r = 0; r < self->head.world; r++) {
    for (int32_t i = 0; i < coll->count; i++) {
      const dc__coll_item *item = &coll->items[i];
      if (external_sum_dtype(item) == dtype) {
        dc__range range = item->ranges[r];
        int64_t padded = max_count(item, self->head.world);
        dc__cast(send, dtype, (const char *)item->send + range.begin * item_size(item), item->dtype, range.count);
        memset(send + range.count * size, 0, (size_t)((padded - range.count) * size));
        send += padded * size;
      }
    }
  }
}

static void unpack_sums(const dc__external *self, const dc__coll *coll, int32_t dtype, char *recv) {
  int64_t size = (int64_t)dc_dtype_size(dtype);
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    if (external_sum_dtype(item) == dtype) {
      int64_t count = item->ranges[self->head.rank].count;
      const void *source = recv;
      if (item->reduce_op == DC_MEAN) {
        dc__divide(recv, dtype, count, self->head.world);
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
    }
  }
}

static dc_status reduce_dtype(dc__external *self, const dc__coll *coll, int32_t dtype) {
  int64_t block = 0; /* elements */
  for (int32_t i = 0; i < coll->count; i++) {
    block += external_sum_dtype(&coll->items[i]) == dtype ? max_count(&coll->items[i], self->head.world) : 0;
  }
  if (block == 0) {
    return DC_OK;
  }
  char *send;
  char *recv;
  int64_t bytes = block * (int64_t)dc_dtype_size(dtype);
  DC__TRY(dc__external_reserve_scratch(self, 0, bytes * self->head.world, &send));
  DC__TRY(dc__external_reserve_scratch(self, 1, bytes, &recv));
  pack_sends(self, coll, dtype, send);
  const dc_comm_callbacks *c = &self->callbacks;
  DC__TRY(dc__external_callback_begin(self, coll, "reduce_scatter"));
  DC__TRY(dc__external_callback_end(self, coll, c->reduce_scatter(send, recv, block, dtype, c->user)));
  unpack_sums(self, coll, dtype, recv);
  atomic_fetch_add(&self->head.wire_bytes, bytes * (self->head.world - 1));
  return DC_OK;
}

dc_status dc__external_reduce(dc__external *self, const dc__coll *coll) {
  if (self->callbacks.all_to_all != NULL) {
    return exchange_by_dtype(self, coll);
  }
  for (int32_t dtype = DC_FLOAT32; dtype <= DC_INT64; dtype++) {
    DC__TRY(reduce_dtype(self, coll, dtype)); /* does nothing for a type that no item is summed in */
  }
  return DC_OK;
}
