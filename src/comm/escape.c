#include "comm/escape.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Length of the character at `at`, or 0 if it may not be shown. RFC 3629 has the ranges. */
static size_t printable_bytes(const unsigned char *at, size_t left) {
  if (at[0] < 0x80) {
    return at[0] >= 0x20 && at[0] != 0x7f;
  }
  size_t bytes = at[0] >= 0xc2 && at[0] < 0xe0 ? 2 : (at[0] & 0xf0) == 0xe0 ? 3 : at[0] >= 0xf0 && at[0] < 0xf5 ? 4 : 0;
  if (bytes == 0 || bytes > left) {
    return 0;
  }
  uint32_t code = at[0] & (0xffU >> (bytes + 1));
  for (size_t i = 1; i < bytes; i++) {
    if ((at[i] & 0xc0) != 0x80) {
      return 0;
    }
    code = code << 6 | (at[i] & 0x3fU);
  }
  bool whole = code >= (bytes == 2   ? 0x80U
                        : bytes == 3 ? 0x800U
                                     : 0x10000U) &&
               code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
  bool controls = code < 0xa0;
  bool reorders =
      code == 0x200e || code == 0x200f || (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
  return whole && !controls && !reorders ? bytes : 0;
}

void dc__escape(char *dst, size_t cap, const char *text, size_t bytes) {
  unsigned char copy[1024]; /* dst may alias text */
  size_t left = bytes < sizeof copy ? bytes : sizeof copy, used = 0;
  memcpy(copy, text, left);
  for (const unsigned char *at = copy; left > 0;) {
    char unit[5] = "";
    size_t step = printable_bytes(at, left), length = step;
    if (step == 0) {
      const char *name = at[0] == '\n' ? "\\n" : at[0] == '\r' ? "\\r" : at[0] == '\t' ? "\\t" : NULL;
      length = (size_t)(name != NULL ? snprintf(unit, sizeof unit, "%s", name)
                                     : snprintf(unit, sizeof unit, "\\x%02x", at[0]));
      step = 1;
    } else {
      memcpy(unit, at, step);
    }
    if (used + length + 1 > cap) {
      break;
    }
    memcpy(dst + used, unit, length);
    used += length;
    at += step;
    left -= step;
  }
  dst[used] = '\0';
}
