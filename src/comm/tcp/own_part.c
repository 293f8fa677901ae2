/* The work of a collective on the rank itself: its own copy, and the sum of the received parts. */
#include <string.h>

#include "comm/tcp/collective.h"
#include "comm/windows.h"
#include "kernels/kernels.h"

int64_t dc__tcp_part_bytes(const dc__coll *coll, int32_t rank) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    bytes += dc__item_stride(&coll->items[i], rank);
  }
  return bytes;
}

void dc__tcp_copy_own(const dc__tcp *self, const dc__coll *coll) {
  const int32_t me = self->head.rank;
  const bool all_to_all = coll->kind == DC__COLL_ALL_TO_ALL;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    const dc__range place = item->ranges[all_to_all ? self->head.world + me : me];
    const int64_t bytes = dc__item_bytes(item, me);
    if (bytes == 0) {
      continue; /* the tensors may be NULL */
    }
    const void *from = dc__bytes_at(item->send, all_to_all ? item->ranges[me].begin : 0, item->dtype);
    char *to = (char *)item->recv + place.begin * (int64_t)dc_dtype_size(item->dtype);
    if (to != from) {
      memcpy(to, from, (size_t)bytes);
    }
  }
}

void dc__tcp_reduce_own(const dc__tcp *self, const dc__coll *coll) {
  int32_t me = self->head.rank;
  int64_t part = dc__tcp_part_bytes(coll, me);
  int64_t pos = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    const void *src[DC__COMM_MAX_WORLD];
    for (int32_t r = 0; r < self->head.world; r++) {
      src[r] = r == me ? dc__bytes_at(item->send, item->ranges[me].begin, item->dtype) : self->scratch + r * part + pos;
    }
    if (item->ranges[me].count > 0) {
      const dc__reduction sum = dc__item_reduction(item, item->recv, src, self->head.world, item->ranges[me].count);
      dc__reduce(&sum);
    }
    pos += dc__item_stride(item, me);
  }
}
