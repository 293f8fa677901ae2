/* Best fit, with merging; lists that need no memory of their own but headers. */
#include "device/blocks.h"

#include <string.h>

#include "device/poison.h"

enum { FIRST_SLOTS = 64 };

_Static_assert(sizeof(dc__block) <= DC__RECORD, "records hold headers");

dc_status dc__blocks_init(dc__blocks *self) {
  self->used = dc__calloc(FIRST_SLOTS, sizeof(*self->used));
  self->slot_count = FIRST_SLOTS;
  self->youngest = &self->retired;
  return self->used == NULL ? DC_E_NO_MEMORY : DC_OK;
}

void dc__blocks_end(dc__blocks *self) {
  dc__records_free(&self->records);
  dc__free(self->used);
}

/* ---- lists ---- */

static void list_add(dc__block **head, dc__block *b) {
  b->next = *head;
  b->link = head;
  if (*head != NULL) {
    (*head)->link = &b->next;
  }
  *head = b;
}

static void list_remove(dc__block *b) {
  *b->link = b->next;
  if (b->next != NULL) {
    b->next->link = b->link;
  }
}

static void retire(dc__blocks *self, dc__block *b) {
  list_add(self->youngest, b);
  self->youngest = &b->next;
}

static void unretire(dc__blocks *self, dc__block *b) {
  if (b->next == NULL) {
    self->youngest = b->link;
  }
  list_remove(b);
}

static int bin_of(size_t bytes) {
  return 63 - __builtin_clzll((unsigned long long)(bytes / DC__BLOCK_ALIGNMENT));
}

static dc__block **slot_of(const dc__blocks *self, const void *ptr) {
  uint64_t hash = (uint64_t)(uintptr_t)ptr / DC__BLOCK_ALIGNMENT * UINT64_C(0x9e3779b97f4a7c15);
  return &self->used[(hash >> 32) & (self->slot_count - 1)];
}

/* Keeps the lists of used blocks short. Without memory they stay longer, and right. */
static void grow_slots(dc__blocks *self) {
  dc__block **before = self->used;
  size_t count = self->slot_count;
  dc__block **after = dc__calloc(count * 2, sizeof(*after));
  if (after == NULL) {
    return;
  }
  self->used = after;
  self->slot_count = count * 2;
  for (size_t i = 0; i < count; i++) {
    for (dc__block *b = before[i], *next; b != NULL; b = next) {
      next = b->next;
      list_add(slot_of(self, b->ptr), b);
    }
  }
  dc__free(before);
}

/* ---- blocks ---- */

static dc__block *best_fit(dc__blocks *self, size_t bytes) {
  for (int bin = bin_of(bytes); bin < DC__BLOCK_BINS; bin++) {
    dc__block *best = NULL;
    for (dc__block *b = self->bins[bin]; b != NULL; b = b->next) {
      if (b->bytes >= bytes && (best == NULL || b->bytes < best->bytes)) {
        best = b;
      }
    }
    if (best != NULL) {
      return best;
    }
  }
  return NULL;
}

/* Swallows b's right neighbour, which is in no list. */
static void merge_right(dc__blocks *self, dc__block *b) {
  dc__block *right = b->right;
  b->bytes += right->bytes;
  b->right = right->right;
  if (b->right != NULL) {
    b->right->left = b;
  }
  dc__records_give(&self->records, right);
}

/* A used or retired block, in no list any more, becomes free. */
static void make_free(dc__blocks *self, dc__block *b) {
  self->used_bytes -= (int64_t)b->bytes;
  if (!self->in_order) {
    POISON(b->ptr, b->bytes);
  }
  if (b->right != NULL && b->right->is_free) {
    list_remove(b->right);
    merge_right(self, b);
  }
  if (b->left != NULL && b->left->is_free) {
    b = b->left;
    list_remove(b);
    merge_right(self, b);
  }
  b->is_free = true;
  list_add(&self->bins[bin_of(b->bytes)], b);
}

/* Cuts a block to size; the rest is in no list. NULL: there is none, or no header for it, and the block keeps all. */
static dc__block *cut(dc__blocks *self, dc__block *b, size_t bytes) {
  dc__block *rest = b->bytes > bytes ? dc__records_take(&self->records) : NULL;
  if (rest != NULL) {
    *rest = (dc__block){.left = b, .right = b->right, .ptr = b->ptr + bytes, .bytes = b->bytes - bytes};
    if (rest->right != NULL) {
      rest->right->left = rest;
    }
    b->right = rest;
    b->bytes = bytes;
  }
  return rest;
}

/* Says whether no event holds a retired block any more. Behind one that does, nobody need be asked. */
static bool passed(dc__block *b) {
  for (int i = 0; i < 2; i++) {
    if (b->after[i] != NULL && !dc__event_passed(b->after[i])) {
      return false;
    }
    b->after[i] = NULL;
  }
  return true;
}

/* ---- in and out ---- */

void dc__blocks_add(dc__blocks *self, dc__block *fresh, void *ptr, size_t bytes) {
  fresh->ptr = ptr;
  fresh->bytes = bytes;
  fresh->is_free = true;
  POISON(ptr, bytes);
  list_add(&self->bins[bin_of(bytes)], fresh);
}

void dc__blocks_remove(dc__blocks *self, dc__block *whole) {
  list_remove(whole);
  dc__records_give(&self->records, whole);
}

static dc__block *hand_out(dc__blocks *self, dc__block *b) {
  if (++self->used_count > self->slot_count) {
    grow_slots(self);
  }
  list_add(slot_of(self, b->ptr), b);
  return b;
}

dc__block *dc__blocks_take(dc__blocks *self, size_t bytes) {
  dc__block *b = best_fit(self, bytes);
  if (b == NULL) {
    return NULL;
  }
  list_remove(b);
  b->is_free = false;
  dc__block *rest = cut(self, b, bytes);
  if (rest != NULL) {
    rest->is_free = true;
    list_add(&self->bins[bin_of(rest->bytes)], rest);
  }
  self->used_bytes += (int64_t)b->bytes;
  return hand_out(self, b);
}

static dc__block *best_retired(const dc__blocks *self, size_t bytes) {
  dc__block *best = NULL;
  for (dc__block *b = self->retired; b != NULL; b = b->next) {
    if (b->bytes >= bytes && (best == NULL || b->bytes < best->bytes)) {
      best = b;
    }
  }
  return best;
}

dc__block *dc__blocks_take_retired(dc__blocks *self, size_t bytes, dc_event *after[2]) {
  dc__block *b = best_retired(self, bytes);
  if (b == NULL) {
    return NULL;
  }
  memcpy(after, b->after, sizeof b->after);
  unretire(self, b);
  dc__block *rest = cut(self, b, bytes);
  if (rest != NULL) {
    memcpy(rest->after, after, sizeof rest->after);
    retire(self, rest);
  }
  return hand_out(self, b);
}

void dc__blocks_give(dc__blocks *self, const void *ptr, dc_event *after_a, dc_event *after_b) {
  dc__block *b = *slot_of(self, ptr);
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
  if (passed(b)) {
    make_free(self, b);
  } else {
    retire(self, b);
  }
}

void dc__blocks_poll(dc__blocks *self, bool all) {
  for (dc__block *b = self->retired, *next; b != NULL; b = next) {
    next = b->next;
    if (passed(b)) {
      unretire(self, b);
      make_free(self, b);
    } else if (!all) {
      return;
    }
  }
}

void dc__blocks_forget(dc__blocks *self, const dc_event *event) {
  for (dc__block *b = self->retired; b != NULL; b = b->next) {
    for (int i = 0; i < 2; i++) {
      b->after[i] = b->after[i] == event ? NULL : b->after[i];
    }
  }
}
