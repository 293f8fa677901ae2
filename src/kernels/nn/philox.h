/* Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), for the host
 * and for the kernels of devices. */
#ifndef DC_KERNELS_PHILOX_H
#define DC_KERNELS_PHILOX_H

#include "kernels/elementwise/convert.h"

DC__CONVERT void dc__philox_words(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = key[0];
  uint32_t k1 = key[1];
  for (int32_t round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)c0 * 0xD2511F53u;
    uint64_t b = (uint64_t)c2 * 0xCD9E8D57u;
    c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)b;
    c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

#endif
