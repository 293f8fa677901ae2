/* The CPU device's own structs, shared by its files.
 *
 * A stream counts the tasks it was given and the tasks it has done. An event's point is a stream and one such count. So
 * recording queues nothing, waiting copies the point, and an event can be destroyed while others still wait for its
 * point. */
#ifndef DC_DEVICE_CPU_H
#define DC_DEVICE_CPU_H

#include "device/device.h"

enum { DC__CPU_QUEUE = 256 }; /* tasks a stream holds before other threads block */

typedef struct dc__cpu_device {
  struct dc_device head;
  pthread_mutex_t mutex; /* guards the failure */
  dc__failure failure;
  atomic_int failed; /* failure.status != DC_OK, for a check without the mutex */
} dc__cpu_device;

typedef struct dc__cpu_task {
  dc__task_fn fn;
  _Alignas(max_align_t) unsigned char args[DC__TASK_HEAD + DC__TASK_BYTES];
} dc__cpu_task;

/* A task that one of the stream's own tasks queued while the ring was full. */
typedef struct dc__cpu_spill {
  struct dc__cpu_spill *next;
  dc__task_fn fn;
  size_t bytes;
  _Alignas(max_align_t) unsigned char args[];
} dc__cpu_spill;

/* A thread that sleeps, without a limit, until `count` tasks are done. */
typedef struct dc__cpu_sleeper {
  struct dc__cpu_sleeper *next;
  uint64_t thread;
  uint64_t count;
} dc__cpu_sleeper;

typedef struct dc__cpu_stream {
  struct dc_stream head;
  atomic_int refs; /* the handle, the worker, and every point and waiting task that names this stream */
  pthread_t worker;
  pthread_mutex_t mutex;   /* guards all below; the counters are written under it and read without it */
  pthread_cond_t work;     /* for the worker: queued or stop changed */
  pthread_cond_t progress; /* for all waiters: done reached wake_at */
  uint64_t wake_at;        /* the smallest count of done that a waiter sleeps for */
  dc__cpu_sleeper *sleepers;
  dc__spin spin; /* the worker's */
  atomic_ullong queued;
  atomic_ullong done;
  bool stop;
  bool asleep;               /* the worker waits for `work` */
  dc__cpu_task *ring;        /* task n lies at n % DC__CPU_QUEUE */
  dc__cpu_spill *spilled;    /* the tasks behind the ring's, in order */
  dc__cpu_spill **spill_end; /* the pointer that links the next one */
} dc__cpu_stream;

/* device.c */
void dc__cpu_keep_failure(dc_device *device, dc_status status); /* with this thread's last error */

/* stream.c */
dc_status dc__cpu_stream_create(dc_device *device, dc_stream **stream);
void dc__cpu_stream_destroy(dc_stream *stream);
dc_status dc__cpu_stream_sync(dc_stream *stream, int64_t timeout_ns);
dc_status dc__cpu_stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);
void dc__cpu_stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes);
void dc__cpu_stream_zero(dc_stream *stream, void *dst, size_t bytes);

dc__cpu_stream *dc__cpu_stream_retain(dc__cpu_stream *stream);
void dc__cpu_stream_release(dc__cpu_stream *stream); /* takes NULL */
/* Blocks until `count` tasks are done; timeout_ns 0 = no limit. */
dc_status dc__cpu_stream_wait(dc__cpu_stream *stream, uint64_t count, int64_t timeout_ns);

static inline bool dc__cpu_stream_reached(dc__cpu_stream *stream, uint64_t count) {
  return atomic_load_explicit(&stream->done, memory_order_acquire) >= count;
}

/* event.c */
dc_status dc__cpu_event_create(dc_device *device, dc_event **event);
void dc__cpu_event_destroy(dc_event *event);
void dc__cpu_event_record(dc_event *event, dc_stream *stream);
dc_status dc__cpu_event_wait(dc_event *event, dc_stream *stream);
bool dc__cpu_event_passed(dc_event *event);
dc_status dc__cpu_event_sync(dc_event *event, int64_t timeout_ns);
void dc__cpu_event_set(dc_event *event);

/* memory.c */
dc_status dc__cpu_memory_info(dc_device *device, int64_t *total, int64_t *free_bytes);

#endif
