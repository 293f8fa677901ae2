/* What all devices share: counting references, and the NULL stream, which is the calling thread. */
#include "device/device.h"

#include <string.h>

dc_device *dc__device_retain(dc_device *device) {
  atomic_fetch_add_explicit(&device->refs, 1, memory_order_relaxed);
  return device;
}

void dc__device_release(dc_device *device) {
  if (device != NULL && atomic_fetch_sub_explicit(&device->refs, 1, memory_order_acq_rel) == 1) {
    device->ops->destroy(device);
  }
}

void dc__stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
  if (stream != NULL) {
    (void)stream->device->ops->stream_call(stream, fn, args, bytes);
    return;
  }
  /* Tasks own their arguments and may write to them, on every stream. */
  _Alignas(max_align_t) unsigned char copy[DC__TASK_BYTES];
  if (bytes > 0) {
    memcpy(copy, args, bytes);
  }
  fn(copy);
}

void dc__stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes) {
  if (bytes == 0) {
    return;
  }
  if (stream != NULL) {
    stream->device->ops->stream_copy(stream, dst, src, bytes);
  } else {
    memcpy(dst, src, bytes);
  }
}

void dc__stream_zero(dc_stream *stream, void *dst, size_t bytes) {
  if (bytes == 0) {
    return;
  }
  if (stream != NULL) {
    stream->device->ops->stream_zero(stream, dst, bytes);
  } else {
    memset(dst, 0, bytes);
  }
}

dc_status dc__stream_sync(dc_stream *stream, int64_t timeout_ns) {
  return stream == NULL ? DC_OK : stream->device->ops->stream_sync(stream, timeout_ns);
}

void dc__event_record(dc_event *event, dc_stream *stream) {
  if (stream != NULL) {
    event->device->ops->event_record(event, stream);
  } else {
    event->device->ops->event_set(event);
  }
}

void dc__event_wait(dc_event *event, dc_stream *stream) {
  if (stream != NULL) {
    (void)event->device->ops->event_wait(event, stream);
  } else {
    (void)event->device->ops->event_sync(event, 0);
  }
}

bool dc__event_passed(dc_event *event) {
  return event->device->ops->event_passed(event);
}
