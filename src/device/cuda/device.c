/* Opening and closing the CUDA device, its table of operations, its first failure, and the plug-in's one exported
 * name. */
#include <stdio.h>
#include <string.h>

#include "device/cuda/cuda.h"
#include "device/cuda/vendor_library.h"

void dc__cuda_keep_failure(dc_device *device, dc_status status) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  pthread_mutex_lock(&self->mutex);
  dc__failure_keep(&self->failure, status);
  atomic_store(&self->failed, 1);
  pthread_mutex_unlock(&self->mutex);
}

static dc_status device_error(dc__cuda_device *device, const char *call, dc__cu_result error) {
  char name[sizeof device->model + 32];
  snprintf(name, sizeof name, "device \"%s\" (%s)", device->head.name, device->model);
  return dc__cuda_error(&device->driver, name, call, error);
}

dc_status dc__cuda_keep_error(dc__cuda_device *device, const char *call, dc__cu_result error) {
  if (error == 0) {
    return DC_OK;
  }
  dc_status status = device_error(device, call, error);
  dc__cuda_keep_failure(&device->head, status);
  return status;
}

dc_status dc__cuda_keep_stream_error(dc__cuda_stream *stream, const char *call, dc__cu_result error) {
  dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  return error == DC__CU_CAPTURE_INVALIDATED && dc__cuda_is_capture_spoiled(stream)
             ? device_error(device, call, error)
             : dc__cuda_keep_error(device, call, error);
}

dc_status dc__cuda_return_error(dc__cuda_device *device, const char *call, dc__cu_result error) {
  if (error == 0) {
    return DC_OK;
  }
  dc_status status = device_error(device, call, error);
  if (dc__cuda_is_lost(error)) {
    dc__cuda_keep_failure(&device->head, status);
  }
  return status;
}

dc_status dc__cuda_open_error(const dc__cuda_device *device, const char *call, dc__cu_result error) {
  const char *name = device->model[0] != '\0' ? device->model : "CUDA";
  return error == 0 ? DC_OK : dc__cuda_error(&device->driver, name, call, error);
}

bool dc__cuda_synchronize(dc__cuda_device *device) {
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  dc__cu_result error = device->driver.cuCtxSynchronize();
  dc__cuda_context_leave(entry);
  (void)dc__cuda_keep_error(device, "cuCtxSynchronize", error);
  return error == 0 || dc__cuda_is_lost(error);
}

dc_status dc__cuda_check(dc_device *device) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  if (atomic_load(&self->failed) == 0) {
    return DC_OK;
  }
  pthread_mutex_lock(&self->mutex);
  dc_status status = dc__failure_raise(&self->failure);
  pthread_mutex_unlock(&self->mutex);
  return status;
}

/* ---- closing ---- */

/* Releases whatever open_device() has acquired so far; the rest is NULL. */
static void device_destroy(dc_device *device) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  const dc__cuda_driver *driver = &self->driver;
  if (self->context != NULL) {
    if (self->head.internal_stream != NULL) {
      dc__cuda_stream_destroy(self->head.internal_stream);
    }
    if (self->foreign_sync_stream != NULL) {
      dc__cuda_stream_destroy(self->foreign_sync_stream); /* waits until wrapped streams no longer run our kernels */
    }
    dc__cuda_context_guard entry = dc__cuda_context_enter(self);
    dc__cuda_peers_leave(self);
    if (self->alloc_stream != NULL) {
      (void)driver->cuStreamSynchronize(self->alloc_stream);
      (void)driver->cuStreamDestroy_v2(self->alloc_stream);
    }
    dc__cuda_cublaslt_close(self);
    dc__cuda_cusolver_close(self);
    dc__cuda_event_pool_destroy(self);
    dc__cuda_timestamps_free(self);
    dc__cuda_kernels_unload(self);
    if (self->pool != NULL) {
      (void)driver->cuMemPoolDestroy(self->pool);
    }
    dc__cuda_context_leave(entry);
    (void)driver->cuDevicePrimaryCtxRelease_v2(self->number);
  }
  dc__device_release(self->cpu);
  pthread_mutex_destroy(&self->mutex);
  dc__device_head_destroy(device);
}

/* ---- opening ---- */

static const dc__device_ops ops = {
    .begin = dc__cuda_device_begin,
    .end = dc__cuda_device_end,
    .pause = dc__cuda_device_pause,
    .alloc = dc__cuda_alloc,
    .free = dc__cuda_free,
    .stream_create = dc__cuda_stream_create,
    .stream_destroy = dc__cuda_stream_destroy,
    .stream_sync = dc__cuda_stream_sync,
    .stream_call = dc__cuda_stream_call,
    .stream_copy = dc__cuda_stream_copy,
    .stream_zero = dc__cuda_stream_zero,
    .stream_timestamp = dc__cuda_stream_timestamp,
    .timestamp_ns = dc__cuda_timestamp_ns,
    .timestamp_release = dc__cuda_timestamp_release,
    .stream_launch = dc__cuda_stream_launch,
    .stream_issue = dc__cuda_stream_issue,
    .matmul_init = dc__cuda_matmul_init,
    .stream_matmul = dc__cuda_stream_matmul,
    .eigh_workspace_size = dc__cuda_eigh_workspace_size,
    .stream_eigh = dc__cuda_stream_eigh,
    .qr_workspace_size = dc__cuda_qr_workspace_size,
    .stream_qr = dc__cuda_stream_qr,
    .stream_wrap = dc__cuda_stream_wrap,
    .stream_captures = dc__cuda_stream_captures,
    .event_create = dc__cuda_event_create,
    .event_destroy = dc__cuda_event_destroy,
    .event_record = dc__cuda_event_record,
    .event_wait = dc__cuda_event_wait,
    .event_passed = dc__cuda_event_passed,
    .event_sync = dc__cuda_event_sync,
    .event_set = dc__cuda_event_set,
    .memory_info = dc__cuda_memory_info,
    .enable_peer_access = dc__cuda_enable_peer_access,
    .keep_failure = dc__cuda_keep_failure,
    .check = dc__cuda_check,
    .can_free = dc__cuda_can_free,
    .destroy = device_destroy,
};

/* Checks that the device exists and supports what libdc needs. */
static dc_status device_identify(dc__cuda_device *self, int32_t number) {
  int count = 0, minor = 0, pools = 0;
  DC__TRY(DC__CUDA_OPEN(self, cuDeviceGetCount, &count));
  if (number >= count) {
    return dc__fail(DC_E_NO_DEVICE, "CUDA: name = \"%s\", but the machine has %d device%s", self->head.name, count,
                    count == 1 ? "" : "s");
  }
  DC__TRY(DC__CUDA_OPEN(self, cuDeviceGet, &self->number, number));
  DC__TRY(DC__CUDA_OPEN(self, cuDeviceGetName, self->model, (int)sizeof self->model, self->number));
  DC__TRY(DC__CUDA_OPEN(self, cuDeviceGetAttribute, &self->major, DC__CU_ATTRIBUTE_MAJOR, self->number));
  DC__TRY(DC__CUDA_OPEN(self, cuDeviceGetAttribute, &minor, DC__CU_ATTRIBUTE_MINOR, self->number));
  DC__TRY(DC__CUDA_OPEN(self, cuDeviceGetAttribute, &pools, DC__CU_ATTRIBUTE_POOLS, self->number));
  if (self->major < 8) {
    return dc__fail(DC_E_NO_DEVICE, "CUDA: %s has compute capability %d.%d, must be 8.0 or more", self->model,
                    self->major, minor);
  }
  return pools != 0 ? DC_OK : dc__fail(DC_E_NO_DEVICE, "CUDA: %s has no stream-ordered memory", self->model);
}

static dc_status open_inside(dc__cuda_device *self) {
  DC__TRY(DC__CUDA_OPEN(self, cuStreamCreate, &self->alloc_stream, DC__CU_STREAM_NON_BLOCKING));
  DC__TRY(dc__cuda_pool_open(self));
  DC__TRY(dc__cuda_peers_join(self));
  DC__TRY(dc__cuda_kernels_load(self));
  DC__TRY(dc__cuda_internal_stream_create(self, &self->foreign_sync_stream));
  return dc__cuda_internal_stream_create(self, &self->head.internal_stream);
}

static dc_status open_context(dc__cuda_device *self, int32_t number) {
  DC__TRY(dc__cuda_driver_open(&self->driver));
  DC__TRY(device_identify(self, number));
  DC__TRY(DC__CUDA_OPEN(self, cuDevicePrimaryCtxRetain, &self->context, self->number));
  dc__cuda_context_guard entry = dc__cuda_context_enter(self);
  dc_status status = open_inside(self);
  dc__cuda_context_leave(entry);
  return status;
}

static dc_status open_device(int32_t number, const char *name, const dc_device_options *options, dc_device **device) {
  dc__cuda_device *self = dc__calloc(1, sizeof *self);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__cuda_event_pool_init();
  pthread_mutex_init(&self->mutex, NULL);
  dc__device_head_init(&self->head, &ops, name, NULL);
  self->head.memory_space = number + 1;
  self->cpu = dc__cuda_cpu_device();
  dc_status status = self->cpu == NULL ? DC_E_NO_MEMORY : open_context(self, number);
  if (status != DC_OK) {
    device_destroy(&self->head);
    return status;
  }
  if (options != NULL) {
    self->head.allocator = *options->allocator; /* a failure after this would have to destroy it */
    self->max_pinned = options->max_pinned_bytes > 0 ? options->max_pinned_bytes : self->max_pinned;
  }
  *device = &self->head;
  return DC_OK;
}

/* ---- the plug-in ---- */

static dc_status count_devices(int32_t *count) {
  dc__cuda_driver driver;
  DC__TRY(dc__cuda_driver_open(&driver));
  int number = 0;
  dc__cu_result error = driver.cuDeviceGetCount(&number);
  *count = number;
  return error == 0 ? DC_OK : dc__cuda_error(&driver, "CUDA", "cuDeviceGetCount", error);
}

static void *open_library(const char *name, const char *folder) {
  const dc__vendor_library library = {name, folder, 0};
  return dc__vendor_library_open(&library, 1, 0);
}

__attribute__((visibility("default"))) const dc__plugin *dc_plugin_entry(const dc__plugin_host *host);
const dc__plugin *dc_plugin_entry(const dc__plugin_host *host) {
  static const dc__plugin plugin = {.version = DC_API_VERSION,
                                    .device_ops_bytes = sizeof(dc__device_ops),
                                    .count = count_devices,
                                    .library = open_library,
                                    .open = open_device};
  dc__cuda_set_host(host);
  return &plugin;
}
