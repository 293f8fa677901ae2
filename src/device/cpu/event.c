/* CPU events: a point is a stream and a count of its tasks. A waiter copies the point, so an event may be recorded
 * again or destroyed at any time. */
#include "device/cpu/cpu.h"

typedef struct stream_point {
  dc__cpu_stream *stream; /* a reference; NULL: passed */
  uint64_t count;
} stream_point;

typedef struct cpu_event {
  struct dc_event head;
  pthread_mutex_t mutex;
  stream_point latest;
} cpu_event;

dc_status dc__cpu_event_create(dc_device *device, dc_event **event) {
  cpu_event *self = dc__calloc(1, sizeof(*self));
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__event_head_init(&self->head, dc__device_retain(device));
  pthread_mutex_init(&self->mutex, NULL);
  *event = &self->head;
  return DC_OK;
}

void dc__cpu_event_destroy(dc_event *event) {
  cpu_event *self = (cpu_event *)event;
  dc__cpu_stream_release(self->latest.stream);
  pthread_mutex_destroy(&self->mutex);
  dc__device_release(self->head.device);
  dc__free(self);
}

/* Replaces the latest point; the stream's reference goes to the event. */
static void cpu_event_set_point(cpu_event *event, stream_point next) {
  pthread_mutex_lock(&event->mutex);
  stream_point before = event->latest;
  event->latest = next;
  pthread_mutex_unlock(&event->mutex);
  dc__cpu_stream_release(before.stream);
}

/* The latest point with a reference for the caller. A passed point is dropped on the way. */
static stream_point cpu_event_get_point(cpu_event *event) {
  dc__cpu_stream *passed = NULL;
  pthread_mutex_lock(&event->mutex);
  if (event->latest.stream != NULL) {
    if (dc__cpu_stream_reached(event->latest.stream, event->latest.count)) {
      passed = event->latest.stream;
      event->latest.stream = NULL;
    } else {
      dc__cpu_stream_retain(event->latest.stream);
    }
  }
  stream_point latest = event->latest;
  pthread_mutex_unlock(&event->mutex);
  dc__cpu_stream_release(passed);
  return latest;
}

void dc__cpu_event_record(dc_event *event, dc_stream *stream) {
  stream_point next = {(dc__cpu_stream *)stream, 0};
  next.count = atomic_load_explicit(&next.stream->queued, memory_order_acquire);
  if (dc__cpu_stream_reached(next.stream, next.count)) {
    next.stream = NULL;
  } else {
    dc__cpu_stream_retain(next.stream);
  }
  cpu_event_set_point((cpu_event *)event, next);
}

void dc__cpu_event_set(dc_event *event) {
  cpu_event_set_point((cpu_event *)event, (stream_point){NULL, 0});
}

bool dc__cpu_event_passed(dc_event *event) {
  stream_point latest = cpu_event_get_point((cpu_event *)event);
  dc__cpu_stream_release(latest.stream);
  return latest.stream == NULL;
}

dc_status dc__cpu_event_sync(dc_event *event, int64_t timeout_ns) {
  stream_point latest = cpu_event_get_point((cpu_event *)event);
  if (latest.stream == NULL) {
    return DC_OK;
  }
  dc_status status = dc__cpu_stream_wait(latest.stream, latest.count, timeout_ns);
  dc__cpu_stream_release(latest.stream);
  return status;
}

static void wait_task(void *args) {
  const stream_point *latest = args;
  (void)dc__cpu_stream_wait(latest->stream, latest->count, 0);
  dc__cpu_stream_release(latest->stream);
}

dc_status dc__cpu_event_wait(dc_event *event, dc_stream *stream) {
  stream_point latest = cpu_event_get_point((cpu_event *)event);
  if (latest.stream == NULL) {
    return DC_OK;
  }
  dc_status status = DC_OK;
  if (&latest.stream->head != stream) { /* a stream reaches its own points in order */
    status = dc__cpu_stream_call(stream, wait_task, &latest, sizeof(latest));
    if (status == DC_OK) {
      return DC_OK; /* the reference went with the task */
    }
  }
  dc__cpu_stream_release(latest.stream);
  return status;
}
