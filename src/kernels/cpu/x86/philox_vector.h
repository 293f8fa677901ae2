/* Philox4x32-10 in vectors, for rows_loops.h: 16 counters with AVX-512, twice 8 with AVX2. */
#include <immintrin.h>

#ifdef __AVX512F__
enum { COUNTERS = 16 };
typedef __m512i words;
#define W(name) _mm512_##name
#define W_BITS(name) _mm512_##name##_si512
#define W_EVEN_ODD(even, odd) _mm512_mask_blend_epi32(0xaaaa, even, odd)
#define W_SET64 _mm512_set1_epi64
#define W_COUNT _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define W_PART(v, i) _mm512_extracti32x4_epi32(v, i)
#else
enum { COUNTERS = 8 };
typedef __m256i words;
#define W(name) _mm256_##name
#define W_BITS(name) _mm256_##name##_si256
#define W_EVEN_ODD(even, odd) _mm256_blend_epi32(even, odd, 0xaa)
#define W_SET64 _mm256_set1_epi64x
#define W_COUNT _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)
#define W_PART(v, i) _mm256_extracti128_si256(v, i)
#endif

/* x times a constant: upper and lower halves of the 64-bit products. */
DC__INLINE void multiply_words(words x, uint32_t by, words *high, words *low) {
  words m = W_SET64((int64_t)by);
  words even = W(mul_epu32)(x, m);
  words odd = W(mul_epu32)(W(srli_epi64)(x, 32), m);
  *high = W_EVEN_ODD(W(srli_epi64)(even, 32), odd);
  *low = W_EVEN_ODD(even, W(slli_epi64)(odd, 32));
}

/* Stores words 0 to 3 of counter 4 i + r, which lie in part i of t[r], at their place. */
#define W_STORE(i)                                                                     \
  for (int32_t r = 0; r < 4; r++) {                                                    \
    _mm_storeu_si128((__m128i *)(void *)(draws + 8 * (4 * (i) + r)), W_PART(t[r], i)); \
  }

DC__INLINE void philox_vector(uint16_t *draws, uint32_t block, uint32_t row, uint32_t plane, const uint32_t *key) {
  words c0 = W(add_epi32)(W(set1_epi32)((int32_t)block), W_COUNT);
  words c1 = W(set1_epi32)((int32_t)row);
  words c2 = W(set1_epi32)((int32_t)plane);
  words c3 = W_BITS(setzero)();
  uint32_t k0 = key[0];
  uint32_t k1 = key[1];
  for (int32_t round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    words high0;
    words low0;
    words high2;
    words low2;
    multiply_words(c0, 0xD2511F53u, &high0, &low0);
    multiply_words(c2, 0xCD9E8D57u, &high2, &low2);
    c0 = W_BITS(xor)(W_BITS(xor)(high2, c1), W(set1_epi32)((int32_t)k0));
    c2 = W_BITS(xor)(W_BITS(xor)(high0, c3), W(set1_epi32)((int32_t)k1));
    c1 = low2;
    c3 = low0;
  }
  words a = W(unpacklo_epi32)(c0, c1);
  words b = W(unpackhi_epi32)(c0, c1);
  words c = W(unpacklo_epi32)(c2, c3);
  words d = W(unpackhi_epi32)(c2, c3);
  words t[4] = {W(unpacklo_epi64)(a, c), W(unpackhi_epi64)(a, c), W(unpacklo_epi64)(b, d), W(unpackhi_epi64)(b, d)};
  W_STORE(0)
  W_STORE(1)
#ifdef __AVX512F__
  W_STORE(2)
  W_STORE(3)
#endif
}

static void philox_lanes(uint16_t *draws, uint32_t block, uint32_t row, uint32_t plane, const uint32_t *key) {
  for (uint32_t j = 0; j < LANES; j += COUNTERS) {
    philox_vector(draws + 8 * j, block + j, row, plane, key);
  }
}
