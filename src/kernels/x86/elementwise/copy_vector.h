/* Large copies with non-temporal stores. INIT names the function that puts them into a table. */
#include <string.h>

#include "kernels/x86/vector.h"

static void copy_stream(void *dst, const void *src, size_t bytes) {
  char *d = dst;
  const char *s = src;
  size_t head = (size_t)(-(uintptr_t)d & 63u);
  memcpy(d, s, head);
  size_t i = head;
  for (; i + 256 <= bytes; i += 256) {
    stream_64(d + i, s + i);
    stream_64(d + i + 64, s + i + 64);
    stream_64(d + i + 128, s + i + 128);
    stream_64(d + i + 192, s + i + 192);
  }
  _mm_sfence(); /* orders non-temporal stores before the caller's signal that the work is done */
  memcpy(d + i, s + i, bytes - i);
}

void INIT(dc__kernel_table *table) {
  table->copy = copy_stream;
}
