/* An arena's blocks. Their headers lie apart from them, because not every device's memory can be read by the host. A
 * block is in one list at a time: of free blocks (by size), of used ones (by address), or of retired ones, which were
 * given back while queued work may still use them. The arena locks. */
#ifndef DC_DEVICE_BLOCKS_H
#define DC_DEVICE_BLOCKS_H

#include "device/device.h"
#include "device/records.h"

enum { DC__BLOCK_ALIGNMENT = 256, DC__BLOCK_BINS = 64 };

typedef struct dc__block {
  struct dc__block *next;  /* in its list */
  struct dc__block **link; /* what points to it there */
  struct dc__block *left;  /* neighbours in the chunk; the leftmost keeps its header whatever is cut or merged */
  struct dc__block *right;
  unsigned char *ptr;
  size_t bytes;
  dc_event *after[2]; /* retired: must pass first */
  bool is_free;
} dc__block;

typedef struct dc__blocks {
  dc__block *bins[DC__BLOCK_BINS]; /* free blocks of [2^n, 2^(n+1)) * DC__BLOCK_ALIGNMENT bytes */
  dc__block *retired;              /* the oldest first */
  dc__block **youngest;            /* where the next one is put */
  dc__block **used;                /* slot_count lists by address */
  size_t slot_count;
  size_t used_count;
  int64_t used_bytes; /* retired ones too */
  dc__records records;
  bool in_order; /* what is free may be in use still, by work that comes before its next use */
} dc__blocks;

dc_status dc__blocks_init(dc__blocks *self);
void dc__blocks_end(dc__blocks *self);

/* Memory in a new block, whose header is one of the records; and out again, when it is one free block. */
void dc__blocks_add(dc__blocks *self, dc__block *fresh, void *ptr, size_t bytes);
void dc__blocks_remove(dc__blocks *self, dc__block *whole);

/* Of a multiple of the alignment; NULL: there is none. Of the retired blocks it is the oldest one that fits best, and
 * `after` says what must pass before it is used. */
dc__block *dc__blocks_take(dc__blocks *self, size_t bytes);
dc__block *dc__blocks_take_retired(dc__blocks *self, size_t bytes, dc_event *after[2]);
/* Free, or retired until the events (NULL: none) have passed. The later one comes first, being asked first. */
void dc__blocks_give(dc__blocks *self, const void *ptr, dc_event *after_a, dc_event *after_b);
/* The event has passed, and is not asked any more. */
void dc__blocks_forget(dc__blocks *self, const dc_event *event);
/* Frees retired blocks: all that may be, or in their order up to the first that may not, which is nearly the same. */
void dc__blocks_poll(dc__blocks *self, bool all);

#endif
