/* Blocks of device memory, best-fit. Headers lie apart from the blocks, because not every device's memory can be
 * read by the host.
 *
 * A block is in one list at a time: of free blocks (by size), of used ones (by address), or of retired ones, which
 * the caller has freed but queued work may still use. */
#include "device/arena.h"

#include "device/poison.h"
#include "device/records.h"

enum { ALIGNMENT = 256, BINS = 64, FIRST_SLOTS = 64 };
static const size_t GROWTH = (size_t)4 << 20;
static const size_t CHUNK_UNIT = (size_t)2 << 20; /* a huge page */

typedef struct block {
  struct block *next;  /* in its list */
  struct block **link; /* what points to it there */
  struct block *left;  /* neighbours in the chunk */
  struct block *right;
  unsigned char *ptr;
  size_t bytes;
  dc_event *after[2]; /* retired: must pass first */
  bool is_free;
} block;

typedef struct chunk {
  struct chunk *next;
  block *first; /* the leftmost block keeps its header whatever is cut or merged */
  void *ptr;
  size_t bytes;
} chunk;

_Static_assert(sizeof(block) <= DC__RECORD && sizeof(chunk) <= DC__RECORD, "records hold both");

struct dc__arena {
  dc_device *device;
  dc__arena_source source;
  atomic_int refs;
  pthread_mutex_t mutex; /* all below */
  chunk *chunks;
  block *bins[BINS]; /* free blocks of [2^n, 2^(n+1)) * ALIGNMENT bytes */
  block *retired;
  block **used; /* slot_count lists by address */
  size_t slot_count;
  size_t used_count;
  dc__records records;
  dc__arena_stats stats;
};

/* ---- records ---- */

void *dc__arena_record(dc__arena *arena) {
  pthread_mutex_lock(&arena->mutex);
  void *taken = dc__records_take(&arena->records);
  pthread_mutex_unlock(&arena->mutex);
  return taken;
}

void dc__arena_record_free(dc__arena *arena, void *ptr) {
  pthread_mutex_lock(&arena->mutex);
  dc__records_give(&arena->records, ptr);
  pthread_mutex_unlock(&arena->mutex);
}

/* ---- lists ---- */

static void list_add(block **head, block *b) {
  b->next = *head;
  b->link = head;
  if (*head != NULL) {
    (*head)->link = &b->next;
  }
  *head = b;
}

static void list_remove(block *b) {
  *b->link = b->next;
  if (b->next != NULL) {
    b->next->link = b->link;
  }
}

static int bin_of(size_t bytes) {
  return 63 - __builtin_clzll((unsigned long long)(bytes / ALIGNMENT));
}

static block **slot_of(const dc__arena *arena, const void *ptr) {
  uint64_t hash = (uint64_t)(uintptr_t)ptr / ALIGNMENT * UINT64_C(0x9e3779b97f4a7c15);
  return &arena->used[(hash >> 32) & (arena->slot_count - 1)];
}

/* Keeps the lists of used blocks short. Without memory they stay longer, and right. */
static void grow_slots(dc__arena *arena) {
  block **before = arena->used;
  size_t count = arena->slot_count;
  block **after = dc__calloc(count * 2, sizeof(*after));
  if (after == NULL) {
    return;
  }
  arena->used = after;
  arena->slot_count = count * 2;
  for (size_t i = 0; i < count; i++) {
    for (block *b = before[i], *next; b != NULL; b = next) {
      next = b->next;
      list_add(slot_of(arena, b->ptr), b);
    }
  }
  dc__free(before);
}

/* ---- blocks ---- */

static block *best_fit(dc__arena *arena, size_t bytes) {
  for (int bin = bin_of(bytes); bin < BINS; bin++) {
    block *best = NULL;
    for (block *b = arena->bins[bin]; b != NULL; b = b->next) {
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
static void merge_right(dc__arena *arena, block *b) {
  block *right = b->right;
  b->bytes += right->bytes;
  b->right = right->right;
  if (b->right != NULL) {
    b->right->left = b;
  }
  dc__records_give(&arena->records, right);
}

/* A used or retired block, in no list any more, becomes free. */
static void make_free(dc__arena *arena, block *b) {
  arena->stats.used_bytes -= (int64_t)b->bytes;
  POISON(b->ptr, b->bytes);
  if (b->right != NULL && b->right->is_free) {
    list_remove(b->right);
    merge_right(arena, b);
  }
  if (b->left != NULL && b->left->is_free) {
    b = b->left;
    list_remove(b);
    merge_right(arena, b);
  }
  b->is_free = true;
  list_add(&arena->bins[bin_of(b->bytes)], b);
}

/* Cuts a free block to size and hands it out. */
static void make_used(dc__arena *arena, block *b, size_t bytes) {
  list_remove(b);
  b->is_free = false;
  block *rest = b->bytes > bytes ? dc__records_take(&arena->records) : NULL; /* without a header the block keeps all */
  if (rest != NULL) {
    *rest = (block){.left = b, .right = b->right, .ptr = b->ptr + bytes, .bytes = b->bytes - bytes, .is_free = true};
    if (rest->right != NULL) {
      rest->right->left = rest;
    }
    b->right = rest;
    b->bytes = bytes;
    list_add(&arena->bins[bin_of(rest->bytes)], rest);
  }
  if (++arena->used_count > arena->slot_count) {
    grow_slots(arena);
  }
  list_add(slot_of(arena, b->ptr), b);
  arena->stats.used_bytes += (int64_t)b->bytes;
}

/* Says whether no event holds a retired block any more. */
static bool passed(block *b) {
  for (int i = 0; i < 2; i++) {
    if (b->after[i] != NULL && dc__event_passed(b->after[i])) {
      b->after[i] = NULL;
    }
  }
  return b->after[0] == NULL && b->after[1] == NULL;
}

static void poll_retired(dc__arena *arena) {
  for (block *b = arena->retired, *next; b != NULL; b = next) {
    next = b->next;
    if (passed(b)) {
      list_remove(b);
      make_free(arena, b);
    }
  }
}

/* ---- chunks ---- */

static dc_status grow(dc__arena *arena, size_t bytes) {
  size_t size = ((bytes > GROWTH ? bytes : GROWTH) + CHUNK_UNIT - 1) / CHUNK_UNIT * CHUNK_UNIT;
  chunk *fresh = dc__records_take(&arena->records);
  block *whole = fresh == NULL ? NULL : dc__records_take(&arena->records);
  dc_status status = whole == NULL ? DC_E_NO_MEMORY : DC_OK;
  if (status == DC_OK) {
    status = arena->source.alloc(arena->source.user, size, &fresh->ptr);
  }
  if (status != DC_OK) {
    if (fresh != NULL) {
      dc__records_give(&arena->records, fresh);
    }
    if (whole != NULL) {
      dc__records_give(&arena->records, whole);
    }
    return status;
  }
  fresh->bytes = size;
  fresh->first = whole;
  fresh->next = arena->chunks;
  arena->chunks = fresh;
  whole->ptr = fresh->ptr;
  whole->bytes = size;
  whole->is_free = true;
  POISON(whole->ptr, size);
  list_add(&arena->bins[bin_of(size)], whole);
  arena->stats.chunk_bytes += (int64_t)size;
  arena->stats.chunk_allocations++;
  return DC_OK;
}

static void free_chunk(dc__arena *arena, chunk *c) {
  UNPOISON(c->ptr, c->bytes);
  arena->source.free(arena->source.user, c->ptr, c->bytes);
  arena->stats.chunk_bytes -= (int64_t)c->bytes;
}

/* Gives back the chunks without blocks; says whether there were any. */
static bool trim(dc__arena *arena) {
  bool any = false;
  for (chunk **link = &arena->chunks, *c = *link; c != NULL; c = *link) {
    if (!c->first->is_free || c->first->bytes != c->bytes) {
      link = &c->next;
      continue;
    }
    *link = c->next;
    list_remove(c->first);
    dc__records_give(&arena->records, c->first);
    free_chunk(arena, c);
    dc__records_give(&arena->records, c);
    any = true;
  }
  return any;
}

static dc_status device_alloc(void *user, size_t bytes, void **ptr) {
  dc_device *device = user;
  return device->ops->alloc(device, bytes, DC_MEMORY_DEVICE, ptr);
}

static void device_free(void *user, void *ptr, size_t bytes) {
  dc_device *device = user;
  device->ops->free(device, ptr, bytes, DC_MEMORY_DEVICE);
}

/* ---- the arena ---- */

dc_status dc__arena_create(dc_device *device, const dc__arena_source *source, dc__arena **arena) {
  dc__arena *self = dc__calloc(1, sizeof(*self));
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  self->used = dc__calloc(FIRST_SLOTS, sizeof(*self->used));
  if (self->used == NULL) {
    dc__free(self);
    return DC_E_NO_MEMORY;
  }
  self->slot_count = FIRST_SLOTS;
  self->device = dc__device_retain(device);
  self->source = source != NULL && source->alloc != NULL
                     ? *source
                     : (dc__arena_source){.alloc = device_alloc, .free = device_free, .user = device};
  atomic_init(&self->refs, 1);
  pthread_mutex_init(&self->mutex, NULL);
  *arena = self;
  return DC_OK;
}

dc__arena *dc__arena_retain(dc__arena *arena) {
  atomic_fetch_add_explicit(&arena->refs, 1, memory_order_relaxed);
  return arena;
}

bool dc__arena_is_others(const dc__arena *arena) {
  return dc__owner_is_other(&arena->device->owner);
}

void dc__arena_release(dc__arena *arena) {
  if (arena == NULL || atomic_fetch_sub_explicit(&arena->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  for (block *b = arena->retired; b != NULL; b = b->next) {
    for (int i = 0; i < 2; i++) {
      if (b->after[i] != NULL) {
        dc__event_wait(b->after[i], NULL);
      }
    }
  }
  for (chunk *c = arena->chunks; c != NULL; c = c->next) {
    free_chunk(arena, c);
  }
  if (arena->source.done != NULL) {
    arena->source.done(arena->source.user);
  }
  dc__records_free(&arena->records);
  dc__free(arena->used);
  pthread_mutex_destroy(&arena->mutex);
  dc__device_release(arena->device);
  dc__free(arena);
}

dc_status dc__arena_alloc(dc__arena *arena, size_t bytes, void **ptr) {
  if (bytes > SIZE_MAX / 4) {
    return dc__fail(DC_E_NO_MEMORY, "arena: no block can have %zu bytes", bytes);
  }
  size_t size = (bytes == 0 ? ALIGNMENT : bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  dc_status status = DC_OK;
  pthread_mutex_lock(&arena->mutex);
  poll_retired(arena);
  block *b = best_fit(arena, size);
  if (b == NULL) {
    status = grow(arena, size);
    if (status != DC_OK && trim(arena)) { /* what lies idle may be what is missing */
      status = grow(arena, size);
    }
    b = status == DC_OK ? best_fit(arena, size) : NULL;
  }
  if (b != NULL) {
    make_used(arena, b, size);
    UNPOISON(b->ptr, bytes);
    *ptr = b->ptr;
  }
  pthread_mutex_unlock(&arena->mutex);
  return status;
}

void dc__arena_free(dc__arena *arena, void *ptr, dc_event *after_a, dc_event *after_b) {
  pthread_mutex_lock(&arena->mutex);
  block *b = *slot_of(arena, ptr);
  while (b != NULL && b->ptr != ptr) {
    b = b->next;
  }
  if (b != NULL) {
    list_remove(b);
    arena->used_count--;
    b->after[0] = after_a;
    b->after[1] = after_b;
    if (passed(b)) {
      make_free(arena, b);
    } else {
      list_add(&arena->retired, b);
    }
  }
  pthread_mutex_unlock(&arena->mutex);
}

/* Frees what can be freed and says whether a block still waits for the event. */
static bool still_waits(dc__arena *arena, const dc_event *event) {
  pthread_mutex_lock(&arena->mutex);
  poll_retired(arena);
  block *b = arena->retired;
  while (b != NULL && b->after[0] != event && b->after[1] != event) {
    b = b->next;
  }
  pthread_mutex_unlock(&arena->mutex);
  return b != NULL;
}

void dc__arena_forget_event(dc__arena *arena, dc_event *event) {
  if (arena != NULL && still_waits(arena, event)) {
    dc__event_wait(event, NULL); /* not under the mutex: the work may free blocks itself */
    (void)still_waits(arena, event);
  }
}

void dc__arena_trim(dc__arena *arena) {
  pthread_mutex_lock(&arena->mutex);
  poll_retired(arena);
  trim(arena);
  pthread_mutex_unlock(&arena->mutex);
}

void dc__arena_get_stats(dc__arena *arena, dc__arena_stats *stats) {
  pthread_mutex_lock(&arena->mutex);
  poll_retired(arena); /* what could be used again is not in use */
  *stats = arena->stats;
  pthread_mutex_unlock(&arena->mutex);
}
