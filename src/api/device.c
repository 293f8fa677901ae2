/* Chapter 4: devices, streams and events. (dc_buffer_* are in device/buffer.c.) */
#include <inttypes.h>
#include <string.h>

#include "device/device.h"
#include "kernels/kernels.h"

/* Sizes of the structs in the version that introduced them; frozen from then on. */
enum { DC__DEVICE_OPTIONS_SIZE_0_1 = 24, DC__ALLOCATOR_SIZE_0_1 = 40 };

_Static_assert(sizeof(void *) != 8 || sizeof(dc_device_options) >= DC__DEVICE_OPTIONS_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_allocator) >= DC__ALLOCATOR_SIZE_0_1, "0.1");

static dc_status device_check_pointer(const char *function, const char *argument, bool is_null) {
  return is_null ? dc__fail(DC_E_INVALID, "%s: %s is NULL", function, argument) : DC_OK;
}

/* Prefixes the device's error text with the function's name. */
static dc_status device_name_error(const char *function, dc_status status) {
  return status == DC_OK ? DC_OK : dc__fail(status, "%s: %s", function, dc_last_error());
}

static dc_status check_timeout(const char *function, int64_t timeout_ns) {
  if (timeout_ns < 0) {
    return dc__fail(DC_E_INVALID, "%s: timeout_ns = %" PRId64 ", must be >= 0", function, timeout_ns);
  }
  return DC_OK;
}

void dc_allocator_init(dc_allocator *allocator, size_t struct_size) {
  dc__init_sized(allocator, struct_size, sizeof(*allocator));
}

void dc_device_options_init(dc_device_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof(*options));
}

dc_status dc_device_open(const char *name, const dc_device_options *options, dc_device **device) {
  DC__WITHOUT_TRAPS;
  DC__TRY(device_check_pointer(__func__, "device", device == NULL));
  *device = NULL;
  DC__TRY(device_check_pointer(__func__, "name", name == NULL));
  dc_device_options read = DC_DEVICE_OPTIONS_INIT;
  DC__TRY(dc__read_options(__func__, "options", &read, sizeof(read), options, DC__DEVICE_OPTIONS_SIZE_0_1));
  if (read.max_pinned_bytes < 0) {
    return dc__fail(DC_E_INVALID, "%s: options.max_pinned_bytes = %" PRId64 ", must be >= 0 (0: half of the machine's)",
                    __func__, read.max_pinned_bytes);
  }
  dc_allocator allocator = DC_ALLOCATOR_INIT;
  if (read.allocator != NULL) {
    DC__TRY(dc__read_options(__func__, "options.allocator", &allocator, sizeof(allocator), read.allocator,
                             DC__ALLOCATOR_SIZE_0_1));
    if (allocator.alloc == NULL || allocator.free == NULL) {
      return dc__fail(DC_E_INVALID, "%s: options.allocator.%s is NULL, must be a function", __func__,
                      allocator.alloc == NULL ? "alloc" : "free");
    }
  }
  read.allocator = &allocator;
  if (strcmp(name, "cpu") == 0) {
    DC__TRY(dc__kernels_check(__func__));
    return device_name_error(__func__, dc__cpu_device_open(&allocator, device));
  }
  if (strcmp(name, "count") == 0) {
    return read.allocator->alloc == NULL
               ? device_name_error(__func__, dc__count_device_open(device))
               : dc__fail(DC_E_INVALID, "%s: options.allocator is given, but device \"count\" has no memory", __func__);
  }
  if (dc__cuda_is_name(name)) {
    return device_name_error(__func__, dc__cuda_device_open(name, &read, device));
  }
  return dc__fail(DC_E_NO_DEVICE, "%s: name = \"%.64s\", must be \"cpu\", \"count\", \"cuda\" or \"cuda:N\"", __func__,
                  name);
}

void dc_device_destroy(dc_device *device) {
  DC__WITHOUT_TRAPS;
  if (dc__handle_is(device, DC__HANDLE_DEVICE) && !dc__owner_is_forked(&device->owner)) {
    dc__device_release(device);
  }
}

const char *dc_device_name(const dc_device *device) {
  return dc__handle_is(device, DC__HANDLE_DEVICE) ? device->name : "";
}

dc_status dc_stream_wrap(dc_device *device, void *native, dc_stream **stream) {
  DC__WITHOUT_TRAPS;
  DC__TRY(device_check_pointer(__func__, "stream", stream == NULL));
  *stream = NULL;
  DC__TRY(dc__handle_check(__func__, "device", device, DC__HANDLE_DEVICE));
  DC__TRY(dc__owner_check(__func__, "device", &device->owner));
  if (device->ops->stream_wrap == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "%s: device \"%s\" has no streams of others", __func__, device->name);
  }
  return device_name_error(__func__, device->ops->stream_wrap(device, native, stream));
}

dc_status dc_stream_create(dc_device *device, dc_stream **stream) {
  DC__WITHOUT_TRAPS;
  DC__TRY(device_check_pointer(__func__, "stream", stream == NULL));
  *stream = NULL;
  DC__TRY(dc__handle_check(__func__, "device", device, DC__HANDLE_DEVICE));
  DC__TRY(dc__owner_check(__func__, "device", &device->owner));
  return device_name_error(__func__, device->ops->stream_create(device, stream));
}

void dc_stream_destroy(dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  if (dc__handle_is(stream, DC__HANDLE_STREAM) && !dc__owner_is_forked(&stream->device->owner)) {
    dc__handle_clear(&stream->handle);
    stream->device->ops->stream_destroy(stream);
  }
}

dc_status dc_stream_synchronize(dc_stream *stream, int64_t timeout_ns) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__handle_check(__func__, "stream", stream, DC__HANDLE_STREAM));
  DC__TRY(check_timeout(__func__, timeout_ns));
  DC__TRY(dc__owner_check(__func__, "stream", &stream->device->owner));
  return device_name_error(__func__, dc__stream_sync(stream, timeout_ns));
}

typedef struct user_call {
  dc_stream_fn fn;
  void *user;
} user_call;

static void run_user_call(void *args) {
  const user_call *call = args;
  call->fn(call->user);
}

dc_status dc_stream_call(dc_stream *stream, dc_stream_fn fn, void *user) {
  DC__WITHOUT_TRAPS;
  DC__TRY(device_check_pointer(__func__, "fn", fn == NULL));
  if (stream == NULL) { /* runs on this thread, at once */
    fn(user);
    return DC_OK;
  }
  DC__TRY(dc__handle_check(__func__, "stream", stream, DC__HANDLE_STREAM));
  DC__TRY(dc__owner_check(__func__, "stream", &stream->device->owner));
  user_call call = {fn, user};
  return device_name_error(__func__, stream->device->ops->stream_call(stream, run_user_call, &call, sizeof(call)));
}

dc_status dc_event_create(dc_device *device, dc_event **event) {
  DC__WITHOUT_TRAPS;
  DC__TRY(device_check_pointer(__func__, "event", event == NULL));
  *event = NULL;
  DC__TRY(dc__handle_check(__func__, "device", device, DC__HANDLE_DEVICE));
  DC__TRY(dc__owner_check(__func__, "device", &device->owner));
  return device_name_error(__func__, device->ops->event_create(device, event));
}

void dc_event_destroy(dc_event *event) {
  DC__WITHOUT_TRAPS;
  if (dc__handle_is(event, DC__HANDLE_EVENT) && !dc__owner_is_forked(&event->device->owner)) {
    dc__handle_clear(&event->handle);
    event->device->ops->event_destroy(event);
  }
}

dc_status dc_event_record(dc_event *event, dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__handle_check(__func__, "event", event, DC__HANDLE_EVENT));
  DC__TRY(dc__handle_check_optional(__func__, "stream", stream, DC__HANDLE_STREAM));
  DC__TRY(dc__owner_check(__func__, "event", &event->device->owner));
  DC__TRY(dc__stream_check_device(__func__, stream, "event", event->device));
  dc__event_record(event, stream);
  return DC_OK;
}

dc_status dc_event_wait(dc_event *event, dc_stream *stream, int64_t timeout_ns) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__handle_check(__func__, "event", event, DC__HANDLE_EVENT));
  DC__TRY(dc__handle_check_optional(__func__, "stream", stream, DC__HANDLE_STREAM));
  DC__TRY(dc__owner_check(__func__, "event", &event->device->owner));
  DC__TRY(dc__stream_check_device(__func__, stream, "event", event->device));
  if (stream != NULL) {
    return device_name_error(__func__, event->device->ops->event_wait(event, stream));
  }
  DC__TRY(check_timeout(__func__, timeout_ns));
  return device_name_error(__func__, event->device->ops->event_sync(event, timeout_ns));
}

dc_status dc_event_query(dc_event *event, int32_t *passed) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__handle_check(__func__, "event", event, DC__HANDLE_EVENT));
  DC__TRY(device_check_pointer(__func__, "passed", passed == NULL));
  DC__TRY(dc__owner_check(__func__, "event", &event->device->owner));
  *passed = dc__event_passed(event) ? 1 : 0;
  return *passed != 0 ? DC_OK : device_name_error(__func__, dc__device_check(event->device));
}
