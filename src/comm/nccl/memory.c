/* Memory that NCCL reads and writes in place, for symmetric_memory: from ncclMemAlloc, and registered with the
 * communicator twice.
 *
 * The first time this rank does so alone, at allocation, so that NCCL need not copy it on the way. Then all ranks
 * together make it a window, whose address NCCL knows on every rank. Its all-gather may then use kernels that write to
 * all ranks at once, the switch or copy engines.
 *
 * Each rank's NCCL chooses a kernel by the rank's own addresses, and derives the peers' addresses from its own offsets.
 * So a gather may use a window only at the same offset on all ranks, which NCCL does not check. The handshake before
 * each gather does: the ranks compare a hash of the blocks and offsets (dc__nccl_buffers_hash). If all are equal, all
 * ranks are in the same state. Blocks that are no windows yet are then registered, since every rank takes part.
 * Otherwise the gather is made of broadcasts, for which NCCL has no windows. Equality is as certain as a 64-bit hash.
 *
 * Reductions are sends and receives, for which NCCL has no windows either. A rank's NCCL decides by the rank's own
 * buffer whether the peer's is accessed directly. So a pair of which only one side is registered waits forever. */
#include "comm/nccl/nccl.h"

/* An abort ends all registrations. Memory that cannot be freed is leaked, since nothing can recover it. */
static dc_status free_block(dc__nccl *self, void *native, void *args) {
  const dc__nccl_block *block = args;
  (void)native;
  if (!self->device->ops->can_free(self->device)) {
    return DC_OK;
  }
  if (self->handle != NULL) {
    if (block->window != NULL) {
      (void)self->library.ncclCommWindowDeregister(self->handle, block->window);
    }
    (void)self->library.ncclCommDeregister(self->handle, block->registered);
  }
  (void)self->library.ncclMemFree(block->ptr);
  return DC_OK;
}

static dc_status alloc_block(dc__nccl *self, void *native, void *args) {
  dc__nccl_block *block = args;
  void *ptr = NULL;
  (void)native;
  DC__TRY(dc__nccl_check_result(self, "ncclMemAlloc", self->library.ncclMemAlloc(&ptr, block->bytes)));
  block->ptr = ptr;
  dc_status status = dc__nccl_check_result(
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
  pthread_mutex_lock(&self->pending_mutex);
  pthread_mutex_lock(&self->api_mutex);
  dc_status status = dc__nccl_check_alive(self);
  status = status != DC_OK ? status : dc__nccl_call(self, alloc_block, block);
  pthread_mutex_unlock(&self->api_mutex);
  if (status == DC_OK) {
    block->next = self->blocks;
    self->blocks = block;
  }
  pthread_mutex_unlock(&self->pending_mutex);
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
  pthread_mutex_lock(&self->pending_mutex);
  dc__nccl_block **link = &self->blocks;
  while (*link != NULL && (*link)->ptr != ptr) {
    link = &(*link)->next;
  }
  dc__nccl_block *block = *link;
  if (block != NULL) {
    *link = block->next;
    pthread_mutex_lock(&self->api_mutex);
    (void)dc__nccl_call(self, free_block, block);
    pthread_mutex_unlock(&self->api_mutex);
    dc__free(block);
    dc__device_count_bytes(self->device, -(int64_t)bytes);
  }
  pthread_mutex_unlock(&self->pending_mutex);
}

/* NCCL can move any memory of the card, and moves registered memory without a copy. */
bool dc__nccl_peer_accessible(dc_comm *comm, const void *ptr, size_t bytes) {
  (void)comm;
  (void)ptr;
  (void)bytes;
  return true;
}

static dc__nccl_block *block_of(dc__nccl *self, const char *ptr) {
  pthread_mutex_lock(&self->pending_mutex);
  dc__nccl_block *block = self->blocks;
  while (block != NULL && !(ptr >= block->ptr && ptr < block->ptr + block->bytes)) {
    block = block->next;
  }
  pthread_mutex_unlock(&self->pending_mutex);
  return block;
}

bool dc__nccl_is_registered(dc__nccl *self, const void *ptr) {
  return block_of(self, ptr) != NULL;
}

bool dc__nccl_sends_registered(dc__nccl *self, const dc__coll *coll) {
  bool registered = false;
  for (int32_t i = 0; i < coll->count; i++) {
    registered = registered || dc__nccl_is_registered(self, coll->items[i].send);
  }
  return registered;
}

/* ---- windows ---- */

enum { BUFFERS = 2 };

/* The block that NCCL's all-gather reads or writes; NULL if the memory is in no block, or NCCL's all-gather is not
 * used. It lives as long as the gather. */
static dc__nccl_block *find_block(dc__nccl *self, const dc__coll_item *item, int buffer, size_t *offset) {
  const char *ptr = buffer == 0 ? item->send : item->recv;
  dc__nccl_block *block = dc__nccl_is_even(item, self->head.world) ? block_of(self, ptr) : NULL;
  *offset = block == NULL ? 0 : (size_t)(ptr - block->ptr);
  return block;
}

/* FNV-1a over words. */
static uint64_t add_word(uint64_t hash, uint64_t word) {
  return (hash ^ word) * UINT64_C(1099511628211);
}

/* The first buffer in the same block. Blocks that are no windows yet have no number, so this tells which buffers share
 * one. */
static int first_in_block(const dc__nccl_block *const *blocks, int buffer) {
  int first = 0;
  while (blocks[first] != blocks[buffer]) {
    first++;
  }
  return first;
}

uint64_t dc__nccl_buffers_hash(dc__nccl *self, const dc__coll *coll, bool *unregistered) {
  const dc__nccl_block *blocks[BUFFERS * DC__COMM_GROUP];
  uint64_t hash = 0;
  *unregistered = false;
  if (coll->kind != DC__COLL_GATHER) {
    return 0;
  }
  const bool has_windows = self->library.ncclCommWindowRegister != NULL;
  for (int i = 0; i < BUFFERS * coll->count; i++) {
    size_t offset;
    const dc__nccl_block *block = find_block(self, &coll->items[i / BUFFERS], i % BUFFERS, &offset);
    blocks[i] = block;
    if (block != NULL) {
      *unregistered = *unregistered || (has_windows && block->number == 0);
      const uint64_t words[] = {(uint64_t)i + 1, (uint64_t)first_in_block(blocks, i),
                                block->number,   block->window != NULL,
                                block->bytes,    offset};
      for (size_t w = 0; w < (has_windows ? DC__COUNT(words) : 1); w++) { /* else only which are registered matters */
        hash = add_word(hash, words[w]);
      }
    }
  }
  return hash;
}

static dc_status register_window_call(dc__nccl *self, void *native, void *args) {
  const dc__nccl_block *block = args;
  (void)native;
  DC__TRY(dc__nccl_check_alive(self));
  return dc__nccl_check_result(
      self, "ncclCommWindowRegister",
      self->library.ncclCommWindowRegister(self->handle, block->ptr, block->bytes, &self->window, DC__NCCL_SYMMETRIC));
}

static dc_status register_window(dc__nccl *self, dc__nccl_block *block, const char *name) {
  self->window = NULL;
  DC__TRY(dc__nccl_call_and_wait(self, self->stream, register_window_call, block, "ncclCommWindowRegister", name));
  block->window = self->window;
  block->number = ++self->num_windows;
  return DC_OK;
}

dc_status dc__nccl_register_windows(dc__nccl *self, const dc__coll *coll, const char *name) {
  for (int i = 0; i < BUFFERS * coll->count; i++) {
    size_t offset;
    dc__nccl_block *block = find_block(self, &coll->items[i / BUFFERS], i % BUFFERS, &offset);
    if (block != NULL && block->number == 0) {
      DC__TRY(register_window(self, block, name));
    }
  }
  return DC_OK;
}
