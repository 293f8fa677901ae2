/* Memory of the device from a stream-ordered pool of its own, and pinned host memory, which is scarce: other processes
 * cannot use pinned pages. The arenas cache their memory, so a steady step allocates neither. Only the stream that
 * orders the pool is ever waited for. */
#include <inttypes.h>

#include "device/cuda/cuda.h"

static dc_status alloc_error(dc__cuda_device *device, const char *call, dc__cu_result error, size_t bytes,
                             const char *what) {
  dc_status status = dc__cuda_return_error(device, call, error);
  return dc__fail(status, "no %s for %zu bytes: %s", what, bytes, dc_last_error());
}

dc_status dc__cuda_pool_open(dc__cuda_device *device) {
  const dc__cu_pool_props props = {.alloc_type = 1, .location = {1, device->number}};
  dc__cu_result error = device->driver.cuMemPoolCreate(&device->pool, &props);
  if (error != 0) {
    return dc__cuda_return_error(device, "cuMemPoolCreate", error);
  }
  int64_t total = 0, unused;
  DC__TRY(device->cpu->ops->memory_info(device->cpu, &total, &unused));
  device->max_pinned = total / 2;
  return DC_OK;
}

static size_t cuda_alloc_size(size_t bytes) {
  return bytes == 0 ? DC__ALIGNMENT : (bytes + DC__ALIGNMENT - 1) / DC__ALIGNMENT * DC__ALIGNMENT;
}

static dc_status cuda_alloc_device(dc__cuda_device *device, size_t bytes, void **ptr) {
  dc__cu_ptr block = 0;
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  const char *call = "cuMemAllocFromPoolAsync";
  dc__cu_result error = device->driver.cuMemAllocFromPoolAsync(&block, bytes, device->pool, device->alloc_stream);
  if (error == 0) { /* after this wait any stream may use the memory */
    call = "cuStreamSynchronize";
    error = device->driver.cuStreamSynchronize(device->alloc_stream);
    if (error != 0) {
      (void)device->driver.cuMemFreeAsync(block, device->alloc_stream);
    }
  }
  dc__cuda_context_leave(entry);
  *ptr = (void *)(uintptr_t)block;
  return error == 0 ? DC_OK : alloc_error(device, call, error, bytes, "memory");
}

static dc_status alloc_pinned(dc__cuda_device *device, size_t bytes, void **ptr) {
  int64_t pinned = atomic_fetch_add(&device->pinned, (long long)bytes) + (int64_t)bytes;
  if (pinned > device->max_pinned) {
    atomic_fetch_sub(&device->pinned, (long long)bytes);
    return dc__fail(
        DC_E_NO_MEMORY,
        "device \"%s\": no pinned memory for %zu bytes: %" PRId64 " of at most %" PRId64
        " bytes are pinned (max_pinned_bytes of dc_device_options; by default half of the machine's memory)",
        device->head.name, bytes, pinned - (int64_t)bytes, device->max_pinned);
  }
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  dc__cu_result error = device->driver.cuMemHostAlloc(ptr, bytes, DC__CU_HOST_PORTABLE);
  dc__cuda_context_leave(entry);
  if (error != 0) {
    atomic_fetch_sub(&device->pinned, (long long)bytes);
    return alloc_error(device, "cuMemHostAlloc", error, bytes, "pinned memory");
  }
  return DC_OK;
}

dc_status dc__cuda_alloc(dc_device *device, size_t bytes, int32_t kind, void **ptr) {
  if (bytes > SIZE_MAX / 4) {
    return dc__fail(DC_E_NO_MEMORY, "device \"%s\": no block can have %zu bytes", device->name, bytes);
  }
  dc__cuda_device *self = (dc__cuda_device *)device;
  DC__TRY(dc__cuda_check(device));
  atomic_fetch_add_explicit(&device->allocations, 1, memory_order_relaxed);
  size_t size = cuda_alloc_size(bytes);
  if (kind == DC_MEMORY_HOST) {
    return alloc_pinned(self, size, ptr);
  }
  DC__TRY(device->allocator.alloc != NULL ? dc__device_alloc_user(device, size, ptr)
                                          : cuda_alloc_device(self, size, ptr));
  dc__device_count_bytes(device, (int64_t)size);
  return DC_OK;
}

bool dc__cuda_can_free(dc_device *device) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  return atomic_load(&self->failed) == 0 || dc__cuda_synchronize(self);
}

void dc__cuda_free(dc_device *device, void *ptr, size_t bytes, int32_t kind) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  size_t size = cuda_alloc_size(bytes);
  if (ptr == NULL || !dc__cuda_can_free(device)) {
    return;
  }
  if (kind != DC_MEMORY_HOST) {
    dc__device_count_bytes(device, -(int64_t)size);
    if (device->allocator.alloc != NULL) {
      device->allocator.free(ptr, (int64_t)size, DC__ALIGNMENT, device->allocator.user);
      return;
    }
  }
  dc__cuda_context_guard entry = dc__cuda_context_enter(self);
  if (kind == DC_MEMORY_HOST) {
    (void)DC__CUDA_KEEP(self, cuMemFreeHost, ptr);
    atomic_fetch_sub(&self->pinned, (long long)size);
  } else {
    (void)DC__CUDA_KEEP(self, cuMemFreeAsync, (uintptr_t)ptr, self->alloc_stream);
  }
  dc__cuda_context_leave(entry);
}

dc_status dc__cuda_memory_info(dc_device *device, int64_t *total, int64_t *free_bytes) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  size_t left = 0, all = 0;
  dc__cuda_context_guard entry = dc__cuda_context_enter(self);
  dc__cu_result error = self->driver.cuMemGetInfo_v2(&left, &all);
  dc__cuda_context_leave(entry);
  if (error != 0) {
    return dc__cuda_return_error(self, "cuMemGetInfo", error);
  }
  *total = (int64_t)all;
  *free_bytes = (int64_t)left;
  return DC_OK;
}
