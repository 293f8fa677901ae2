/* The counting device: memory has addresses but no bytes, and work takes virtual time alone. So the runtime, the
 * optimizers and the layer run on it unchanged, and show at once how much memory and time they would take.
 *
 * Work is done when it is queued. Each stream has a clock, at which its latest work ends; an event keeps the time at
 * which it was recorded. The host has a clock too, which moves only when the host waits: calls themselves take no
 * time. */
#ifndef DC_DEVICE_COUNT_H
#define DC_DEVICE_COUNT_H

#include "device/device.h"

typedef struct dc__count_stream {
  struct dc_stream head;
  int64_t now_ns;
} dc__count_stream;

typedef struct dc__count_device {
  struct dc_device head;
  dc__count_stream internal; /* holds no reference to the device, whose part it is */
  pthread_mutex_t mutex;     /* guards all below, and the clocks of streams and events */
  int64_t values[DC__COUNT_VALUES];
  uintptr_t next_device, next_host; /* addresses of the next blocks */
} dc__count_device;

dc_status dc__count_stream_create(dc_device *device, dc_stream **stream);
void dc__count_stream_destroy(dc_stream *stream);
dc_status dc__count_stream_sync(dc_stream *stream, int64_t timeout_ns);
dc_status dc__count_stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);
dc_status dc__count_stream_issue(dc_stream *stream, dc__native_fn fn, const void *args, size_t bytes, bool blocks);
void dc__count_stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes);
void dc__count_stream_zero(dc_stream *stream, void *dst, size_t bytes);
void dc__count_stream_launch(dc_stream *stream, const dc__launch *launch);
bool dc__count_stream_matmul(dc_stream *stream, const dc__matmul *product);
dc__timestamp *dc__count_stream_timestamp(dc_stream *stream);
int64_t dc__count_timestamp_ns(dc__timestamp *stamp);
void dc__count_timestamp_release(dc__timestamp *stamp);

dc_status dc__count_event_create(dc_device *device, dc_event **event);
void dc__count_event_destroy(dc_event *event);
void dc__count_event_record(dc_event *event, dc_stream *stream);
dc_status dc__count_event_wait(dc_event *event, dc_stream *stream);
bool dc__count_event_passed(dc_event *event);
dc_status dc__count_event_sync(dc_event *event, int64_t timeout_ns);
void dc__count_event_set(dc_event *event);

/* The memory that an address belongs to: the program's own, or memory of alloc() by its kind. */
enum { DC__COUNT_OWN, DC__COUNT_DEVICE, DC__COUNT_HOST };
int32_t dc__count_memory_of(const void *ptr);

#endif
