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

int64_t dc__received_bytes(const dc__coll *coll, int32_t rank, int32_t world) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    int64_t own = coll->kind == DC__COLL_BROADCAST ? (coll->root == rank ? item->total : 0) : item->ranges[rank].count;
    int64_t count = coll->kind == DC__COLL_REDUCE ? own * (world - 1) : item->total - own;
    bytes += count * (int64_t)dc_dtype_size(item->dtype);
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
