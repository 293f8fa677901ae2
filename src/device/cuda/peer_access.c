/* Peer access between devices in one process. It is enabled at the first request, in that direction alone, since each
 * pair costs both devices time and memory. Memory that other code allocated is not in libdc's pools, so the driver is
 * asked for each address: a read without access loses the device. */
#include <inttypes.h>

#include "device/cuda/cuda.h"

enum { CARDS = 64 }; /* bits of peer_mask */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static dc__cuda_device *open_devices;

static unsigned long long bit_of(int32_t memory_space) {
  return 1ULL << (memory_space - 1);
}

static bool is_enabled(dc__cuda_device *device, int32_t memory_space) {
  return memory_space <= CARDS && (atomic_load(&device->peer_mask) & bit_of(memory_space)) != 0;
}

static dc_status enable_pool_access(dc__cuda_device *owner, const dc__cuda_device *reader) {
  const dc__cu_access access = {{1, reader->number}, DC__CU_ACCESS_ALL};
  return dc__cuda_return_error(owner, "cuMemPoolSetAccess", owner->driver.cuMemPoolSetAccess(owner->pool, &access, 1));
}

dc_status dc__cuda_peers_join(dc__cuda_device *device) {
  dc_status status = DC_OK;
  pthread_mutex_lock(&mutex);
  for (dc__cuda_device *reader = open_devices; reader != NULL && status == DC_OK; reader = reader->next) {
    if (is_enabled(reader, device->head.memory_space)) {
      status = enable_pool_access(device, reader);
    }
  }
  device->next = open_devices;
  open_devices = device;
  pthread_mutex_unlock(&mutex);
  return status;
}

/* A device without an open handle may lose the access that it has granted, so the others forget it. */
void dc__cuda_peers_leave(dc__cuda_device *device) {
  bool last = true;
  pthread_mutex_lock(&mutex);
  for (dc__cuda_device **link = &open_devices; *link != NULL;) {
    if (*link == device) {
      *link = device->next;
    } else {
      last = last && (*link)->head.memory_space != device->head.memory_space;
      link = &(*link)->next;
    }
  }
  for (dc__cuda_device *other = open_devices; other != NULL && last && device->head.memory_space <= CARDS;
       other = other->next) {
    atomic_fetch_and(&other->peer_mask, ~bit_of(device->head.memory_space));
  }
  pthread_mutex_unlock(&mutex);
}

/* Enables the context's access to memory that was allocated without a pool. */
static dc_status enable_context_access(dc__cuda_device *reader, const dc__cuda_device *owner) {
  int can = 0;
  DC__TRY(dc__cuda_return_error(reader, "cuDeviceCanAccessPeer",
                                reader->driver.cuDeviceCanAccessPeer(&can, reader->number, owner->number)));
  if (can == 0) {
    return dc__fail(DC_E_UNSUPPORTED,
                    "device \"%s\" (%s) cannot read memory of device \"%s\": the cards have no peer access; "
                    "dc_comm_create_nccl() needs none",
                    reader->head.name, reader->model, owner->head.name);
  }
  dc__cu_result error = reader->driver.cuCtxEnablePeerAccess(owner->context, 0);
  return dc__cuda_return_error(reader, "cuCtxEnablePeerAccess", error == DC__CU_PEER_ALREADY ? 0 : error);
}

/* Enables access to all handles of that device, which may have been opened more than once. */
static dc_status enable_access(dc__cuda_device *reader, int32_t memory_space) {
  dc_status status = memory_space <= CARDS
                         ? DC_OK
                         : dc__fail(DC_E_UNSUPPORTED,
                                    "device \"%s\" cannot read memory of card %" PRId32 ", must be one of the first %d",
                                    reader->head.name, memory_space - 1, CARDS);
  bool asked = false;
  pthread_mutex_lock(&mutex);
  for (dc__cuda_device *owner = open_devices; owner != NULL && status == DC_OK; owner = owner->next) {
    if (owner->head.memory_space == memory_space) {
      status = asked ? DC_OK : enable_context_access(reader, owner);
      asked = true;
      status = status != DC_OK ? status : enable_pool_access(owner, reader);
    }
  }
  if (status == DC_OK) {
    atomic_fetch_or(&reader->peer_mask, bit_of(memory_space));
  }
  pthread_mutex_unlock(&mutex);
  return status;
}

dc_status dc__cuda_enable_peer_access(dc_device *device, int32_t memory_space, const void *ptr) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  dc__cuda_context_guard entry = dc__cuda_context_enter(self);
  dc_status status = is_enabled(self, memory_space) ? DC_OK : enable_access(self, memory_space);
  int access = 0;
  if (status == DC_OK) {
    status = dc__cuda_return_error(self, "cuPointerGetAttribute",
                                   self->driver.cuPointerGetAttribute(&access, DC__CU_POINTER_ACCESS, (uintptr_t)ptr));
  }
  dc__cuda_context_leave(entry);
  return status != DC_OK || (access & DC__CU_ACCESS_READ) != 0
             ? status
             : dc__fail(DC_E_UNSUPPORTED,
                        "device \"%s\" cannot read memory of card %" PRId32
                        " that neither libdc nor cuMemAlloc allocated: its allocator must give the other cards access",
                        self->head.name, memory_space - 1);
}
