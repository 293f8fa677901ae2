/* FNV-1a over 64-bit words. A change of any single word changes the result. */
#include <string.h>

#include "base/base.h"

uint64_t dc__checksum(uint64_t hash, const void *data, size_t bytes) {
  const unsigned char *at = data;
  for (uint64_t word; bytes > 0;) {
    size_t step = bytes < sizeof word ? bytes : sizeof word;
    word = 0;
    memcpy(&word, at, step);
    hash = (hash ^ word) * UINT64_C(1099511628211);
    at += step;
    bytes -= step;
  }
  return hash;
}
