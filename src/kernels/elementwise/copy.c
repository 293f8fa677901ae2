/* Copies, which bypass the caches from DC__COPY_STREAM bytes on. */
#include <string.h>

#include "kernels/dispatch.h"

void dc__copy(void *dst, const void *src, size_t bytes) {
  if (bytes == 0) {
    return; /* pointers may be NULL then */
  }
  dc__copy_fn fast = dc__active_kernels()->copy;
  if (fast != NULL && bytes >= DC__COPY_STREAM) {
    fast(dst, src, bytes);
  } else {
    memcpy(dst, src, bytes);
  }
}
