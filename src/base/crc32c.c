/* CRC-32C, the checksum of iSCSI and ext4. It is computed by the processor's CRC instruction (SSE4.2, ARMv8), by that
 * together with carry-less multiplication of 64-byte vectors (AVX-512), or by a table. All give the same value. */
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

/* Continues a CRC without the inversion before and after. */
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

/* The instruction has a latency of three cycles and starts in every cycle, so several streams of bytes are
 * interleaved. */
enum { STREAMS = 4, STREAM_BYTES = 2048, STEP_BYTES = 16 /* of each stream */ };

__attribute__((target("sse4.2"), always_inline)) static inline uint64_t crc32c_word(uint64_t sum,
                                                                                    const unsigned char *at) {
  uint64_t word;
  memcpy(&word, at, sizeof word);
  return _mm_crc32_u64(sum, word);
}

__attribute__((target("sse4.2"), always_inline)) static inline void crc32c_step(const unsigned char *at,
                                                                                uint64_t sums[STREAMS]) {
  for (int32_t i = 0; i < STEP_BYTES; i += (int32_t)sizeof(uint64_t)) {
    sums[0] = crc32c_word(sums[0], at + i);
    sums[1] = crc32c_word(sums[1], at + STREAM_BYTES + i);
    sums[2] = crc32c_word(sums[2], at + 2 * STREAM_BYTES + i);
    sums[3] = crc32c_word(sums[3], at + 3 * STREAM_BYTES + i);
  }
}

/* Multiplies a checksum by x^(8 n), modulo the polynomial, which appends n zero bytes to the data. The factor is
 * x^(8 n - 33), reflected: the reflected product supplies one power of x more, and the instruction 32. */
__attribute__((target("sse4.2,pclmul"), always_inline)) static inline uint32_t crc32c_shift(uint32_t crc,
                                                                                            uint32_t factor) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)crc), _mm_cvtsi32_si128((int)factor), 0x00);
  return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

/* Continues the checksum of the bytes before the streams with those of the streams. */
__attribute__((target("sse4.2,pclmul"))) static uint32_t crc32c_join(uint32_t crc, const uint64_t sums[STREAMS]) {
  for (int32_t s = 0; s < STREAMS; s++) {
    crc = crc32c_shift(crc, UINT32_C(0xa51b6135) /* of STREAM_BYTES */) ^ (uint32_t)sums[s];
  }
  return crc;
}

__attribute__((target("sse4.2,pclmul"))) uint32_t dc__crc32c_sse42(uint32_t crc, const void *data, size_t bytes) {
  enum { BLOCK = STREAMS * STREAM_BYTES };
  const unsigned char *at = data;
  crc = ~crc;
  for (; bytes >= BLOCK; at += BLOCK, bytes -= BLOCK) {
    uint64_t sums[STREAMS] = {0};
    for (int32_t i = 0; i < STREAM_BYTES; i += STEP_BYTES) {
      crc32c_step(at + i, sums);
    }
    crc = crc32c_join(crc, sums);
  }
  return ~crc32c_words(crc, at, bytes);
}

#define CRC32C_AVX512 "avx512f,avx512vl,avx512dq,vpclmulqdq,sse4.2,pclmul"

enum { VECTORS = 2, FOLD_BYTES = VECTORS * 64, FOLDS = STREAM_BYTES / STEP_BYTES };

__attribute__((target(CRC32C_AVX512), always_inline)) static inline void crc32c_load(const unsigned char *at,
                                                                                     uint32_t crc,
                                                                                     __m512i folded[VECTORS]) {
  for (int32_t i = 0; i < VECTORS; i++) {
    folded[i] = _mm512_loadu_si512(at + i * 64);
  }
  folded[0] = _mm512_xor_si512(folded[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
}

/* Folds 128 bytes into the next 128: Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ",
 * Intel 2009. The factors are x^1056 and x^992 modulo the polynomial, reflected. The last 128 bytes then have the same
 * remainder as all bytes read so far. */
__attribute__((target(CRC32C_AVX512), always_inline)) static inline void crc32c_fold(const unsigned char *at,
                                                                                     __m512i folded[VECTORS]) {
  const __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0d3b6092, 0x6992cea2));
  for (int32_t i = 0; i < VECTORS; i++) {
    __m512i low = _mm512_clmulepi64_epi128(folded[i], factors, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(folded[i], factors, 0x11);
    folded[i] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(at + i * 64), 0x96);
  }
}

__attribute__((target(CRC32C_AVX512))) static uint32_t crc32c_end(const __m512i folded[VECTORS]) {
  unsigned char rest[FOLD_BYTES];
  memcpy(rest, folded, sizeof rest);
  return crc32c_words(0, rest, sizeof rest);
}

/* The multiplier and the CRC instruction are separate execution units, which work in parallel. So the first two thirds
 * of a block are folded, while the instruction takes the streams in its last third. A block does not wait for the
 * previous block's checksum: the processor starts on it while it still joins that one's sums. */
__attribute__((target(CRC32C_AVX512))) uint32_t dc__crc32c_avx512(uint32_t crc, const void *data, size_t bytes) {
  enum { FOLDED = FOLDS * FOLD_BYTES, BLOCK = FOLDED + STREAMS * STREAM_BYTES };
  const unsigned char *at = data;
  __m512i folded[VECTORS];
  crc = ~crc;
  for (; bytes >= BLOCK; at += BLOCK, bytes -= BLOCK) {
    uint64_t sums[STREAMS] = {0};
    crc32c_load(at, 0, folded);
    crc32c_step(at + FOLDED, sums);
    for (int32_t i = 1; i < FOLDS; i++) {
      crc32c_fold(at + i * FOLD_BYTES, folded);
      crc32c_step(at + FOLDED + i * STEP_BYTES, sums);
    }
    crc = crc32c_shift(crc, UINT32_C(0x6a173fa1) /* of BLOCK */) ^ crc32c_join(crc32c_end(folded), sums);
  }
  if (bytes >= (size_t)2 * FOLD_BYTES) {
    crc32c_load(at, crc, folded);
    for (at += FOLD_BYTES, bytes -= FOLD_BYTES; bytes >= FOLD_BYTES; at += FOLD_BYTES, bytes -= FOLD_BYTES) {
      crc32c_fold(at, folded);
    }
    crc = crc32c_end(folded);
  }
  return ~crc32c_words(crc, at, bytes);
}

uint32_t dc__crc32c(uint32_t crc, const void *data, size_t bytes) {
  if (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return dc__crc32c_avx512(crc, data, bytes);
  }
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") ? dc__crc32c_sse42(crc, data, bytes)
                                                                              : dc__crc32c_table(crc, data, bytes);
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
