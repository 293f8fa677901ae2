/* Memory that NCCL reads and writes in place: from ncclMemAlloc, and registered with the communicator. This is what
 * symmetric_memory asks for. */
#include "comm/nccl/nccl.h"

/* An abort ends all registrations. What cannot be given back is lost, and nobody could do anything about it. */
static dc_status release(dc__nccl *self, void *native, void *args) {
  const dc__nccl_block *block = args;
  (void)native;
  if (!self->device->ops->is_quiet(self->device)) {
    return DC_OK;
  }
  if (self->handle != NULL) {
    (void)self->library.ncclCommDeregister(self->handle, block->registered);
  }
  (void)self->library.ncclMemFree(block->ptr);
  return DC_OK;
}

static dc_status take(dc__nccl *self, void *native, void *args) {
  dc__nccl_block *block = args;
  void *ptr = NULL;
  (void)native;
  DC__TRY(dc__nccl_error(self, "ncclMemAlloc", self->library.ncclMemAlloc(&ptr, block->bytes)));
  block->ptr = ptr;
  dc_status status = dc__nccl_error(
      self, "ncclCommRegister", self->library.ncclCommRegister(self->handle, ptr, block->bytes, &block->registered));
  if (status != DC_OK) {
    (void)self->library.ncclMemFree(ptr);
  }
  return status;
}

dc_status dc__nccl_heap_alloc(dc_comm *comm, size_t bytes, void **ptr) {
  dc__nccl *self = (dc__nccl *)comm;
  dc__nccl_block *block = dc__calloc(1, sizeof *block);
  if (block == NULL) {
    return DC_E_NO_MEMORY;
  }
  block->bytes = bytes;
  pthread_mutex_lock(&self->calls);
  dc_status status = dc__nccl_alive(self);
  status = status != DC_OK ? status : dc__nccl_issue(self, take, block);
  if (status == DC_OK) {
    block->next = self->blocks;
    self->blocks = block;
  }
  pthread_mutex_unlock(&self->calls);
  if (status != DC_OK) {
    dc__free(block);
    return dc__fail(status == DC_E_DEVICE ? DC_E_NO_MEMORY : status, "no registered memory for %zu bytes: %s", bytes,
                    dc_last_error());
  }
  atomic_fetch_add_explicit(&self->device->allocations, 1, memory_order_relaxed);
  dc__device_count_bytes(self->device, (int64_t)bytes);
  *ptr = block->ptr;
  return DC_OK;
}

void dc__nccl_heap_free(dc_comm *comm, void *ptr, size_t bytes) {
  dc__nccl *self = (dc__nccl *)comm;
  pthread_mutex_lock(&self->calls);
  dc__nccl_block **link = &self->blocks;
  while (*link != NULL && (*link)->ptr != ptr) {
    link = &(*link)->next;
  }
  dc__nccl_block *block = *link;
  if (block != NULL) {
    *link = block->next;
    (void)dc__nccl_issue(self, release, block);
    dc__free(block);
    dc__device_count_bytes(self->device, -(int64_t)bytes);
  }
  pthread_mutex_unlock(&self->calls);
}

/* NCCL moves any memory of the card; what is registered it need not copy on its way. */
bool dc__nccl_shares(dc_comm *comm, const void *ptr, size_t bytes) {
  (void)comm;
  (void)ptr;
  (void)bytes;
  return true;
}
