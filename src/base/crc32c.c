/* CRC-32C, the checksum of iSCSI and ext4: by carry-less multiplication of 64-byte vectors (AVX-512), by the
 * processor's own instruction (SSE4.2, ARMv8), or by a table. All give the same value. */
#include <string.h>

#include "base/base.h"

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

enum { CRC32C_POLYNOMIAL = (int)0x82f63b78 }; /* reflected */

uint32_t dc__crc32c_table(uint32_t crc, const void *data, size_t bytes) {
  uint32_t table[16];
  for (uint32_t i = 0; i < 16; i++) {
    table[i] = i;
    for (int32_t bit = 0; bit < 4; bit++) {
      table[i] = table[i] >> 1 ^ (table[i] & 1 ? (uint32_t)CRC32C_POLYNOMIAL : 0);
    }
  }
  const unsigned char *at = data;
  crc = ~crc;
  for (size_t i = 0; i < bytes; i++) {
    crc = table[(crc ^ at[i]) & 15] ^ crc >> 4;
    crc = table[(crc ^ (uint32_t)(at[i] >> 4)) & 15] ^ crc >> 4;
  }
  return ~crc;
}

#if defined(__x86_64__)

/* Without the inversion before and after. */
__attribute__((target("sse4.2"))) static uint32_t crc32c_words(uint32_t crc, const unsigned char *at, size_t bytes) {
  uint64_t wide = crc;
  for (; bytes >= sizeof wide; bytes -= sizeof wide, at += sizeof wide) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = (uint32_t)wide;
  for (; bytes > 0; bytes--, at++) {
    crc = _mm_crc32_u8(crc, *at);
  }
  return crc;
}

uint32_t dc__crc32c_sse42(uint32_t crc, const void *data, size_t bytes) {
  return ~crc32c_words(~crc, data, bytes);
}

/* Folds 256 bytes into the next 256: Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ",
 * Intel 2009. The factors are x^2080 and x^2016 modulo the polynomial, reflected. The last 256 bytes have the same
 * remainder as all that was read. */
__attribute__((target("avx512f,avx512vl,avx512dq,vpclmulqdq,sse4.2"))) uint32_t dc__crc32c_avx512(uint32_t crc,
                                                                                                  const void *data,
                                                                                                  size_t bytes) {
  enum { VECTORS = 4, BLOCK = VECTORS * 64 };
  const unsigned char *at = data;
  if (bytes < (size_t)2 * BLOCK) {
    return dc__crc32c_sse42(crc, data, bytes);
  }
  const __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x(0xb9e02b86, 0xdcb17aa4));
  __m512i sums[VECTORS];
  for (int32_t i = 0; i < VECTORS; i++) {
    sums[i] = _mm512_loadu_si512(at + i * 64);
  }
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
  for (at += BLOCK, bytes -= BLOCK; bytes >= BLOCK; at += BLOCK, bytes -= BLOCK) {
    for (int32_t i = 0; i < VECTORS; i++) {
      __m512i low = _mm512_clmulepi64_epi128(sums[i], factors, 0x00);
      __m512i high = _mm512_clmulepi64_epi128(sums[i], factors, 0x11);
      sums[i] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(at + i * 64), 0x96);
    }
  }
  unsigned char rest[BLOCK];
  memcpy(rest, sums, sizeof rest);
  return ~crc32c_words(crc32c_words(0, rest, sizeof rest), at, bytes);
}

uint32_t dc__crc32c(uint32_t crc, const void *data, size_t bytes) {
  if (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return dc__crc32c_avx512(crc, data, bytes);
  }
  return __builtin_cpu_supports("sse4.2") ? dc__crc32c_sse42(crc, data, bytes) : dc__crc32c_table(crc, data, bytes);
}

#elif defined(__ARM_FEATURE_CRC32)

uint32_t dc__crc32c(uint32_t crc, const void *data, size_t bytes) {
  const unsigned char *at = data;
  crc = ~crc;
  for (uint64_t word; bytes >= sizeof word; bytes -= sizeof word, at += sizeof word) {
    memcpy(&word, at, sizeof word);
    crc = __crc32cd(crc, word);
  }
  for (; bytes > 0; bytes--, at++) {
    crc = __crc32cb(crc, *at);
  }
  return ~crc;
}

#else

uint32_t dc__crc32c(uint32_t crc, const void *data, size_t bytes) {
  return dc__crc32c_table(crc, data, bytes);
}

#endif
