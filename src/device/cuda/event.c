/* CUDA events: a point that can be replaced. A waiter takes a reference to the point, so an event may be recorded again
 * or destroyed at any time. */
#include "device/cuda/cuda.h"

typedef struct cuda_event {
  struct dc_event head;
  pthread_mutex_t mutex;
  dc__cuda_pool_event *latest; /* a reference; NULL if it has passed */
} cuda_event;

dc_status dc__cuda_event_create(dc_device *device, dc_event **event) {
  cuda_event *self = dc__calloc(1, sizeof *self);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__event_head_init(&self->head, dc__device_retain(device));
  pthread_mutex_init(&self->mutex, NULL);
  *event = &self->head;
  return DC_OK;
}

static dc__cuda_device *event_device(const dc_event *event) {
  return (dc__cuda_device *)event->device;
}

void dc__cuda_event_destroy(dc_event *event) {
  cuda_event *self = (cuda_event *)event;
  dc__cuda_pool_event_release(event_device(event), self->latest);
  pthread_mutex_destroy(&self->mutex);
  dc__device_release(event->device);
  dc__free(self);
}

static void cuda_event_set_point(dc_event *event, dc__cuda_pool_event *next) {
  cuda_event *self = (cuda_event *)event;
  pthread_mutex_lock(&self->mutex);
  dc__cuda_pool_event *before = self->latest;
  self->latest = next;
  pthread_mutex_unlock(&self->mutex);
  dc__cuda_pool_event_release(event_device(event), before);
}

/* Returns the event's point with a reference for the caller, or NULL if it has passed. */
static dc__cuda_pool_event *cuda_event_get_point(dc_event *event) {
  cuda_event *self = (cuda_event *)event;
  pthread_mutex_lock(&self->mutex);
  dc__cuda_pool_event *point = self->latest;
  if (point != NULL) {
    atomic_fetch_add_explicit(&point->refs, 1, memory_order_relaxed);
  }
  pthread_mutex_unlock(&self->mutex);
  return point;
}

/* If no point can be recorded, waits for the work at once. If this thread cannot wait, the device fails. */
void dc__cuda_event_record(dc_event *event, dc_stream *stream) {
  dc__cuda_stream *on = (dc__cuda_stream *)stream;
  dc__cuda_pool_event *point = NULL;
  if (dc__cuda_pool_event_record(on, &point) != DC_OK && dc__cuda_stream_drain(on) != DC_OK) {
    dc__cuda_keep_failure(event->device, DC_E_NO_MEMORY);
  }
  cuda_event_set_point(event, point);
}

void dc__cuda_event_set(dc_event *event) {
  cuda_event_set_point(event, NULL);
}

bool dc__cuda_event_passed(dc_event *event) {
  dc__cuda_pool_event *point = cuda_event_get_point(event);
  bool passed = point == NULL || dc__cuda_pool_event_query(event_device(event), point);
  dc__cuda_pool_event_release(event_device(event), point);
  return passed;
}

dc_status dc__cuda_event_sync(dc_event *event, int64_t timeout_ns) {
  dc__cuda_pool_event *point = cuda_event_get_point(event);
  dc_status status = point == NULL ? DC_OK : dc__cuda_pool_event_sync(event_device(event), point, timeout_ns);
  dc__cuda_pool_event_release(event_device(event), point);
  return status;
}

dc_status dc__cuda_event_wait(dc_event *event, dc_stream *stream) {
  dc__cuda_pool_event *point = cuda_event_get_point(event);
  return point == NULL ? DC_OK : dc__cuda_pool_event_wait(point, (dc__cuda_stream *)stream);
}
