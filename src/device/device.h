/* A device behind one table: memory, streams, events, copies. The rooms above know this header alone; cpu/ is built
 * in, cuda/ fills the same table, and so does the simulated device of the tests (tests/sim).
 *
 * A NULL stream is the calling thread: what it did is done, and waiting blocks it. The dc__stream_* and dc__event_*
 * functions below handle NULL; the table's functions get real streams only. */
#ifndef DC_DEVICE_H
#define DC_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"

enum { DC__TASK_BYTES = 1024 }; /* inline arguments of one task; a stream's queue never allocates */

/* A host function on a stream, given a copy of its arguments. Errors are reported through the arguments. */
typedef void (*dc__task_fn)(void *args);

typedef struct dc__device_ops {
  const char *name;
  /* Memory of a kind (DC_MEMORY_DEVICE, DC_MEMORY_HOST), 256-byte aligned, not zeroed. */
  dc_status (*alloc)(dc_device *device, size_t bytes, int32_t kind, void **ptr);
  void (*free)(dc_device *device, void *ptr, size_t bytes, int32_t kind);
  dc_status (*stream_create)(dc_device *device, dc_stream **stream);
  void (*stream_destroy)(dc_stream *stream); /* drains first */
  dc_status (*stream_sync)(dc_stream *stream, int64_t timeout_ns);
  /* fn(args) in stream order on the host; args (<= DC__TASK_BYTES) are copied. Blocks while the queue is full; fails
   * with DC_E_STATE only if the caller is a task of that very stream, which would wait for itself. */
  dc_status (*stream_call)(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);
  void (*stream_copy)(dc_stream *stream, void *dst, const void *src, size_t bytes);
  void (*stream_zero)(dc_stream *stream, void *dst, size_t bytes);
  dc_status (*event_create)(dc_device *device, dc_event **event);
  void (*event_destroy)(dc_event *event);
  void (*event_record)(dc_event *event, dc_stream *stream);
  dc_status (*event_wait)(dc_event *event, dc_stream *stream); /* fails as stream_call does */
  bool (*event_passed)(dc_event *event);
  dc_status (*event_sync)(dc_event *event, int64_t timeout_ns);
  void (*event_set)(dc_event *event); /* as if recorded on an empty stream: passed */
  dc_status (*memory)(dc_device *device, int64_t *total, int64_t *free_bytes); /* as the driver or system says */
  void (*destroy)(dc_device *device);
} dc__device_ops;

/* The head of every device's struct. */
struct dc_device {
  const dc__device_ops *ops;
  atomic_int refs;
  dc_allocator allocator;   /* alloc NULL: the device's own */
  atomic_llong allocations; /* calls of ops->alloc, for "zero allocations in a steady step" */
  dc__owner owner;          /* of its streams, events, arenas and contexts too */
  atomic_llong bytes;       /* taken now, by ops->alloc */
  atomic_llong peak_bytes;  /* most of it so far */
};

/* The heads of streams and events. */
struct dc_stream {
  dc_device *device;
};
struct dc_event {
  dc_device *device;
};

/* cpu/: the device that is always there. */
dc_status dc__cpu_device_open(const dc_allocator *allocator, dc_device **device);

dc_device *dc__device_retain(dc_device *device);
void dc__device_release(dc_device *device);

/* Run now when stream is NULL, else queued. libdc's own tasks queue nothing on their stream, so these cannot fail. */
void dc__stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);
void dc__stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes);
void dc__stream_zero(dc_stream *stream, void *dst, size_t bytes);
dc_status dc__stream_sync(dc_stream *stream, int64_t timeout_ns); /* NULL: nothing to wait for */
void dc__event_record(dc_event *event, dc_stream *stream);
/* NULL stream: blocks the caller until passed (every task that can block has its own deadline). */
void dc__event_wait(dc_event *event, dc_stream *stream);
bool dc__event_passed(dc_event *event);

/* ---- arena (arena.c): blocks of device memory that are used again and again ----
 *
 * Chunks come from the device and stay until the arena dies; blocks are cut best-fit and merge again when freed, so
 * a steady step allocates nothing. A block may be freed while work that reads it is still queued: give the events;
 * the memory is reused only after they passed. Counted, because buffers outlive contexts. Thread-safe. */
typedef struct dc__arena dc__arena;

/* Where an arena's chunks come from; NULL functions: the device, kind DC_MEMORY_DEVICE. */
typedef struct dc__arena_source {
  dc_status (*alloc)(void *user, size_t bytes, void **ptr);
  void (*free)(void *user, void *ptr, size_t bytes);
  void (*done)(void *user); /* after the last free */
  void *user;
} dc__arena_source;

dc_status dc__arena_create(dc_device *device, const dc__arena_source *source, dc__arena **arena);
dc__arena *dc__arena_retain(dc__arena *arena);
void dc__arena_release(dc__arena *arena); /* the chunks go when the last reference goes */
/* bytes 0 gives a valid, empty block. 256-byte aligned. */
dc_status dc__arena_alloc(dc__arena *arena, size_t bytes, void **ptr);
/* after: up to two events (NULL allowed) that must pass before the memory is used again; they are waited for by
 * dc__arena_alloc, which polls, and must live until then or until dc__arena_forget_event. */
void dc__arena_free(dc__arena *arena, void *ptr, dc_event *after_a, dc_event *after_b);
/* Blocks until nothing waits for the event any more: call before destroying an event given to dc__arena_free.
 * arena may be NULL. */
void dc__arena_forget_event(dc__arena *arena, dc_event *event);
/* Gives chunks without blocks back to the source. */
void dc__arena_trim(dc__arena *arena);

typedef struct dc__arena_stats {
  int64_t chunk_bytes; /* taken from the source */
  int64_t used_bytes;  /* in blocks, and in freed ones whose events have not passed */
  int64_t chunk_allocations;
} dc__arena_stats;
void dc__arena_get_stats(dc__arena *arena, dc__arena_stats *stats);

/* ---- buffers (buffer.c): counted handles on arena blocks, public as dc_buffer ---- */

/* Wraps a block that `arena` gave; one reference for the caller. On failure the block is freed. */
dc_status dc__buffer_create(dc__arena *arena, void *ptr, size_t bytes, dc_buffer **buffer);
/* Takes the memory back from all holders; what they still hold is an empty handle. */
void dc__buffer_revoke(dc_buffer *buffer, dc_event *after_a, dc_event *after_b);
/* dc_buffer_release() whose memory, if it goes back, is used again only after the event. */
void dc__buffer_release_after(dc_buffer *buffer, dc_event *after);

#endif
