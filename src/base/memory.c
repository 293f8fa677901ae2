/* Host memory for bookkeeping. */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

void *dc__calloc(size_t count, size_t bytes) {
  void *ptr = calloc(count > 0 ? count : 1, bytes > 0 ? bytes : 1);
  if (ptr == NULL) {
    dc__fail(DC_E_NO_MEMORY, "out of host memory: %zu * %zu bytes", count, bytes);
  }
  return ptr;
}

bool dc__array_reserve(void **array, int64_t *capacity, int64_t need, size_t element) {
  if (need <= *capacity) {
    return true;
  }
  int64_t grown = *capacity < 8 ? 8 : *capacity * 2;
  if (grown < need) {
    grown = need;
  }
  char *ptr = realloc(*array, (size_t)grown * element);
  if (ptr == NULL) {
    dc__fail(DC_E_NO_MEMORY, "out of host memory: %zu bytes", (size_t)grown * element);
    return false;
  }
  memset(ptr + (size_t)*capacity * element, 0, (size_t)(grown - *capacity) * element);
  *array = ptr;
  *capacity = grown;
  return true;
}

void dc__free(void *ptr) {
  free(ptr);
}

char *dc__strdup(const char *text) {
  size_t bytes = strlen(text) + 1;
  char *copy = dc__calloc(1, bytes);
  return copy == NULL ? NULL : memcpy(copy, text, bytes);
}
