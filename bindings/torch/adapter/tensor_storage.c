/* Tensors over memory of libdc. Live ones form a list, because a tensor that comes back from PyTorch shows no more
 * than its address: dc_free_tensors() must tell libdc's memory, which it revokes, from PyTorch's. */
#include "tensor_storage.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct dct_storage {
  struct dct_storage *prev, *next;
  const void *data;
  dc_buffer *buffer;
} dct_storage;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dct_storage live = {.prev = &live, .next = &live};

static void storage_delete(void *data, void *user) {
  (void)data;
  dct_storage *storage = user;
  pthread_mutex_lock(&lock);
  storage->prev->next = storage->next;
  storage->next->prev = storage->prev;
  pthread_mutex_unlock(&lock);
  dc_buffer_release(storage->buffer);
  free(storage);
}

static dct_storage *storage_create(const void *data, dc_buffer *buffer) {
  dct_storage *storage = malloc(sizeof *storage);
  if (storage == NULL) {
    return NULL;
  }
  *storage = (dct_storage){.data = data, .buffer = buffer, .next = &live};
  pthread_mutex_lock(&lock);
  storage->prev = live.prev;
  live.prev->next = storage;
  live.prev = storage;
  pthread_mutex_unlock(&lock);
  return storage;
}

dc_buffer *dct_storage_find(const void *data) {
  dc_buffer *found = NULL;
  pthread_mutex_lock(&lock);
  for (dct_storage *storage = live.next; storage != &live && found == NULL && data != NULL; storage = storage->next) {
    if (storage->data == data && storage->buffer != NULL) {
      found = dc_buffer_retain(storage->buffer);
    }
  }
  pthread_mutex_unlock(&lock);
  return found;
}

dct_tensor dct_storage_tensor(void *data, const int64_t *shape, const int64_t *strides, int32_t ndim, int32_t dtype,
                              int32_t device, int32_t index, dc_buffer *buffer, const char **error) {
  int64_t contiguous[DCT_MAX_DIMS];
  if (strides == NULL) {
    dct_contiguous_strides(shape, ndim, contiguous);
    strides = contiguous;
  }
  dct_storage *storage = storage_create(data, buffer);
  if (storage == NULL) {
    dc_buffer_release(buffer);
    *error = "libdc: out of memory";
    return NULL;
  }
  dct_tensor tensor = NULL;
  if (dct_torch.torch_from_blob(data, ndim, shape, strides, 0, dct_torch.dtypes[dtype], device, index, &tensor,
                                dct_torch.strided, NULL, 0, storage_delete, storage) != 0) {
    storage_delete(data, storage);
    *error = dct_torch_reason();
    return NULL;
  }
  return tensor;
}
