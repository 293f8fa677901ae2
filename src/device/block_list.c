/* Best-fit allocation, with merging of free neighbours. Beside the headers only the map of used blocks takes memory. */
#include "device/block_list.h"

#include <string.h>

#include "device/poison.h"

_Static_assert(sizeof(dc__arena_block) <= DC__RECORD_BYTES, "records hold headers");

void dc__block_list_init(dc__block_list *self) {
  self->retired_tail = &self->retired;
}

void dc__block_list_destroy(dc__block_list *self) {
  dc__record_pool_destroy(&self->records);
  dc__map_clear(&self->used);
}

/* ---- lists ---- */

static void block_list_retire(dc__block_list *self, dc__arena_block *b) {
  b->next = NULL;
  b->link = self->retired_tail;
  *b->link = b;
  self->retired_tail = &b->next;
  dc__block_tree_add(&self->retired_by_size, b);
}

static void block_list_unretire(dc__block_list *self, dc__arena_block *b) {
  *b->link = b->next;
  *(b->next == NULL ? &self->retired_tail : &b->next->link) = b->link;
  dc__block_tree_remove(&self->retired_by_size, b);
}

/* Neighbours in memory have keys close to each other, whose slots dc__map puts side by side. */
static int64_t block_key(const void *ptr) {
  return (int64_t)((uintptr_t)ptr / DC__BLOCK_ALIGNMENT);
}

/* ---- blocks ---- */

/* Merges b with its right neighbour, which is in no list. */
static void block_merge_right(dc__block_list *self, dc__arena_block *b) {
  dc__arena_block *right = b->right;
  b->bytes += right->bytes;
  b->right = right->right;
  if (b->right != NULL) {
    b->right->left = b;
  }
  dc__record_pool_free(&self->records, right);
}

/* Makes a used or retired block free, once it is out of its list, and merges it with free neighbours. */
static void block_list_make_free(dc__block_list *self, dc__arena_block *b) {
  self->used_bytes -= (int64_t)b->bytes;
  if (!self->stream_ordered) {
    POISON(b->ptr, b->bytes);
  }
  if (b->right != NULL && b->right->is_free) {
    dc__block_tree_remove(&self->free, b->right);
    block_merge_right(self, b);
  }
  if (b->left != NULL && b->left->is_free) {
    b = b->left;
    dc__block_tree_remove(&self->free, b);
    block_merge_right(self, b);
  }
  b->is_free = true;
  dc__block_tree_add(&self->free, b);
}

/* Cuts a block to size and returns the rest, which is in no list. NULL if there is no rest or no header for it; then
 * the block keeps its size. */
static dc__arena_block *block_split(dc__block_list *self, dc__arena_block *b, size_t bytes) {
  dc__arena_block *rest = b->bytes > bytes ? dc__record_pool_alloc(&self->records) : NULL;
  if (rest != NULL) {
    *rest = (dc__arena_block){.left = b, .right = b->right, .ptr = b->ptr + bytes, .bytes = b->bytes - bytes};
    if (rest->right != NULL) {
      rest->right->left = rest;
    }
    b->right = rest;
    b->bytes = bytes;
  }
  return rest;
}

/* Whether all events of a block have passed. If the first has not, the second need not be queried. */
static bool block_events_passed(dc__arena_block *b) {
  for (int i = 0; i < 2; i++) {
    if (b->after[i] != NULL && !dc__event_passed(b->after[i])) {
      return false;
    }
    b->after[i] = NULL;
  }
  return true;
}

/* ---- in and out ---- */

void dc__block_list_add(dc__block_list *self, dc__arena_block *new_block, void *ptr, size_t bytes) {
  new_block->ptr = ptr;
  new_block->bytes = bytes;
  new_block->is_free = true;
  POISON(ptr, bytes);
  dc__block_tree_add(&self->free, new_block);
}

void dc__block_list_remove(dc__block_list *self, dc__arena_block *whole) {
  dc__block_tree_remove(&self->free, whole);
  dc__record_pool_free(&self->records, whole);
}

/* Cannot fail: dc__block_list_reserve() has reserved the entry. */
static dc__arena_block *block_list_mark_used(dc__block_list *self, dc__arena_block *b) {
  (void)dc__map_put(&self->used, block_key(b->ptr), b);
  return b;
}

bool dc__block_list_reserve(dc__block_list *self) {
  return dc__map_reserve(&self->used);
}

dc__arena_block *dc__block_list_alloc(dc__block_list *self, size_t bytes) {
  dc__arena_block *b = dc__block_tree_best_fit(&self->free, bytes, true);
  if (b == NULL) {
    return NULL;
  }
  dc__block_tree_remove(&self->free, b);
  b->is_free = false;
  dc__arena_block *rest = block_split(self, b, bytes);
  if (rest != NULL) {
    rest->is_free = true;
    dc__block_tree_add(&self->free, rest);
  }
  self->used_bytes += (int64_t)b->bytes;
  return block_list_mark_used(self, b);
}

dc__arena_block *dc__block_list_alloc_retired(dc__block_list *self, size_t bytes, dc_event *after[2]) {
  dc__arena_block *b = dc__block_tree_best_fit(&self->retired_by_size, bytes, false);
  if (b == NULL) {
    return NULL;
  }
  memcpy(after, b->after, sizeof b->after);
  block_list_unretire(self, b);
  dc__arena_block *rest = block_split(self, b, bytes);
  if (rest != NULL) {
    memcpy(rest->after, after, sizeof rest->after);
    block_list_retire(self, rest);
  }
  return block_list_mark_used(self, b);
}

void dc__block_list_free(dc__block_list *self, const void *ptr, dc_event *after_a, dc_event *after_b) {
  dc__arena_block *b = dc__map_get(&self->used, block_key(ptr));
  if (b == NULL || b->ptr != ptr) {
    return;
  }
  dc__map_remove(&self->used, block_key(ptr));
  b->after[0] = after_a;
  b->after[1] = after_b;
  if (block_events_passed(b)) {
    block_list_make_free(self, b);
  } else {
    block_list_retire(self, b);
  }
}

void dc__block_list_poll(dc__block_list *self, bool all) {
  for (dc__arena_block *b = self->retired, *next; b != NULL; b = next) {
    next = b->next;
    if (block_events_passed(b)) {
      block_list_unretire(self, b);
      block_list_make_free(self, b);
    } else if (!all) {
      return;
    }
  }
}

void dc__block_list_forget_event(dc__block_list *self, const dc_event *event) {
  for (dc__arena_block *b = self->retired; b != NULL; b = b->next) {
    for (int i = 0; i < 2; i++) {
      b->after[i] = b->after[i] == event ? NULL : b->after[i];
    }
  }
}
