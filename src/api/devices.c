/* Chapter 13: available devices, their memory, and tensors in it. */
#include <string.h>

#include "device/device.h"

enum { DEVICE_MEMORY_SIZE_0_1 = 40 };

_Static_assert(sizeof(dc_device_memory) >= DEVICE_MEMORY_SIZE_0_1, "0.1");

static int32_t cuda_devices(void) {
  int32_t count = 0;
  return dc__cuda_device_count(&count) == DC_OK ? count : 0;
}

int32_t dc_is_cuda_available(void) {
  DC__WITHOUT_TRAPS;
  return cuda_devices() > 0 ? 1 : 0;
}

int32_t dc_device_count(const char *kind) {
  DC__WITHOUT_TRAPS;
  if (kind == NULL) {
    return 0;
  }
  return strcmp(kind, "cpu") == 0 ? 1 : strcmp(kind, "cuda") == 0 ? cuda_devices() : 0;
}

/* Returned names are static, so there is one for each device that a machine may have. */
static const char *cuda_name(int32_t number) {
  static const char *const names[] = {"cuda:0",  "cuda:1",  "cuda:2",  "cuda:3", "cuda:4",  "cuda:5",
                                      "cuda:6",  "cuda:7",  "cuda:8",  "cuda:9", "cuda:10", "cuda:11",
                                      "cuda:12", "cuda:13", "cuda:14", "cuda:15"};
  return number < (int32_t)DC__COUNT(names) ? names[number] : NULL;
}

const char *dc_get_optimal_device(const char **reason) {
  DC__WITHOUT_TRAPS;
  const char *best = "cpu";
  const char *why = "no CUDA device can be opened here, so the CPU is the only one";
  int64_t most = -1;
  int32_t count = cuda_devices();
  for (int32_t i = 0; i < count && cuda_name(i) != NULL; i++) {
    dc_device *device;
    int64_t total, free_bytes;
    if (dc__cuda_device_open(cuda_name(i), NULL, &device) != DC_OK) {
      continue;
    }
    if (device->ops->memory_info(device, &total, &free_bytes) == DC_OK && free_bytes > most) {
      most = free_bytes;
      best = cuda_name(i);
      why = count == 1 ? "it is the one CUDA device" : "it has the most free memory of the CUDA devices";
    }
    dc__device_release(device);
  }
  if (reason != NULL) {
    *reason = why;
  }
  return best;
}

void dc_device_memory_init(dc_device_memory *memory, size_t struct_size) {
  dc__init_sized(memory, struct_size, sizeof *memory);
}

dc_status dc_device_get_memory(dc_device *device, dc_device_memory *memory) {
  DC__WITHOUT_TRAPS;
  dc_device_memory now = {.struct_size = sizeof now};
  size_t size;
  DC__TRY(dc__handle_check(__func__, "device", device, DC__HANDLE_DEVICE));
  if (memory == NULL) {
    return dc__fail(DC_E_INVALID, "%s: memory is NULL", __func__);
  }
  DC__TRY(dc__owner_check(__func__, "device", &device->owner));
  memcpy(&size, memory, sizeof size);
  DC__TRY(dc__check_size(__func__, "memory", size, DEVICE_MEMORY_SIZE_0_1));
  dc_status status = device->ops->memory_info(device, &now.total_bytes, &now.free_bytes);
  if (status != DC_OK) {
    return dc__fail(status, "%s: %s", __func__, dc_last_error());
  }
  now.reserved_bytes = atomic_load_explicit(&device->bytes, memory_order_relaxed);
  now.peak_bytes = atomic_load_explicit(&device->peak_bytes, memory_order_relaxed);
  return dc__write_sized(__func__, "memory", memory, &now, sizeof now, DEVICE_MEMORY_SIZE_0_1);
}

/* Creates a zeroed buffer in an arena of its own, which is freed with the buffer. */
static dc_status devices_create_buffer(dc_device *device, size_t bytes, dc_buffer **buffer) {
  dc__arena *arena;
  void *ptr;
  DC__TRY(dc__arena_create(device, NULL, &arena));
  dc_status status = dc__arena_alloc(arena, NULL, bytes, &ptr);
  if (status == DC_OK) {
    dc__stream_zero(dc__stream_or_internal(device, NULL), ptr, bytes);
    dc__device_sync_internal(device, NULL);
    status = dc__buffer_create(arena, ptr, bytes, buffer);
  }
  dc__arena_release(arena);
  return status;
}

dc_status dc_tensor_create(dc_device *device, const int64_t *shape, int32_t ndim, int32_t dtype, dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  int64_t count;
  dc_buffer *buffer;
  DC__TRY(dc__handle_check(__func__, "device", device, DC__HANDLE_DEVICE));
  DC__TRY(dc__owner_check(__func__, "device", &device->owner));
  DC__TRY(dc__tensor_check_output(__func__, "out", out));
  DC__TRY(dc__numel(__func__, "shape", shape, ndim, &count));
  if (dc_dtype_size(dtype) == 0) {
    return dc__fail(DC_E_DTYPE, "%s: dtype = %d is no element type", __func__, (int)dtype);
  }
  dc_status status = devices_create_buffer(device, (size_t)count * dc_dtype_size(dtype), &buffer);
  if (status != DC_OK) {
    return dc__fail(status, "%s: %s", __func__, dc_last_error());
  }
  const int64_t *kept;
  status = dc__buffer_keep_shape(buffer, shape, ndim, &kept);
  if (status != DC_OK) {
    dc_buffer_release(buffer);
    return dc__fail(status, "%s: %s", __func__, dc_last_error());
  }
  return dc__tensor_write(__func__, "out", out, dc_buffer_data(buffer), kept, ndim, dtype, buffer);
}
