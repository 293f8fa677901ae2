/* Opening and closing the CUDA device; its table; its first failure; the plug-in's one exported name. */
#include <stdio.h>
#include <string.h>

#include "device/cuda/cuda.h"
#include "device/cuda/host.h"
#include "device/cuda/library.h"

void dc__cuda_keep_status(dc__cuda_device *device, dc_status status) {
  pthread_mutex_lock(&device->mutex);
  dc__failure_keep(&device->failure, status);
  atomic_store(&device->failed, 1);
  pthread_mutex_unlock(&device->mutex);
}

static dc_status describe(dc__cuda_device *device, const char *call, dc__cu_result error) {
  char name[sizeof device->model + 32];
  snprintf(name, sizeof name, "device \"%s\" (%s)", device->head.name, device->model);
  return dc__cuda_error(&device->driver, name, call, error);
}

dc_status dc__cuda_keep(dc__cuda_device *device, const char *call, dc__cu_result error) {
  if (error == 0) {
    return DC_OK;
  }
  dc_status status = describe(device, call, error);
  dc__cuda_keep_status(device, status);
  return status;
}

dc_status dc__cuda_refused(dc__cuda_device *device, const char *call, dc__cu_result error) {
  if (error == 0) {
    return DC_OK;
  }
  dc_status status = describe(device, call, error);
  if (dc__cuda_is_lost(error)) {
    dc__cuda_keep_status(device, status);
  }
  return status;
}

bool dc__cuda_settle(dc__cuda_device *device) {
  dc__cuda_entry entry = dc__cuda_enter(device);
  dc__cu_result error = device->driver.cuCtxSynchronize();
  dc__cuda_leave(entry);
  (void)dc__cuda_keep(device, "cuCtxSynchronize", error);
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

/* Of what open() got; what it did not get is NULL. */
static void destroy(dc_device *device) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  const dc__cuda_driver *driver = &self->driver;
  if (self->context != NULL) {
    if (self->head.here != NULL) {
      dc__cuda_stream_destroy(self->head.here);
    }
    if (self->others != NULL) {
      dc__cuda_stream_destroy(self->others); /* when their streams do not run our kernels any more */
    }
    dc__cuda_entry entry = dc__cuda_enter(self);
    dc__cuda_peers_leave(self);
    if (self->memory != NULL) {
      (void)driver->cuStreamSynchronize(self->memory);
      (void)driver->cuStreamDestroy_v2(self->memory);
    }
    dc__cuda_products_close(self);
    dc__cuda_solver_close(self);
    dc__cuda_marks_free(self);
    dc__cuda_stamps_free(self);
    dc__cuda_kernels_unload(self);
    if (self->pool != NULL) {
      (void)driver->cuMemPoolDestroy(self->pool);
    }
    dc__cuda_leave(entry);
    (void)driver->cuDevicePrimaryCtxRelease_v2(self->number);
  }
  dc__device_release(self->cpu);
  pthread_cond_destroy(&self->issued);
  pthread_mutex_destroy(&self->mutex);
  dc__device_head_destroy(device);
}

/* ---- opening ---- */

static const dc__device_ops ops = {
    .begin = dc__cuda_begin,
    .end = dc__cuda_end,
    .pause = dc__cuda_pause,
    .alloc = dc__cuda_alloc,
    .free = dc__cuda_free,
    .stream_create = dc__cuda_stream_create,
    .stream_destroy = dc__cuda_stream_destroy,
    .stream_sync = dc__cuda_stream_sync,
    .stream_call = dc__cuda_stream_call,
    .stream_copy = dc__cuda_stream_copy,
    .stream_zero = dc__cuda_stream_zero,
    .stream_stamp = dc__cuda_stream_stamp,
    .stamp_ns = dc__cuda_stamp_ns,
    .stamp_drop = dc__cuda_stamp_drop,
    .stream_launch = dc__cuda_stream_launch,
    .stream_issue = dc__cuda_stream_issue,
    .product_ready = dc__cuda_product_ready,
    .stream_product = dc__cuda_stream_product,
    .eigen_room = dc__cuda_eigen_room,
    .stream_eigen = dc__cuda_stream_eigen,
    .qr_room = dc__cuda_qr_room,
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
    .memory = dc__cuda_memory,
    .reads = dc__cuda_reads,
    .check = dc__cuda_check,
    .is_quiet = dc__cuda_is_quiet,
    .destroy = destroy,
};

/* The device is there, and can do what is asked of it. */
static dc_status identify(dc__cuda_device *self, int32_t number) {
  int count = 0, minor = 0, pools = 0;
  DC__CUDA_CALL(self, cuDeviceGetCount, &count);
  if (number >= count) {
    return dc__fail(DC_E_NO_DEVICE, "CUDA: name = \"%s\", but the machine has %d device%s", self->head.name, count,
                    count == 1 ? "" : "s");
  }
  DC__CUDA_CALL(self, cuDeviceGet, &self->number, number);
  DC__CUDA_CALL(self, cuDeviceGetName, self->model, (int)sizeof self->model, self->number);
  DC__CUDA_CALL(self, cuDeviceGetAttribute, &self->major, DC__CU_ATTRIBUTE_MAJOR, self->number);
  DC__CUDA_CALL(self, cuDeviceGetAttribute, &minor, DC__CU_ATTRIBUTE_MINOR, self->number);
  DC__CUDA_CALL(self, cuDeviceGetAttribute, &pools, DC__CU_ATTRIBUTE_POOLS, self->number);
  if (self->major < 8) {
    return dc__fail(DC_E_NO_DEVICE, "CUDA: %s has compute capability %d.%d, must be 8.0 or more", self->model,
                    self->major, minor);
  }
  return pools != 0 ? DC_OK : dc__fail(DC_E_NO_DEVICE, "CUDA: %s has no stream-ordered memory", self->model);
}

static dc_status open_inside(dc__cuda_device *self) {
  DC__CUDA_CALL(self, cuStreamCreate, &self->memory, DC__CU_STREAM_NON_BLOCKING);
  DC__TRY(dc__cuda_pool_open(self));
  DC__TRY(dc__cuda_peers_join(self));
  DC__TRY(dc__cuda_kernels_load(self));
  DC__TRY(dc__cuda_inner_create(self, &self->others));
  return dc__cuda_inner_create(self, &self->head.here);
}

static dc_status open_context(dc__cuda_device *self, int32_t number) {
  DC__TRY(dc__cuda_driver_open(&self->driver));
  DC__TRY(identify(self, number));
  DC__CUDA_CALL(self, cuDevicePrimaryCtxRetain, &self->context, self->number);
  dc__cuda_entry entry = dc__cuda_enter(self);
  dc_status status = open_inside(self);
  dc__cuda_leave(entry);
  return status;
}

static dc_status open_device(int32_t number, const char *name, const dc_allocator *allocator, dc_device **device) {
  dc__cuda_device *self = dc__calloc(1, sizeof *self);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&self->issued, &attributes);
  pthread_condattr_destroy(&attributes);
  pthread_mutex_init(&self->mutex, NULL);
  dc__device_head_init(&self->head, &ops, name, NULL);
  self->head.place = number + 1;
  self->cpu = dc__cuda_cpu();
  dc_status status = self->cpu == NULL ? DC_E_NO_MEMORY : open_context(self, number);
  if (status != DC_OK) {
    destroy(&self->head);
    return status;
  }
  if (allocator != NULL) {
    self->head.allocator = *allocator; /* it is ours to end from here on */
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
  const dc__library library = {name, folder, 0};
  return dc__library_open(&library, 1, 0);
}

__attribute__((visibility("default"))) const dc__plugin *dc_plugin_entry(const dc__plugin_host *host);
const dc__plugin *dc_plugin_entry(const dc__plugin_host *host) {
  static const dc__plugin plugin = {DC_API_VERSION, sizeof(dc__device_ops), count_devices, open_library, open_device};
  dc__cuda_set_host(host);
  return &plugin;
}
