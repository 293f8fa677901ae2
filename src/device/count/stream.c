/* Streams, events and timestamps of the counting device. */
#include "device/count/count.h"

#include <string.h>

typedef struct count_event {
  struct dc_event head;
  int64_t passes_ns; /* in virtual time; 0: passed */
} count_event;

typedef struct count_timestamp {
  struct dc__timestamp head;
  int64_t ns;
} count_timestamp;

static dc__count_device *count_device_of(const dc_stream *stream) {
  return (dc__count_device *)stream->device;
}

static int64_t latest(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* ---- time ---- */

/* Work begins when the host has queued it and the stream's earlier work is done. */
static int64_t begin_work(const dc__count_device *device, const dc__count_stream *stream) {
  return latest(stream->now_ns, device->values[DC__COUNT_TIME_NS]);
}

static dc__count_stream *lock_stream(dc_stream *stream) {
  pthread_mutex_lock(&count_device_of(stream)->mutex);
  return (dc__count_stream *)stream;
}

void dc__count_work(dc_stream *stream, int64_t duration_ns) {
  dc__count_device *device = count_device_of(stream);
  dc__count_stream *self = lock_stream(stream);
  self->now_ns = begin_work(device, self) + duration_ns;
  pthread_mutex_unlock(&device->mutex);
}

void dc__count_work_on_link(dc_device *device, dc_stream *stream, int64_t duration_ns) {
  dc__count_device *self = (dc__count_device *)device;
  int64_t *values = self->values;
  pthread_mutex_lock(&self->mutex);
  int64_t *clock = stream != NULL ? &((dc__count_stream *)stream)->now_ns : &values[DC__COUNT_TIME_NS];
  int64_t begin = latest(latest(*clock, values[DC__COUNT_TIME_NS]), values[DC__COUNT_LINK_FREE_NS]);
  *clock = values[DC__COUNT_LINK_FREE_NS] = begin + duration_ns;
  values[DC__COUNT_LINK_BUSY_NS] += duration_ns;
  pthread_mutex_unlock(&self->mutex);
}

/* ---- streams ---- */

dc_status dc__count_stream_create(dc_device *device, dc_stream **stream) {
  dc__count_stream *self = dc__calloc(1, sizeof(*self));
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__stream_head_init(&self->head, dc__device_retain(device));
  *stream = &self->head;
  return DC_OK;
}

void dc__count_stream_destroy(dc_stream *stream) {
  dc_device *device = stream->device;
  dc__free(stream);
  dc__device_release(device);
}

dc_status dc__count_stream_sync(dc_stream *stream, int64_t timeout_ns) {
  (void)timeout_ns;
  dc__count_device *device = count_device_of(stream);
  dc__count_stream *self = lock_stream(stream);
  device->values[DC__COUNT_TIME_NS] = begin_work(device, self);
  pthread_mutex_unlock(&device->mutex);
  return DC_OK;
}

dc_status dc__count_stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
  (void)stream;
  dc__stream_call(NULL, fn, args, bytes);
  return DC_OK;
}

dc_status dc__count_stream_issue(dc_stream *stream, dc__native_fn fn, const void *args, size_t bytes, bool blocks) {
  (void)stream;
  (void)blocks;
  _Alignas(max_align_t) unsigned char copy[DC__TASK_BYTES];
  memcpy(copy, args, bytes);
  fn(NULL, copy);
  return DC_OK;
}

/* Only the program's own memory has bytes to set. */
void dc__count_stream_zero(dc_stream *stream, void *dst, size_t bytes) {
  if (dc__count_memory_of(dst) == DC__COUNT_OWN) {
    memset(dst, 0, bytes);
  }
  dc__count_work(stream, dc__count_duration(stream->device, DC__COUNT_MEMORY_RATE, (int64_t)bytes));
}

/* A copy within the device reads and writes its memory; any other one crosses the host's link. The program reads zeros
 * back from the device. */
void dc__count_stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes) {
  dc_device *device = stream->device;
  bool inside = dc__count_memory_of(dst) == DC__COUNT_DEVICE && dc__count_memory_of(src) == DC__COUNT_DEVICE;
  int64_t moved = (int64_t)bytes;
  if (dc__count_memory_of(dst) == DC__COUNT_OWN) {
    memset(dst, 0, bytes);
  }
  dc__count_add(device, inside ? DC__COUNT_COPIED_BYTES : DC__COUNT_HOST_COPIED_BYTES, moved);
  dc__count_work(stream, inside ? dc__count_duration(device, DC__COUNT_MEMORY_RATE, 2 * moved)
                                : dc__count_duration(device, DC__COUNT_HOST_RATE, moved));
}

void dc__count_stream_launch(dc_stream *stream, const dc__launch *launch) {
  (void)launch;
  dc__count_add(stream->device, DC__COUNT_LAUNCHES, 1);
  dc__count_work(stream, dc__count_get(stream->device, DC__COUNT_LAUNCH_NS));
}

bool dc__count_stream_matmul(dc_stream *stream, const dc__matmul *product) {
  int64_t flops = 2 * product->m * product->n * product->k * (product->batch > 0 ? product->batch : 1);
  dc__count_add(stream->device, DC__COUNT_PRODUCT_FLOPS, flops);
  dc__count_work(stream, dc__count_get(stream->device, DC__COUNT_LAUNCH_NS) +
                             dc__count_duration(stream->device, DC__COUNT_FLOPS, flops));
  return true;
}

dc__timestamp *dc__count_stream_timestamp(dc_stream *stream) {
  count_timestamp *self = dc__calloc(1, sizeof(*self));
  if (self == NULL) {
    return NULL;
  }
  dc__count_device *device = count_device_of(stream);
  self->head.device = stream->device;
  self->ns = begin_work(device, lock_stream(stream)) + 1; /* 0 would mean that the stream has not reached it */
  pthread_mutex_unlock(&device->mutex);
  return &self->head;
}

int64_t dc__count_timestamp_ns(dc__timestamp *stamp) {
  return ((const count_timestamp *)stamp)->ns;
}

void dc__count_timestamp_release(dc__timestamp *stamp) {
  dc__free(stamp);
}

/* ---- events ---- */

dc_status dc__count_event_create(dc_device *device, dc_event **event) {
  count_event *self = dc__calloc(1, sizeof(*self));
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__event_head_init(&self->head, dc__device_retain(device));
  *event = &self->head;
  return DC_OK;
}

void dc__count_event_destroy(dc_event *event) {
  dc_device *device = event->device;
  dc__free(event);
  dc__device_release(device);
}

void dc__count_event_record(dc_event *event, dc_stream *stream) {
  dc__count_device *device = count_device_of(stream);
  ((count_event *)event)->passes_ns = begin_work(device, lock_stream(stream));
  pthread_mutex_unlock(&device->mutex);
}

dc_status dc__count_event_wait(dc_event *event, dc_stream *stream) {
  dc__count_stream *self = lock_stream(stream);
  self->now_ns = latest(self->now_ns, ((const count_event *)event)->passes_ns);
  pthread_mutex_unlock(&count_device_of(stream)->mutex);
  return DC_OK;
}

bool dc__count_event_passed(dc_event *event) {
  dc__count_device *device = (dc__count_device *)event->device;
  pthread_mutex_lock(&device->mutex);
  bool passed = ((const count_event *)event)->passes_ns <= device->values[DC__COUNT_TIME_NS];
  pthread_mutex_unlock(&device->mutex);
  return passed;
}

dc_status dc__count_event_sync(dc_event *event, int64_t timeout_ns) {
  (void)timeout_ns;
  dc__count_device *device = (dc__count_device *)event->device;
  pthread_mutex_lock(&device->mutex);
  int64_t *now = &device->values[DC__COUNT_TIME_NS];
  *now = latest(*now, ((const count_event *)event)->passes_ns);
  pthread_mutex_unlock(&device->mutex);
  return DC_OK;
}

void dc__count_event_set(dc_event *event) {
  dc__count_device *device = (dc__count_device *)event->device;
  pthread_mutex_lock(&device->mutex);
  ((count_event *)event)->passes_ns = 0;
  pthread_mutex_unlock(&device->mutex);
}
