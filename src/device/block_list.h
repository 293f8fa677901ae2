/* An arena's blocks. Their headers lie apart from them, since the host cannot read every device's memory. Free blocks
 * are found by size and used ones by address. Retired blocks were freed while queued work may still use them; they are
 * found by size, and by age. The arena does the locking. */
#ifndef DC_DEVICE_BLOCK_LIST_H
#define DC_DEVICE_BLOCK_LIST_H

#include "device/block_tree.h"
#include "device/device.h"
#include "device/record_pool.h"

struct dc__arena_block {
  struct dc__arena_block *next;  /* retired: in the list by age */
  struct dc__arena_block **link; /* the pointer to it in that list */
  struct dc__arena_block *left;  /* neighbours in the chunk; the leftmost keeps its header whatever is cut or merged */
  struct dc__arena_block *right;
  unsigned char *ptr;
  size_t bytes;
  dc_event *after[2];  /* retired: events that must pass before reuse */
  dc__block_node node; /* free or retired: by its size */
  bool is_free;
};

typedef struct dc__block_list {
  dc__block_tree free;
  dc__block_tree retired_by_size;
  dc__arena_block *retired;       /* the oldest first */
  dc__arena_block **retired_tail; /* where the next one is put */
  dc__map used;                   /* by address */
  int64_t used_bytes;             /* including retired blocks */
  dc__record_pool records;
  bool stream_ordered; /* earlier work of the stream may still use a free block */
} dc__block_list;

void dc__block_list_init(dc__block_list *self);
void dc__block_list_destroy(dc__block_list *self);

/* Adds memory as one free block, whose header is one of the records; and removes it, while it is one free block. */
void dc__block_list_add(dc__block_list *self, dc__arena_block *new_block, void *ptr, size_t bytes);
void dc__block_list_remove(dc__block_list *self, dc__arena_block *whole);

/* Reserves an entry for one more used block: call before each allocation. False if there is no memory, last error
 * set. */
bool dc__block_list_reserve(dc__block_list *self);
/* Takes the block that fits best; NULL if there is none. `bytes` is a multiple of the alignment. Among equal blocks,
 * that is the free one that was freed last, or the oldest retired one. `after` receives the events that must pass
 * before its use. */
dc__arena_block *dc__block_list_alloc(dc__block_list *self, size_t bytes);
dc__arena_block *dc__block_list_alloc_retired(dc__block_list *self, size_t bytes, dc_event *after[2]);
/* Frees the block now, or retires it until the events (NULL: none) have passed. Pass the later event first: it is
 * queried first. */
void dc__block_list_free(dc__block_list *self, const void *ptr, dc_event *after_a, dc_event *after_b);
/* Forgets an event that has passed, so that it is not queried again. */
void dc__block_list_forget_event(dc__block_list *self, const dc_event *event);
/* Frees retired blocks whose events have passed: all of them, or only those older than the first that must stay, which
 * is nearly as good. */
void dc__block_list_poll(dc__block_list *self, bool all);

#endif
