/* A rank's part of a group: its ranges of the items one after the other, each begun on a cache line. Transports that
 * move parts in rounds cut them into windows of bytes, and so each rank knows what every other one moves. */
#ifndef DC_COMM_WINDOWS_H
#define DC_COMM_WINDOWS_H

#include "comm/host_transport.h"

enum { DC__PART_ALIGN = 64 };

typedef struct dc__window_slice {
  int64_t begin; /* elements from the beginning of the range */
  int64_t count;
  int64_t at; /* bytes from the beginning of the window */
} dc__window_slice;

/* Of one item, and with the gap behind it, which is how far the next item lies. */
int64_t dc__item_bytes(const dc__coll_item *item, int32_t rank);
int64_t dc__item_stride(const dc__coll_item *item, int32_t rank);
/* The largest part of all ranks. */
int64_t dc__max_part_bytes(const dc__coll *coll, int32_t world);
/* What of an item that lies `pos` bytes into its part falls into the window [lo, lo + size). */
dc__window_slice dc__window_intersect(const dc__coll_item *item, int32_t rank, int64_t pos, int64_t lo, int64_t size);

static inline const char *dc__bytes_at(const void *base, int64_t elements, int32_t dtype) {
  return (const char *)base + elements * (int64_t)dc_dtype_size(dtype);
}

#endif
