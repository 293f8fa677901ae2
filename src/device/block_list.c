/* Best fit, with merging; lists that need no memory of their own but headers. */
#include "device/block_list.h"

#include <string.h>

#include "device/poison.h"

enum { FIRST_SLOTS = 64 };

_Static_assert(sizeof(dc__arena_block) <= DC__RECORD_BYTES, "records hold headers");

dc_status dc__block_list_init(dc__block_list *self) {
  self->used = dc__calloc(FIRST_SLOTS, sizeof(*self->used));
  self->slot_count = FIRST_SLOTS;
  self->retired_tail = &self->retired;
  return self->used == NULL ? DC_E_NO_MEMORY : DC_OK;
}

void dc__block_list_destroy(dc__block_list *self) {
  dc__record_pool_destroy(&self->records);
  dc__free(self->used);
}

/* ---- lists ---- */

static void list_add(dc__arena_block **head, dc__arena_block *b) {
  b->next = *head;
  b->link = head;
  if (*head != NULL) {
    (*head)->link = &b->next;
  }
  *head = b;
}

static void list_remove(dc__arena_block *b) {
  *b->link = b->next;
  if (b->next != NULL) {
    b->next->link = b->link;
  }
}

static void block_list_retire(dc__block_list *self, dc__arena_block *b) {
  list_add(self->retired_tail, b);
  self->retired_tail = &b->next;
  dc__block_tree_add(&self->retired_by_size, b);
}

static void block_list_unretire(dc__block_list *self, dc__arena_block *b) {
  if (b->next == NULL) {
    self->retired_tail = b->link;
  }
  list_remove(b);
  dc__block_tree_remove(&self->retired_by_size, b);
}

static dc__arena_block **slot_of(const dc__block_list *self, const void *ptr) {
  uint64_t hash = (uint64_t)(uintptr_t)ptr / DC__BLOCK_ALIGNMENT * UINT64_C(0x9e3779b97f4a7c15);
  return &self->used[(hash >> 32) & (self->slot_count - 1)];
}

/* Keeps the lists of used blocks short. Without memory they stay longer, but correct. */
static void grow_slots(dc__block_list *self) {
  dc__arena_block **before = self->used;
  size_t count = self->slot_count;
  dc__arena_block **after = dc__calloc(count * 2, sizeof(*after));
  if (after == NULL) {
    return;
  }
  self->used = after;
  self->slot_count = count * 2;
  for (size_t i = 0; i < count; i++) {
    for (dc__arena_block *b = before[i], *next; b != NULL; b = next) {
      next = b->next;
      list_add(slot_of(self, b->ptr), b);
    }
  }
  dc__free(before);
}

/* ---- blocks ---- */

/* Swallows b's right neighbour, which is in no list. */
static void block_merge_right(dc__block_list *self, dc__arena_block *b) {
  dc__arena_block *right = b->right;
  b->bytes += right->bytes;
  b->right = right->right;
  if (b->right != NULL) {
    b->right->left = b;
  }
  dc__record_pool_free(&self->records, right);
}

/* A used or retired block, in no list any more, becomes free. */
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

/* Cuts a block to size; the rest is in no list. NULL: there is none, or no header for it, and the block keeps all. */
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

/* Whether no event holds a retired block any more. Once one event has not passed, later ones need not be queried. */
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

static dc__arena_block *block_list_mark_used(dc__block_list *self, dc__arena_block *b) {
  if (++self->used_count > self->slot_count) {
    grow_slots(self);
  }
  list_add(slot_of(self, b->ptr), b);
  return b;
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
  dc__arena_block *b = *slot_of(self, ptr);
  while (b != NULL && b->ptr != ptr) {
    b = b->next;
  }
  if (b == NULL) {
    return;
  }
  list_remove(b);
  self->used_count--;
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
