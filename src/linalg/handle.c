/* Handles of second-order calls: threads, solver, scratch memory. */
#include <inttypes.h>
#include <string.h>

#include "linalg/linalg.h"

enum { LINE = 64 };

dc_status dc__linalg_create(dc_device *device, const dc_linalg_options *options, dc_linalg **linalg) {
  dc_linalg *l = dc__calloc(1, sizeof *l);
  if (l == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__pool_open(options->threads, &l->pool);
  if (status != DC_OK) {
    dc__free(l);
    return status;
  }
  l->solver = "libdc";
  if (options->plain == 0 && dc__blas_open(NULL, &l->blas) == DC_OK) { /* without one, the plain solver is there */
    const char *slash = strrchr(l->blas->path, '/');
    l->solver = slash != NULL ? slash + 1 : l->blas->path;
  }
  l->solver = device->place != 0 ? "cuSOLVER" : l->solver;
  pthread_mutex_init(&l->mutex, NULL);
  l->device = dc__device_retain(device);
  l->on = device->here;
  *linalg = l;
  return DC_OK;
}

static int32_t scratch_kind(const dc_linalg *l) {
  return dc__linalg_is_there(l) ? DC_MEMORY_DEVICE : DC_MEMORY_HOST;
}

static void drop(dc_linalg *l) {
  l->device->ops->free(l->device, l->own, l->own_bytes, scratch_kind(l));
  l->own = NULL;
  l->own_bytes = 0;
}

void dc__linalg_destroy(dc_linalg *l) {
  dc__staging_close(l);
  drop(l);
  dc__pool_close(l->pool);
  dc__device_release(l->device);
  pthread_mutex_destroy(&l->mutex);
  dc__free(l);
}

bool dc__linalg_add(size_t *total, int64_t count, size_t size) {
  size_t bytes;
  return !__builtin_mul_overflow((size_t)count, size, &bytes) && bytes <= SIZE_MAX / 4 &&
         !__builtin_add_overflow(*total, (bytes + LINE - 1) / LINE * LINE, total) && *total <= SIZE_MAX / 4;
}

void *dc__layout_take(dc__layout *to, bool wanted, int64_t count, int64_t each, size_t size) {
  const size_t at = to->bytes;
  int64_t all = 0;
  if (wanted) {
    to->fits = to->fits && !__builtin_mul_overflow(count, each, &all) && dc__linalg_add(&to->bytes, all, size);
  }
  return wanted && to->memory != NULL ? to->memory + at : NULL;
}

void *dc__linalg_part(void *memory, size_t *offset, int64_t count, size_t size) {
  void *part = (char *)memory + *offset;
  (void)dc__linalg_add(offset, count, size);
  return part;
}

bool dc__slots_plan(dc__slots *slots, const dc_linalg *l, int64_t work, size_t bytes, size_t *total) {
  int32_t threads = dc__pool_threads(l->pool);
  slots->count = work < threads ? work : threads;
  slots->bytes = 0;
  return dc__linalg_add(&slots->bytes, 1, bytes) && dc__linalg_add(total, slots->count, sizeof(atomic_bool)) &&
         dc__linalg_add(total, slots->count, slots->bytes);
}

void dc__slots_place(dc__slots *slots, void *memory, size_t *offset) {
  slots->taken = dc__linalg_part(memory, offset, slots->count, sizeof(atomic_bool));
  slots->memory = dc__linalg_part(memory, offset, slots->count, slots->bytes);
  for (int64_t i = 0; i < slots->count; i++) {
    atomic_init(&slots->taken[i], false);
  }
}

int64_t dc__slots_take(dc__slots *slots) {
  for (int64_t i = 0;; i = (i + 1) % slots->count) {
    if (!atomic_exchange_explicit(&slots->taken[i], true, memory_order_acquire)) {
      return i;
    }
  }
}

void dc__slots_give(dc__slots *slots, int64_t slot) {
  atomic_store_explicit(&slots->taken[slot], false, memory_order_release);
}

dc_status dc__linalg_scratch(dc_linalg *l, const char *fn, size_t bytes, void **memory) {
  *memory = NULL;
  if (l->query) {
    l->most = bytes > l->most ? bytes : l->most;
    return DC_OK;
  }
  if (l->lent != NULL) {
    if (bytes > l->lent_bytes) {
      return dc__fail(DC_E_BUFFER_TOO_SMALL, "%s: the workspace has %zu byte%s, must have %zu", fn, l->lent_bytes,
                      DC__S(l->lent_bytes), bytes);
    }
    *memory = l->lent;
    return DC_OK;
  }
  if (bytes > l->own_bytes || l->own == NULL) {
    void *grown;
    if (l->own != NULL && dc__linalg_is_there(l)) {
      dc__here_done(l->device, NULL); /* what was queued before may use it */
    }
    drop(l);
    dc_status status = l->device->ops->alloc(l->device, bytes, scratch_kind(l), &grown);
    if (status != DC_OK) {
      return dc__fail(status, "%s: scratch memory: %s", fn, dc_last_error());
    }
    l->own = grown;
    l->own_bytes = bytes;
  }
  *memory = l->own;
  return DC_OK;
}
