/* Cuts the ranks' parts of a group into windows. */
#include "comm/windows.h"

int64_t dc__item_bytes(const dc__coll_item *item, int32_t rank) {
  return item->ranges[rank].count * (int64_t)dc_dtype_size(item->dtype);
}

int64_t dc__item_stride(const dc__coll_item *item, int32_t rank) {
  return (dc__item_bytes(item, rank) + DC__PART_ALIGN - 1) & ~(int64_t)(DC__PART_ALIGN - 1);
}

int64_t dc__max_part_bytes(const dc__coll *coll, int32_t world) {
  int64_t largest = 0;
  for (int32_t r = 0; r < world; r++) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < coll->count; i++) {
      bytes += dc__item_stride(&coll->items[i], r);
    }
    largest = bytes > largest ? bytes : largest;
  }
  return largest;
}

static int64_t received_of_item(const dc__coll *coll, const dc__coll_item *item, int32_t rank, int32_t world) {
  int64_t count = 0;
  switch (coll->kind) {
    case DC__COLL_BROADCAST:
      count = coll->root == rank ? 0 : item->total;
      break;
    case DC__COLL_REDUCE:
      count = item->ranges[rank].count * (world - 1);
      break;
    case DC__COLL_GATHER:
      count = item->total - item->ranges[rank].count;
      break;
    default: /* all-to-all */
      for (int32_t r = 0; r < world; r++) {
        count += r == rank ? 0 : item->ranges[world + r].count;
      }
  }
  return count * (int64_t)dc_dtype_size(item->dtype);
}

int64_t dc__received_bytes(const dc__coll *coll, int32_t rank, int32_t world) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    bytes += received_of_item(coll, &coll->items[i], rank, world);
  }
  return bytes;
}

dc__window_slice dc__window_intersect(const dc__coll_item *item, int32_t rank, int64_t pos, int64_t lo, int64_t size) {
  int64_t element = (int64_t)dc_dtype_size(item->dtype);
  int64_t bytes = dc__item_bytes(item, rank);
  int64_t from = lo > pos ? lo - pos : 0;
  int64_t to = lo + size - pos < bytes ? lo + size - pos : bytes;
  return from < to ? (dc__window_slice){from / element, (to - from) / element, pos + from - lo}
                   : (dc__window_slice){0, 0, 0};
}
