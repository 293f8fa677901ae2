/* A rank's part of a group is its ranges of all items, back to back, each aligned to a cache line. Transports that move
 * parts in rounds cut them into windows of bytes, so each rank knows what every peer moves in a round. */
#ifndef DC_COMM_WINDOWS_H
#define DC_COMM_WINDOWS_H

#include "comm/host_transport.h"
#include "kernels/kernels.h"

enum { DC__PART_ALIGN = 64 };

typedef struct dc__window_slice {
  int64_t begin; /* elements from the beginning of the range */
  int64_t count;
  int64_t at; /* bytes from the beginning of the window */
} dc__window_slice;

/* Bytes of a rank's range of an item, without and with the padding before the next item. */
int64_t dc__item_bytes(const dc__coll_item *item, int32_t rank);
int64_t dc__item_stride(const dc__coll_item *item, int32_t rank);
/* Bytes of the largest part of all ranks, with padding. */
int64_t dc__max_part_bytes(const dc__coll *coll, int32_t world);
/* Bytes of data that a rank receives from the others, where each part goes directly to the rank that needs it. */
int64_t dc__received_bytes(const dc__coll *coll, int32_t rank, int32_t world);
/* The slice of an item, at `pos` bytes into its part, that falls into the window [lo, lo + size). */
dc__window_slice dc__window_intersect(const dc__coll_item *item, int32_t rank, int64_t pos, int64_t lo, int64_t size);

/* The reduction of `count` elements of an item from all `n` sources to dst. */
static inline dc__reduction dc__item_reduction(const dc__coll_item *item, void *dst, const void *const *src, int32_t n,
                                               int64_t count) {
  return (dc__reduction){.dst = dst,
                         .src = src,
                         .count = count,
                         .dst_dtype = item->recv_dtype,
                         .src_dtype = item->dtype,
                         .n = n,
                         .mean = item->reduce_op == DC_MEAN,
                         .accumulate = item->accumulate != 0};
}

static inline const char *dc__bytes_at(const void *base, int64_t elements, int32_t dtype) {
  return (const char *)base + elements * (int64_t)dc_dtype_size(dtype);
}

#endif
