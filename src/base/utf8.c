/* Characters of UTF-8. RFC 3629 has the ranges. */
#include "base/base.h"

size_t dc__utf8_decode(const char *text, size_t left, uint32_t *code) {
  const unsigned char *at = (const unsigned char *)text;
  const size_t bytes = at[0] < 0x80                    ? 1
                       : at[0] >= 0xc2 && at[0] < 0xe0 ? 2
                       : (at[0] & 0xf0) == 0xe0        ? 3
                       : at[0] >= 0xf0 && at[0] < 0xf5 ? 4
                                                       : 0;
  if (bytes == 0 || bytes > left) {
    return 0;
  }
  *code = bytes == 1 ? at[0] : at[0] & (0xffU >> (bytes + 1));
  for (size_t i = 1; i < bytes; i++) {
    if ((at[i] & 0xc0) != 0x80) {
      return 0;
    }
    *code = *code << 6 | (at[i] & 0x3fU);
  }
  const uint32_t least = bytes == 1 ? 0 : bytes == 2 ? 0x80 : bytes == 3 ? 0x800 : 0x10000;
  return *code >= least && *code <= 0x10ffff && (*code < 0xd800 || *code > 0xdfff) ? bytes : 0;
}
