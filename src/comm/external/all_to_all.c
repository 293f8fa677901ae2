/* The caller's all-to-all through the callbacks. The ranks first exchange the sizes of all parts. If the caller has no
 * function all_to_all, each rank gathers all data of all ranks, and takes its parts. */
#include <string.h>

#include "comm/external/external.h"
#include "comm/windows.h"

/* One row for each rank, and then a copy of this rank's row: the elements that it sends to each rank, then those that
 * it expects from each. */
static int64_t *counts_of(const dc__external *self, int32_t rank) {
  return (int64_t *)(void *)self->scratch[2] + rank * 2 * (int64_t)self->head.world;
}

dc_status dc__external_exchange_counts(dc__external *self, const dc__coll *coll) {
  const int32_t world = self->head.world;
  const int64_t row = 2 * (int64_t)world;
  char *memory;
  DC__TRY(dc__external_reserve_scratch(self, 2, row * (world + 1) * (int64_t)sizeof(int64_t), &memory));
  int64_t *own = counts_of(self, world);
  dc__coll_list_counts(coll, world, own);
  const dc_comm_callbacks *c = &self->callbacks;
  DC__TRY(dc__external_callback_begin(self, coll, "all_gather"));
  return dc__external_callback_end(self, coll, c->all_gather(own, counts_of(self, 0), row, DC_INT64, c->user));
}

dc_status dc__external_compare_counts(const dc__external *self, const dc__coll *coll) {
  return dc__coll_compare_counts(coll, self->head.world, counts_of(self, 0));
}

static int64_t sum_of(const int64_t *counts, int32_t length) {
  int64_t sum = 0;
  for (int32_t i = 0; i < length; i++) {
    sum += counts[i];
  }
  return sum;
}

static dc_status call_all_to_all(dc__external *self, const dc__coll *coll) {
  const int64_t *own = counts_of(self, self->head.rank);
  const dc_comm_callbacks *c = &self->callbacks;
  const dc__coll_item *item = &coll->items[0];
  const void *send = item->send != NULL ? item->send : own; /* not NULL: the callee may add an offset of 0 */
  void *recv = item->recv != NULL ? item->recv : counts_of(self, 0);
  DC__TRY(dc__external_callback_begin(self, coll, "all_to_all"));
  DC__TRY(dc__external_callback_end(self, coll,
                                    c->all_to_all(send, own, recv, own + self->head.world, item->dtype, c->user)));
  atomic_fetch_add(&self->head.wire_bytes, dc__received_bytes(coll, self->head.rank, self->head.world));
  return DC_OK;
}

/* `most` is the largest number of elements that any rank sends. */
static dc_status call_all_gather(dc__external *self, const dc__coll *coll, int64_t most) {
  const dc_comm_callbacks *c = &self->callbacks;
  const dc__coll_item *item = &coll->items[0];
  const int32_t world = self->head.world, rank = self->head.rank;
  const int64_t size = (int64_t)dc_dtype_size(item->dtype);
  char *send, *all;
  DC__TRY(dc__external_reserve_scratch(self, 0, most * size, &send));
  DC__TRY(dc__external_reserve_scratch(self, 1, most * size * world, &all));
  if (item->total > 0) {
    memcpy(send, item->send, (size_t)(item->total * size));
  }
  DC__TRY(dc__external_callback_begin(self, coll, "all_gather"));
  DC__TRY(dc__external_callback_end(self, coll, c->all_gather(send, all, most, item->dtype, c->user)));
  for (int32_t from = 0; from < world; from++) {
    const dc__range place = item->ranges[world + from];
    const int64_t begin = from * most + sum_of(counts_of(self, from), rank);
    if (place.count > 0) {
      memcpy((char *)item->recv + place.begin * size, all + begin * size, (size_t)(place.count * size));
    }
  }
  atomic_fetch_add(&self->head.wire_bytes, most * size * (world - 1));
  return DC_OK;
}

dc_status dc__external_all_to_all(dc__external *self, const dc__coll *coll) {
  int64_t most = 0;
  for (int32_t r = 0; r < self->head.world; r++) {
    const int64_t sent = sum_of(counts_of(self, r), self->head.world);
    most = sent > most ? sent : most;
  }
  if (most == 0) {
    return DC_OK;
  }
  return self->callbacks.all_to_all != NULL ? call_all_to_all(self, coll) : call_all_gather(self, coll, most);
}
