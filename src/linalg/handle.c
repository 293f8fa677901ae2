/* Linear algebra handles: threads, solver, scratch memory. */
#include <inttypes.h>
#include <string.h>

#include "linalg/linalg.h"

enum { CACHE_LINE = 64 };

dc_status dc__linalg_create(dc_device *device, const dc_linalg_options *options, dc_linalg **linalg) {
  dc_linalg *l = dc__calloc(1, sizeof *l);
  if (l == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__threadpool_open(options->threads, &l->pool);
  if (status != DC_OK) {
    dc__free(l);
    return status;
  }
  l->handle = DC__HANDLE_LINALG;
  l->solver = "libdc";
  if (options->plain == 0 && dc__blas_open(NULL, &l->blas) == DC_OK) { /* without LAPACK the reference solver is used */
    const char *slash = strrchr(l->blas->path, '/');
    l->solver = slash != NULL ? slash + 1 : l->blas->path;
  }
  l->solver = device->memory_space != 0 ? "cuSOLVER" : l->solver;
  pthread_mutex_init(&l->mutex, NULL);
  l->device = dc__device_retain(device);
  l->stream = device->internal_stream;
  *linalg = l;
  return DC_OK;
}

static int32_t scratch_kind(const dc_linalg *l) {
  return dc__linalg_work_of(l)->memory_kind;
}

static void free_scratch(dc_linalg *l) {
  l->device->ops->free(l->device, l->scratch, l->scratch_bytes, scratch_kind(l));
  l->scratch = NULL;
  l->scratch_bytes = 0;
}

void dc__linalg_destroy(dc_linalg *l) {
  dc__handle_clear(&l->handle);
  dc__staging_destroy(l);
  free_scratch(l);
  dc__threadpool_close(l->pool);
  dc__device_release(l->device);
  pthread_mutex_destroy(&l->mutex);
  dc__free(l);
}

bool dc__linalg_add_bytes(size_t *total, int64_t count, size_t size) {
  size_t bytes;
  return !__builtin_mul_overflow((size_t)count, size, &bytes) && bytes <= SIZE_MAX / 4 &&
         !__builtin_add_overflow(*total, (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE, total) &&
         *total <= SIZE_MAX / 4;
}

void *dc__scratch_layout_alloc(dc__scratch_layout *to, bool wanted, int64_t count, int64_t each, size_t size) {
  const size_t at = to->bytes;
  int64_t all = 0;
  if (wanted) {
    to->fits = to->fits && !__builtin_mul_overflow(count, each, &all) && dc__linalg_add_bytes(&to->bytes, all, size);
  }
  return wanted && to->memory != NULL ? to->memory + at : NULL;
}

void *dc__linalg_suballoc(void *memory, size_t *offset, int64_t count, size_t size) {
  void *part = (char *)memory + *offset;
  (void)dc__linalg_add_bytes(offset, count, size);
  return part;
}

bool dc__slots_plan(dc__slots *slots, const dc_linalg *l, int64_t work, size_t bytes, size_t *total) {
  int32_t threads = dc__threadpool_threads(l->pool);
  slots->count = work < threads ? work : threads;
  slots->bytes = 0;
  return dc__linalg_add_bytes(&slots->bytes, 1, bytes) &&
         dc__linalg_add_bytes(total, slots->count, sizeof(atomic_bool)) &&
         dc__linalg_add_bytes(total, slots->count, slots->bytes);
}

void dc__slots_init(dc__slots *slots, void *memory, size_t *offset) {
  slots->taken = dc__linalg_suballoc(memory, offset, slots->count, sizeof(atomic_bool));
  slots->memory = dc__linalg_suballoc(memory, offset, slots->count, slots->bytes);
  for (int64_t i = 0; i < slots->count; i++) {
    atomic_init(&slots->taken[i], false);
  }
}

int64_t dc__slots_acquire(dc__slots *slots) {
  for (int64_t i = 0;; i = (i + 1) % slots->count) {
    if (!atomic_exchange_explicit(&slots->taken[i], true, memory_order_acquire)) {
      return i;
    }
  }
}

void dc__slots_release(dc__slots *slots, int64_t slot) {
  atomic_store_explicit(&slots->taken[slot], false, memory_order_release);
}

dc_status dc__linalg_scratch(dc_linalg *l, const char *fn, size_t bytes, void **memory) {
  *memory = NULL;
  if (l->query) {
    l->query_bytes = bytes > l->query_bytes ? bytes : l->query_bytes;
    return DC_OK;
  }
  if (l->user_workspace != NULL) {
    if (bytes > l->user_workspace_bytes) {
      return dc__fail(DC_E_BUFFER_TOO_SMALL, "%s: the workspace has %zu byte%s, must have %zu", fn,
                      l->user_workspace_bytes, DC__PLURAL_S(l->user_workspace_bytes), bytes);
    }
    *memory = l->user_workspace;
    return DC_OK;
  }
  if (bytes > l->scratch_bytes || l->scratch == NULL) {
    void *grown;
    if (l->scratch != NULL && dc__linalg_is_cuda(l)) {
      dc__device_sync_internal(l->device, NULL); /* queued work may still use the old memory */
    }
    free_scratch(l);
    dc_status status = l->device->ops->alloc(l->device, bytes, scratch_kind(l), &grown);
    if (status != DC_OK) {
      return dc__fail(status, "%s: scratch memory: %s", fn, dc_last_error());
    }
    l->scratch = grown;
    l->scratch_bytes = bytes;
  }
  *memory = l->scratch;
  return DC_OK;
}
