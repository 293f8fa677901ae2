/* Shared by all devices: the head, reference counts, and the NULL stream, which is the calling thread. */
#include "device/device.h"

#include <stdio.h>
#include <string.h>

void dc__device_head_init(dc_device *device, const dc__device_ops *ops, const char *name,
                          const dc_allocator *allocator) {
  device->handle = DC__HANDLE_DEVICE;
  device->ops = ops;
  snprintf(device->name, sizeof device->name, "%s", name);
  atomic_init(&device->refs, 1);
  atomic_init(&device->allocations, 0);
  atomic_init(&device->bytes, 0);
  atomic_init(&device->peak_bytes, 0);
  dc__owner_init(&device->owner);
  if (allocator != NULL) {
    device->allocator = *allocator;
  }
}

void dc__device_head_destroy(dc_device *device) {
  dc_allocator allocator = device->allocator;
  dc__handle_clear(&device->handle);
  dc__owner_destroy(&device->owner);
  dc__free(device);
  if (allocator.destroy_user != NULL) {
    allocator.destroy_user(allocator.user);
  }
}

dc_status dc__device_alloc_user(dc_device *device, size_t bytes, void **ptr) {
  const dc_allocator *allocator = &device->allocator;
  void *block = allocator->alloc((int64_t)bytes, DC__ALIGNMENT, allocator->user);
  if (block == NULL) {
    return dc__fail(DC_E_NO_MEMORY, "device \"%s\": the caller's allocator gave no %zu bytes", device->name, bytes);
  }
  if ((uintptr_t)block % DC__ALIGNMENT != 0) {
    allocator->free(block, (int64_t)bytes, DC__ALIGNMENT, allocator->user);
    return dc__fail(DC_E_CALLBACK, "device \"%s\": the caller's allocator gave %p, must be %d-byte aligned",
                    device->name, block, DC__ALIGNMENT);
  }
  *ptr = block;
  return DC_OK;
}

void dc__device_count_bytes(dc_device *device, int64_t change) {
  int64_t now = atomic_fetch_add_explicit(&device->bytes, change, memory_order_relaxed) + change;
  long long peak = atomic_load_explicit(&device->peak_bytes, memory_order_relaxed);
  while (now > peak && !atomic_compare_exchange_weak_explicit(&device->peak_bytes, &peak, now, memory_order_relaxed,
                                                              memory_order_relaxed)) {
  }
}

dc_device *dc__device_retain(dc_device *device) {
  atomic_fetch_add_explicit(&device->refs, 1, memory_order_relaxed);
  return device;
}

void dc__device_release(dc_device *device) {
  if (device != NULL && atomic_fetch_sub_explicit(&device->refs, 1, memory_order_acq_rel) == 1) {
    device->ops->destroy(device);
  }
}

/* How many nested operators on devices this thread is in, and the outermost one's device. */
static _Thread_local struct {
  dc_device *device;
  int operators;
} operator_scope;

void dc__device_begin(dc_device *device) {
  if (device->ops->begin != NULL) {
    operator_scope.device = operator_scope.operators++ == 0 ? device : operator_scope.device;
    device->ops->begin(device);
  }
}

void dc__device_end(dc_device *device) {
  if (device->ops->end != NULL) {
    device->ops->end(device);
    operator_scope.operators--;
  }
}

void dc__device_pause(void) {
  if (operator_scope.operators > 0) {
    operator_scope.device->ops->pause(operator_scope.device);
  }
}

bool dc__device_is_same(const dc_device *a, const dc_device *b) {
  return a == b ||
         (a->ops == b->ops && a->memory_space == b->memory_space && a->memory_space != DC__COUNT_MEMORY_SPACE);
}

dc_status dc__device_check_alignment(const char *fn, const char *arg, const dc_device *device, const void *data,
                                     int64_t count, size_t size) {
  return device->memory_space == 0 || count == 0 || (uintptr_t)data % size == 0
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: %s.data = %p, must be a multiple of %zu on device \"%s\"", fn, arg, data,
                        size, device->name);
}

dc_status dc__stream_check_device(const char *fn, const dc_stream *stream, const char *owner, const dc_device *device) {
  if (stream == NULL) {
    return DC_OK;
  }
  DC__TRY(dc__owner_check(fn, "stream", &stream->device->owner)); /* its device looks the same in a forked child */
  if (dc__device_is_same(stream->device, device)) {
    return DC_OK;
  }
  return dc__fail(DC_E_INVALID, "%s: stream is of %s \"%s\", must be of the %s's, \"%s\"", fn,
                  strcmp(stream->device->name, device->name) == 0 ? "another device" : "device", stream->device->name,
                  owner, device->name);
}

/* The device keeps the failure, since work that could not be queued must not be lost silently. */
static void stream_keep_failure(const dc_stream *stream, dc_status status) {
  if (status != DC_OK && stream->device->ops->keep_failure != NULL) {
    stream->device->ops->keep_failure(stream->device, status);
  }
}

void dc__stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
  stream_keep_failure(stream, dc__stream_try_call(stream, fn, args, bytes));
}

dc_status dc__stream_try_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
  if (stream != NULL) {
    return stream->device->ops->stream_call(stream, fn, args, bytes);
  }
  /* Tasks own their arguments and may write to them, on every stream. */
  _Alignas(max_align_t) unsigned char copy[DC__TASK_BYTES];
  if (bytes > 0) {
    memcpy(copy, args, bytes);
  }
  fn(copy);
  return DC_OK;
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

dc_stream *dc__stream_or_internal(dc_device *device, dc_stream *stream) {
  return stream != NULL ? stream : device->internal_stream;
}

void dc__device_sync_internal(dc_device *device, dc_stream *stream) {
  if (stream == NULL) {
    (void)dc__stream_sync(device->internal_stream, 0); /* a failure is kept by the device */
  }
}

dc_status dc__device_require_host(const char *fn, const dc_device *device) {
  return device->memory_space == 0
             ? DC_OK
             : dc__fail(DC_E_UNSUPPORTED, "%s: there are no kernels for device \"%s\" yet, only for \"cpu\"", fn,
                        device->name);
}

dc_status dc__device_check(dc_device *device) {
  return device->ops->check == NULL ? DC_OK : device->ops->check(device);
}

dc_status dc__stream_sync(dc_stream *stream, int64_t timeout_ns) {
  return stream == NULL ? DC_OK : stream->device->ops->stream_sync(stream, timeout_ns);
}

bool dc__stream_captures(dc_stream *stream) {
  return stream != NULL && stream->device->ops->stream_captures != NULL && stream->device->ops->stream_captures(stream);
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
    stream_keep_failure(stream, event->device->ops->event_wait(event, stream));
  } else {
    (void)event->device->ops->event_sync(event, 0);
  }
}

bool dc__event_passed(dc_event *event) {
  return event->device->ops->event_passed(event);
}
