/* The one reader and the one writer of the caller's sized structs. */
#include <string.h>

#include "base/base.h"

enum { MAX_STRUCT = 65536 }; /* a struct_size beyond this is garbage, not a future version */

dc_status dc__check_size(const char *function, const char *argument, size_t size, size_t min) {
  if (size < min || size > MAX_STRUCT) {
    return dc__fail(DC_E_INVALID, "%s: %s.struct_size = %zu, must be %zu to %d (set it to sizeof the struct)", function,
                    argument, size, min, (int)MAX_STRUCT);
  }
  return DC_OK;
}

dc_status dc__read_options(const char *function, const char *argument, void *dst, size_t known, const void *src,
                           size_t min) {
  if (src == NULL) {
    return DC_OK;
  }
  size_t size;
  memcpy(&size, src, sizeof size);
  DC__TRY(dc__check_size(function, argument, size, min));
  const unsigned char *bytes = src;
  for (size_t i = known; i < size; i++) {
    if (bytes[i] != 0) {
      return dc__fail(DC_E_UNSUPPORTED,
                      "%s: %s sets a field at byte %zu that this version does not know (it knows %zu)", function,
                      argument, i, known);
    }
  }
  memset(dst, 0, known);
  memcpy(dst, src, size < known ? size : known);
  memcpy(dst, &known, sizeof known); /* the copy has this version's size */
  return DC_OK;
}

dc_status dc__write_sized(const char *function, const char *argument, void *dst, const void *src, size_t known,
                          size_t min) {
  if (dst == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL", function, argument);
  }
  size_t size;
  memcpy(&size, dst, sizeof size);
  DC__TRY(dc__check_size(function, argument, size, min));
  size_t end = size < known ? size : known;
  memcpy((char *)dst + sizeof size, (const char *)src + sizeof size, end - sizeof size);
  return DC_OK;
}

void dc__init_sized(void *dst, size_t struct_size, size_t known) {
  if (dst != NULL && struct_size >= sizeof(size_t)) {
    memset(dst, 0, struct_size < MAX_STRUCT ? struct_size : known);
    memcpy(dst, &struct_size, sizeof struct_size);
  }
}
