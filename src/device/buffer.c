/* Reference-counted handles on arena blocks. They are the public dc_buffer, so the four functions of dc_api.h are here
 * too: they have no arguments to check but the handle. Other libraries' tensors own buffers, so a buffer may outlive
 * the context and be released on any thread. */
#include <string.h>

#include "device/arena.h"

struct dc_buffer {
  int32_t handle; /* DC__HANDLE_BUFFER */
  dc__arena *arena;
  _Atomic(void *) ptr; /* NULL: revoked */
  size_t bytes;
  int64_t *shape; /* kept for dc_tensor_create(), else NULL */
  atomic_int refs;
};

_Static_assert(sizeof(struct dc_buffer) <= DC__RECORD_BYTES, "records hold buffers");

dc_status dc__buffer_create(dc__arena *arena, void *ptr, size_t bytes, dc_buffer **buffer) {
  dc_buffer *self = dc__arena_record_alloc(arena);
  if (self == NULL) {
    dc__arena_free(arena, ptr, NULL, NULL);
    return DC_E_NO_MEMORY;
  }
  self->handle = DC__HANDLE_BUFFER;
  self->arena = dc__arena_retain(arena);
  self->bytes = bytes;
  self->shape = NULL;
  atomic_init(&self->ptr, ptr);
  atomic_init(&self->refs, 1);
  *buffer = self;
  return DC_OK;
}

dc_status dc__buffer_keep_shape(dc_buffer *buffer, const int64_t *shape, int32_t ndim, const int64_t **kept) {
  if (ndim > 0) {
    buffer->shape = dc__calloc((size_t)ndim, sizeof *shape);
    if (buffer->shape == NULL) {
      return DC_E_NO_MEMORY;
    }
    memcpy(buffer->shape, shape, (size_t)ndim * sizeof *shape);
  }
  *kept = buffer->shape;
  return DC_OK;
}

void dc__buffer_revoke(dc_buffer *buffer, dc_event *after_a, dc_event *after_b) {
  void *ptr = atomic_exchange(&buffer->ptr, NULL);
  if (ptr != NULL) {
    dc__arena_free(buffer->arena, ptr, after_a, after_b);
  }
}

dc_buffer *dc_buffer_retain(dc_buffer *buffer) {
  if (dc__handle_is(buffer, DC__HANDLE_BUFFER)) {
    atomic_fetch_add_explicit(&buffer->refs, 1, memory_order_relaxed);
  }
  return buffer;
}

void dc__buffer_release_after(dc_buffer *buffer, dc_event *after) {
  if (buffer == NULL || dc__arena_is_forked(buffer->arena) ||
      atomic_fetch_sub_explicit(&buffer->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  dc__buffer_revoke(buffer, after, NULL);
  dc__arena *arena = buffer->arena;
  dc__free(buffer->shape);
  dc__handle_clear(&buffer->handle);
  dc__arena_record_free(arena, buffer);
  dc__arena_release(arena);
}

void dc_buffer_release(dc_buffer *buffer) {
  DC__WITHOUT_TRAPS;
  if (dc__handle_is(buffer, DC__HANDLE_BUFFER)) {
    dc__buffer_release_after(buffer, NULL);
  }
}

void *dc_buffer_data(const dc_buffer *buffer) {
  return dc__handle_is(buffer, DC__HANDLE_BUFFER) ? atomic_load(&buffer->ptr) : NULL;
}

int64_t dc_buffer_bytes(const dc_buffer *buffer) {
  return dc_buffer_data(buffer) == NULL ? 0 : (int64_t)buffer->bytes;
}
