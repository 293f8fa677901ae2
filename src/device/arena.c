/* Chunks of a device's memory, cut into blocks. */
#include "device/arena.h"

#include "device/block_list.h"
#include "device/poison.h"

#ifndef DC_ARENA_UNIT
#define DC_ARENA_UNIT (2 << 20) /* a huge page; the simulator sets less, so that memory is reused at once */
#endif
static const size_t CHUNK_UNIT = DC_ARENA_UNIT;
static const size_t GROWTH = (size_t)2 * DC_ARENA_UNIT;

typedef struct arena_chunk {
  struct arena_chunk *next;
  dc__arena_block *first;
  void *ptr;
  size_t bytes;
} arena_chunk;

_Static_assert(sizeof(arena_chunk) <= DC__RECORD_BYTES, "records hold chunks");

struct dc__arena {
  dc_device *device;
  dc__arena_source source;
  atomic_int refs;
  pthread_mutex_t mutex; /* all below */
  arena_chunk *chunks;
  dc__block_list blocks;
  int64_t chunk_bytes;
  int64_t chunk_allocations;
  int64_t peak_bytes; /* of the blocks' used_bytes */
};

/* ---- records ---- */

void *dc__arena_record_alloc(dc__arena *arena) {
  pthread_mutex_lock(&arena->mutex);
  void *taken = dc__record_pool_alloc(&arena->blocks.records);
  pthread_mutex_unlock(&arena->mutex);
  return taken;
}

void dc__arena_record_free(dc__arena *arena, void *ptr) {
  pthread_mutex_lock(&arena->mutex);
  dc__record_pool_free(&arena->blocks.records, ptr);
  pthread_mutex_unlock(&arena->mutex);
}

/* ---- chunks ---- */

static dc_status arena_grow(dc__arena *arena, size_t bytes) {
  size_t size = ((bytes > GROWTH ? bytes : GROWTH) + CHUNK_UNIT - 1) / CHUNK_UNIT * CHUNK_UNIT;
  arena_chunk *new_chunk = dc__record_pool_alloc(&arena->blocks.records);
  dc__arena_block *whole = new_chunk == NULL ? NULL : dc__record_pool_alloc(&arena->blocks.records);
  dc_status status = whole == NULL ? DC_E_NO_MEMORY : DC_OK;
  if (status == DC_OK) {
    status = arena->source.alloc(arena->source.user, size, &new_chunk->ptr);
  }
  if (status != DC_OK) {
    if (new_chunk != NULL) {
      dc__record_pool_free(&arena->blocks.records, new_chunk);
    }
    if (whole != NULL) {
      dc__record_pool_free(&arena->blocks.records, whole);
    }
    return status;
  }
  new_chunk->bytes = size;
  new_chunk->first = whole;
  new_chunk->next = arena->chunks;
  arena->chunks = new_chunk;
  dc__block_list_add(&arena->blocks, whole, new_chunk->ptr, size);
  arena->chunk_bytes += (int64_t)size;
  arena->chunk_allocations++;
  return DC_OK;
}

static void free_chunk(dc__arena *arena, arena_chunk *c) {
  UNPOISON(c->ptr, c->bytes);
  arena->source.free(arena->source.user, c->ptr, c->bytes);
  arena->chunk_bytes -= (int64_t)c->bytes;
}

/* Returns chunks without used blocks to the source. True if there were any. */
static bool arena_trim(dc__arena *arena) {
  bool any = false;
  for (arena_chunk **link = &arena->chunks, *c = *link; c != NULL; c = *link) {
    if (!c->first->is_free || c->first->bytes != c->bytes) {
      link = &c->next;
      continue;
    }
    *link = c->next;
    dc__block_list_remove(&arena->blocks, c->first);
    free_chunk(arena, c);
    dc__record_pool_free(&arena->blocks.records, c);
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
  dc__block_list_init(&self->blocks);
  self->device = dc__device_retain(device);
  self->source = source != NULL && source->alloc != NULL
                     ? *source
                     : (dc__arena_source){.alloc = device_alloc, .free = device_free, .user = device};
  self->blocks.stream_ordered = self->source.stream_ordered;
  atomic_init(&self->refs, 1);
  pthread_mutex_init(&self->mutex, NULL);
  *arena = self;
  return DC_OK;
}

dc__arena *dc__arena_retain(dc__arena *arena) {
  atomic_fetch_add_explicit(&arena->refs, 1, memory_order_relaxed);
  return arena;
}

bool dc__arena_is_forked(const dc__arena *arena) {
  return dc__owner_is_forked(&arena->device->owner);
}

void dc__arena_release(dc__arena *arena) {
  if (arena == NULL || atomic_fetch_sub_explicit(&arena->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  for (dc__arena_block *b = arena->blocks.retired; b != NULL; b = b->next) {
    for (int i = 0; i < 2; i++) {
      if (b->after[i] != NULL) {
        dc__event_wait(b->after[i], NULL);
      }
    }
  }
  for (arena_chunk *c = arena->chunks; c != NULL; c = c->next) {
    free_chunk(arena, c);
  }
  if (arena->source.done != NULL) {
    arena->source.done(arena->source.user);
  }
  dc__block_list_destroy(&arena->blocks);
  pthread_mutex_destroy(&arena->mutex);
  dc__device_release(arena->device);
  dc__free(arena);
}

/* Finds a free block; else, for a stream, a block that the stream must wait for; else grows the arena. */
static dc_status arena_find_block(dc__arena *arena, bool for_stream, size_t bytes, dc__arena_block **found,
                                  dc_event *after[2]) {
  dc__block_list *blocks = &arena->blocks;
  if (!dc__block_list_reserve(blocks)) {
    return DC_E_NO_MEMORY;
  }
  dc__block_list_poll(blocks, false);
  *found = dc__block_list_alloc(blocks, bytes);
  if (*found == NULL && for_stream) {
    *found = dc__block_list_alloc_retired(blocks, bytes, after);
  }
  if (*found == NULL) {
    dc__block_list_poll(blocks, true);
    *found = dc__block_list_alloc(blocks, bytes);
  }
  if (*found != NULL) {
    return DC_OK;
  }
  dc_status status = arena_grow(arena, bytes);
  if (status != DC_OK && !blocks->stream_ordered && arena_trim(arena)) { /* freeing idle chunks may make room */
    status = arena_grow(arena, bytes);
  }
  *found = status == DC_OK ? dc__block_list_alloc(blocks, bytes) : NULL;
  return status;
}

dc_status dc__arena_alloc(dc__arena *arena, dc_stream *stream, size_t bytes, void **ptr) {
  if (bytes > SIZE_MAX / 4) {
    return dc__fail(DC_E_NO_MEMORY, "arena: no block can have %zu bytes", bytes);
  }
  const size_t unit = DC__BLOCK_ALIGNMENT;
  size_t size = (bytes == 0 ? unit : bytes + unit - 1) / unit * unit;
  dc_event *after[2] = {NULL, NULL};
  dc__arena_block *b;
  pthread_mutex_lock(&arena->mutex);
  dc_status status = arena_find_block(arena, stream != NULL, size, &b, after);
  if (status == DC_OK) {
    if (after[0] == NULL && after[1] == NULL) {
      UNPOISON(b->ptr, bytes);
    }
    *ptr = b->ptr;
    arena->peak_bytes = arena->blocks.used_bytes > arena->peak_bytes ? arena->blocks.used_bytes : arena->peak_bytes;
  }
  pthread_mutex_unlock(&arena->mutex);
  for (int i = 0; i < 2; i++) { /* not under the mutex: this may wait for a full queue, whose work frees blocks */
    if (after[i] != NULL) {
      dc__event_wait(after[i], stream);
    }
  }
  if (after[0] != NULL || after[1] != NULL) {
    UNPOISON_ON(stream, *ptr, bytes);
  }
  return status;
}

void dc__arena_free(dc__arena *arena, void *ptr, dc_event *after_a, dc_event *after_b) {
  pthread_mutex_lock(&arena->mutex);
  dc__block_list_free(&arena->blocks, ptr, after_a, after_b);
  pthread_mutex_unlock(&arena->mutex);
}

/* Frees what can be freed and says whether a block still waits for the event. */
static bool still_waits(dc__arena *arena, const dc_event *event) {
  pthread_mutex_lock(&arena->mutex);
  dc__block_list_poll(&arena->blocks, true);
  const dc__arena_block *b = arena->blocks.retired;
  while (b != NULL && b->after[0] != event && b->after[1] != event) {
    b = b->next;
  }
  pthread_mutex_unlock(&arena->mutex);
  return b != NULL;
}

void dc__arena_forget_event(dc__arena *arena, dc_event *event) {
  if (arena != NULL && still_waits(arena, event)) {
    dc__event_wait(event, NULL); /* not under the mutex: the work may free blocks itself */
    pthread_mutex_lock(&arena->mutex);
    dc__block_list_forget_event(&arena->blocks, event);
    dc__block_list_poll(&arena->blocks, true);
    pthread_mutex_unlock(&arena->mutex);
  }
}

void dc__arena_trim(dc__arena *arena) {
  pthread_mutex_lock(&arena->mutex);
  dc__block_list_poll(&arena->blocks, true);
  arena_trim(arena);
  pthread_mutex_unlock(&arena->mutex);
}

void dc__arena_get_stats(dc__arena *arena, dc__arena_stats *stats) {
  pthread_mutex_lock(&arena->mutex);
  dc__block_list_poll(&arena->blocks, true); /* blocks whose events have passed do not count as used */
  *stats = (dc__arena_stats){.chunk_bytes = arena->chunk_bytes,
                             .used_bytes = arena->blocks.used_bytes,
                             .peak_bytes = arena->peak_bytes,
                             .chunk_allocations = arena->chunk_allocations};
  pthread_mutex_unlock(&arena->mutex);
}

void dc__arena_reset_peak(dc__arena *arena) {
  pthread_mutex_lock(&arena->mutex);
  dc__block_list_poll(&arena->blocks, true);
  arena->peak_bytes = arena->blocks.used_bytes;
  pthread_mutex_unlock(&arena->mutex);
}
