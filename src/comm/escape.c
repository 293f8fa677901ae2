#include "comm/escape.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"

/* Length of the character at `at`, or 0 if it may not be shown. */
static size_t printable_bytes(const unsigned char *at, size_t left) {
  uint32_t code = 0;
  const size_t bytes = dc__utf8_decode((const char *)at, left, &code);
  const bool controls = code < 0x20 || (code >= 0x7f && code < 0xa0);
  const bool reorders =
      code == 0x200e || code == 0x200f || (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
  return controls || reorders ? 0 : bytes;
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
