/* The CPU device: its table and its memory. */
#define _GNU_SOURCE /* madvise, MAP_ANONYMOUS */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "device/cpu/cpu.h"

static const size_t HUGE_PAGE = (size_t)2 << 20;

static size_t cpu_round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/* Page faults are the main cost of fresh memory, so large blocks begin and end at huge pages. */
static void *map_huge(size_t bytes) {
  unsigned char *map = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) {
    return NULL;
  }
  size_t before = cpu_round_up((uintptr_t)map, HUGE_PAGE) - (uintptr_t)map;
  if (before > 0) {
    munmap(map, before);
  }
  munmap(map + before + bytes, HUGE_PAGE - before);
  /* A kernel without huge pages refuses; the memory is as good, only slower. */
  (void)madvise(map + before, bytes, MADV_HUGEPAGE);
  return map + before;
}

/* Both kinds of memory are the same here. The size is rounded, so that alloc and free agree on it. */
static size_t cpu_alloc_size(size_t bytes) {
  return bytes >= HUGE_PAGE ? cpu_round_up(bytes, HUGE_PAGE) : cpu_round_up(bytes == 0 ? 1 : bytes, DC__ALIGNMENT);
}

static dc_status cpu_alloc(dc_device *device, size_t bytes, int32_t kind, void **ptr) {
  (void)kind;
  if (bytes > SIZE_MAX / 4) {
    return dc__fail(DC_E_NO_MEMORY, "device \"cpu\": no block can have %zu bytes", bytes);
  }
  atomic_fetch_add_explicit(&device->allocations, 1, memory_order_relaxed);
  size_t size = cpu_alloc_size(bytes);
  if (device->allocator.alloc != NULL) {
    DC__TRY(dc__device_alloc_user(device, size, ptr));
    dc__device_count_bytes(device, (int64_t)size);
    return DC_OK;
  }
  errno = ENOMEM;
  void *block = size >= HUGE_PAGE ? map_huge(size) : aligned_alloc(DC__ALIGNMENT, size);
  if (block == NULL) {
    return dc__fail(DC_E_NO_MEMORY, "device \"cpu\": no memory for %zu bytes: %s", bytes, strerror(errno));
  }
  *ptr = block;
  dc__device_count_bytes(device, (int64_t)size);
  return DC_OK;
}

static void cpu_free(dc_device *device, void *ptr, size_t bytes, int32_t kind) {
  (void)kind;
  if (ptr == NULL) {
    return;
  }
  size_t size = cpu_alloc_size(bytes);
  dc__device_count_bytes(device, -(int64_t)size);
  if (device->allocator.alloc != NULL) {
    device->allocator.free(ptr, (int64_t)size, DC__ALIGNMENT, device->allocator.user);
  } else if (size >= HUGE_PAGE) {
    munmap(ptr, size);
  } else {
    free(ptr);
  }
}

/* ---- failures ---- */

void dc__cpu_keep_failure(dc_device *device, dc_status status) {
  dc__cpu_device *self = (dc__cpu_device *)device;
  pthread_mutex_lock(&self->mutex);
  dc__failure_keep(&self->failure, status);
  atomic_store_explicit(&self->failed, 1, memory_order_release);
  pthread_mutex_unlock(&self->mutex);
}

static dc_status cpu_check(dc_device *device) {
  dc__cpu_device *self = (dc__cpu_device *)device;
  if (atomic_load_explicit(&self->failed, memory_order_acquire) == 0) {
    return DC_OK;
  }
  pthread_mutex_lock(&self->mutex);
  dc_status status = dc__failure_raise(&self->failure);
  pthread_mutex_unlock(&self->mutex);
  return status;
}

/* ---- the device ---- */

static void cpu_device_destroy(dc_device *device) {
  pthread_mutex_destroy(&((dc__cpu_device *)device)->mutex);
  dc__device_head_destroy(device);
}

static const dc__device_ops cpu_ops = {
    .alloc = cpu_alloc,
    .free = cpu_free,
    .stream_create = dc__cpu_stream_create,
    .stream_destroy = dc__cpu_stream_destroy,
    .stream_sync = dc__cpu_stream_sync,
    .stream_call = dc__cpu_stream_call,
    .stream_copy = dc__cpu_stream_copy,
    .stream_zero = dc__cpu_stream_zero,
    .event_create = dc__cpu_event_create,
    .event_destroy = dc__cpu_event_destroy,
    .event_record = dc__cpu_event_record,
    .event_wait = dc__cpu_event_wait,
    .event_passed = dc__cpu_event_passed,
    .event_sync = dc__cpu_event_sync,
    .event_set = dc__cpu_event_set,
    .memory_info = dc__cpu_memory_info,
    .keep_failure = dc__cpu_keep_failure,
    .check = cpu_check,
    .destroy = cpu_device_destroy,
};

dc_status dc__cpu_device_open(const dc_allocator *allocator, dc_device **device) {
  dc__cpu_device *self = dc__calloc(1, sizeof(*self));
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__device_head_init(&self->head, &cpu_ops, "cpu", allocator);
  pthread_mutex_init(&self->mutex, NULL);
  atomic_init(&self->failed, 0);
  *device = &self->head;
  return DC_OK;
}
