/* Tensors over memory of libdc. Live ones form a list, because a tensor that comes back from PyTorch shows no more
 * than its address: dc_free_tensors() must tell libdc's memory, which it revokes, from PyTorch's. */
#include "blob.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct dct_blob {
  struct dct_blob *prev, *next;
  const void *data;
  dc_buffer *buffer;
} dct_blob;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dct_blob live = {&live, &live, NULL, NULL};

static void blob_delete(void *data, void *user) {
  (void)data;
  dct_blob *blob = user;
  pthread_mutex_lock(&lock);
  blob->prev->next = blob->next;
  blob->next->prev = blob->prev;
  pthread_mutex_unlock(&lock);
  dc_buffer_release(blob->buffer);
  free(blob);
}

static dct_blob *blob_create(const void *data, dc_buffer *buffer) {
  dct_blob *blob = malloc(sizeof *blob);
  if (blob == NULL) {
    return NULL;
  }
  *blob = (dct_blob){.data = data, .buffer = buffer, .next = &live};
  pthread_mutex_lock(&lock);
  blob->prev = live.prev;
  live.prev->next = blob;
  live.prev = blob;
  pthread_mutex_unlock(&lock);
  return blob;
}

dc_buffer *dct_blob_find(const void *data) {
  dc_buffer *found = NULL;
  pthread_mutex_lock(&lock);
  for (dct_blob *blob = live.next; blob != &live && found == NULL && data != NULL; blob = blob->next) {
    if (blob->data == data && blob->buffer != NULL) {
      found = dc_buffer_retain(blob->buffer);
    }
  }
  pthread_mutex_unlock(&lock);
  return found;
}

dct_tensor dct_blob_tensor(void *data, const int64_t *shape, int32_t ndim, int32_t dtype, int32_t device, int32_t index,
                           dc_buffer *buffer, const char **error) {
  int64_t strides[DCT_MAX_DIMS];
  dct_contiguous_strides(shape, ndim, strides);
  dct_blob *blob = blob_create(data, buffer);
  if (blob == NULL) {
    dc_buffer_release(buffer);
    *error = "libdc: out of memory";
    return NULL;
  }
  dct_tensor tensor = NULL;
  if (dct_torch.torch_from_blob(data, ndim, shape, strides, 0, dct_torch.dtypes[dtype], device, index, &tensor,
                                dct_torch.strided, NULL, 0, blob_delete, blob) != 0) {
    blob_delete(data, blob);
    *error = dct_torch_reason();
    return NULL;
  }
  return tensor;
}
