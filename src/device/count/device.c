/* The counting device: its table, its memory and its figures. */
#include "device/count/count.h"

#include <string.h>

/* No processor maps these addresses, so any access to such memory faults at once. */
static const uintptr_t FIRST_DEVICE = (uintptr_t)1 << (sizeof(uintptr_t) * 8 - 4);
static const uintptr_t FIRST_HOST = (uintptr_t)2 << (sizeof(uintptr_t) * 8 - 4);
static const uintptr_t END_HOST = (uintptr_t)3 << (sizeof(uintptr_t) * 8 - 4);

int32_t dc__count_memory_of(const void *ptr) {
  uintptr_t address = (uintptr_t)ptr;
  if (address < FIRST_DEVICE || address >= END_HOST) {
    return DC__COUNT_OWN;
  }
  return address < FIRST_HOST ? DC__COUNT_DEVICE : DC__COUNT_HOST;
}

/* ---- figures ---- */

static const dc__count_entry entries[DC__COUNT_VALUES] = {
    [DC__COUNT_MEMORY_BYTES] = {"memory_bytes", true},
    [DC__COUNT_FLOPS] = {"flops_per_second", true},
    [DC__COUNT_MEMORY_RATE] = {"memory_bytes_per_second", true},
    [DC__COUNT_HOST_RATE] = {"host_bytes_per_second", true},
    [DC__COUNT_LAUNCH_NS] = {"launch_ns", true},
    [DC__COUNT_NODE_RANKS] = {"ranks_per_node", true},
    [DC__COUNT_NODE_RATE] = {"node_bytes_per_second", true},
    [DC__COUNT_NODE_NS] = {"node_latency_ns", true},
    [DC__COUNT_NETWORK_RATE] = {"network_bytes_per_second", true},
    [DC__COUNT_NETWORK_NS] = {"network_latency_ns", true},
    [DC__COUNT_TIME_NS] = {"time_ns", false},
    [DC__COUNT_PRODUCT_FLOPS] = {"product_flops", false},
    [DC__COUNT_LAUNCHES] = {"launches", false},
    [DC__COUNT_COPIED_BYTES] = {"copied_bytes", false},
    [DC__COUNT_HOST_COPIED_BYTES] = {"host_copied_bytes", false},
    [DC__COUNT_HOST_BYTES] = {"host_bytes", false},
    [DC__COUNT_HOST_PEAK_BYTES] = {"host_peak_bytes", false},
    [DC__COUNT_NODE_BYTES] = {"node_received_bytes", false},
    [DC__COUNT_NETWORK_BYTES] = {"network_received_bytes", false},
    [DC__COUNT_COLLECTIVES] = {"collectives", false},
    [DC__COUNT_LINK_BUSY_NS] = {"link_busy_ns", false},
    [DC__COUNT_LINK_FREE_NS] = {"link_free_ns", false},
};

const dc__count_entry *dc__count_entry_of(int32_t which) {
  return &entries[which];
}

int32_t dc__count_find(const char *name) {
  for (int32_t i = 0; i < DC__COUNT_VALUES; i++) {
    if (strcmp(entries[i].name, name) == 0) {
      return i;
    }
  }
  return -1;
}

int64_t dc__count_get(dc_device *device, int32_t which) {
  dc__count_device *self = (dc__count_device *)device;
  pthread_mutex_lock(&self->mutex);
  int64_t value = self->values[which];
  pthread_mutex_unlock(&self->mutex);
  return value;
}

void dc__count_set(dc_device *device, int32_t which, int64_t value) {
  dc__count_device *self = (dc__count_device *)device;
  pthread_mutex_lock(&self->mutex);
  self->values[which] = value;
  pthread_mutex_unlock(&self->mutex);
}

void dc__count_add(dc_device *device, int32_t which, int64_t value) {
  dc__count_device *self = (dc__count_device *)device;
  pthread_mutex_lock(&self->mutex);
  self->values[which] += value;
  pthread_mutex_unlock(&self->mutex);
}

int64_t dc__count_duration(dc_device *device, int32_t rate, int64_t amount) {
  int64_t each_second = dc__count_get(device, rate);
  return each_second == 0 ? 0 : (int64_t)((double)amount * 1e9 / (double)each_second);
}

/* ---- memory ---- */

static size_t count_alloc_size(size_t bytes) {
  return (bytes == 0 ? 1 : bytes + DC__ALIGNMENT - 1) / DC__ALIGNMENT * DC__ALIGNMENT;
}

/* Addresses are never reused, so a late use of freed memory is not mistaken for another block's. NULL if the kind's
 * range is used up; the next range belongs to another kind, or to the program. */
static void *take_addresses(dc__count_device *self, size_t size, int32_t kind) {
  const uintptr_t end = kind == DC_MEMORY_HOST ? END_HOST : FIRST_HOST;
  uintptr_t *next = kind == DC_MEMORY_HOST ? &self->next_host : &self->next_device;
  pthread_mutex_lock(&self->mutex);
  const bool fits = size <= end - *next;
  void *ptr = fits ? (void *)*next : NULL;
  *next += fits ? size : 0;
  if (fits && kind == DC_MEMORY_HOST) {
    int64_t now = self->values[DC__COUNT_HOST_BYTES] += (int64_t)size;
    int64_t *peak = &self->values[DC__COUNT_HOST_PEAK_BYTES];
    *peak = now > *peak ? now : *peak;
  }
  pthread_mutex_unlock(&self->mutex);
  return ptr;
}

static dc_status count_alloc(dc_device *device, size_t bytes, int32_t kind, void **ptr) {
  int64_t total = dc__count_get(device, DC__COUNT_MEMORY_BYTES);
  if (bytes > SIZE_MAX / 4) {
    return dc__fail(DC_E_NO_MEMORY, "device \"%s\": no block can have %zu bytes", device->name, bytes);
  }
  size_t size = count_alloc_size(bytes);
  atomic_fetch_add_explicit(&device->allocations, 1, memory_order_relaxed);
  if (kind != DC_MEMORY_HOST) {
    int64_t used = atomic_load_explicit(&device->bytes, memory_order_relaxed);
    if (total > 0 && (int64_t)size > total - used) {
      return dc__fail(DC_E_NO_MEMORY, "device \"%s\": %zu bytes do not fit beside %lld of %lld", device->name, size,
                      (long long)used, (long long)total);
    }
  }
  void *taken = take_addresses((dc__count_device *)device, size, kind);
  if (taken == NULL) {
    return dc__fail(DC_E_NO_MEMORY, "device \"%s\": no addresses are left for %zu bytes", device->name, size);
  }
  if (kind != DC_MEMORY_HOST) {
    dc__device_count_bytes(device, (int64_t)size);
  }
  *ptr = taken;
  return DC_OK;
}

static void count_free(dc_device *device, void *ptr, size_t bytes, int32_t kind) {
  if (ptr == NULL) {
    return;
  }
  int64_t size = (int64_t)count_alloc_size(bytes);
  if (kind == DC_MEMORY_HOST) {
    dc__count_add(device, DC__COUNT_HOST_BYTES, -size);
  } else {
    dc__device_count_bytes(device, -size);
  }
}

static dc_status count_memory_info(dc_device *device, int64_t *total, int64_t *free_bytes) {
  int64_t limit = dc__count_get(device, DC__COUNT_MEMORY_BYTES);
  *total = limit > 0 ? limit : INT64_MAX;
  *free_bytes = *total - atomic_load_explicit(&device->bytes, memory_order_relaxed);
  return DC_OK;
}

/* ---- the device ---- */

static dc_status count_matmul_init(dc_device *device) {
  (void)device;
  return DC_OK;
}

/* Only the vendor's library knows how much memory a decomposition takes. */
static dc_status count_eigh_workspace_size(dc_device *device, dc__eigh *eigen) {
  (void)eigen;
  return dc__fail(DC_E_UNSUPPORTED, "device \"%s\" counts no eigendecompositions", device->name);
}

static dc_status count_qr_workspace_size(dc_device *device, dc__qr *qr) {
  (void)qr;
  return dc__fail(DC_E_UNSUPPORTED, "device \"%s\" counts no QR decompositions", device->name);
}

static void count_device_destroy(dc_device *device) {
  pthread_mutex_destroy(&((dc__count_device *)device)->mutex);
  dc__device_head_destroy(device);
}

static const dc__device_ops count_ops = {
    .alloc = count_alloc,
    .free = count_free,
    .stream_create = dc__count_stream_create,
    .stream_destroy = dc__count_stream_destroy,
    .stream_sync = dc__count_stream_sync,
    .stream_call = dc__count_stream_call,
    .stream_issue = dc__count_stream_issue,
    .stream_copy = dc__count_stream_copy,
    .stream_zero = dc__count_stream_zero,
    .stream_launch = dc__count_stream_launch,
    .stream_timestamp = dc__count_stream_timestamp,
    .timestamp_ns = dc__count_timestamp_ns,
    .timestamp_release = dc__count_timestamp_release,
    .matmul_init = count_matmul_init,
    .stream_matmul = dc__count_stream_matmul,
    .eigh_workspace_size = count_eigh_workspace_size,
    .qr_workspace_size = count_qr_workspace_size,
    .event_create = dc__count_event_create,
    .event_destroy = dc__count_event_destroy,
    .event_record = dc__count_event_record,
    .event_wait = dc__count_event_wait,
    .event_passed = dc__count_event_passed,
    .event_sync = dc__count_event_sync,
    .event_set = dc__count_event_set,
    .memory_info = count_memory_info,
    .destroy = count_device_destroy,
};

bool dc__device_is_counting(const dc_device *device) {
  return device->ops == &count_ops;
}

dc_status dc__count_device_open(dc_device **device) {
  dc__count_device *self = dc__calloc(1, sizeof(*self));
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__device_head_init(&self->head, &count_ops, "count", NULL);
  pthread_mutex_init(&self->mutex, NULL);
  self->head.memory_space = DC__COUNT_MEMORY_SPACE;
  dc__stream_head_init(&self->internal.head, &self->head);
  self->head.internal_stream = &self->internal.head;
  self->next_device = FIRST_DEVICE;
  self->next_host = FIRST_HOST;
  *device = &self->head;
  return DC_OK;
}
