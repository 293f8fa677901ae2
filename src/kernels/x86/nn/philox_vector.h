/* Philox4x32-10 in vectors, for rowops_tmpl.h: 16 counters with AVX-512, twice 8 with AVX2. */
#include <immintrin.h>

#ifdef __AVX512F__
enum { COUNTERS = 16 };
typedef __m512i words;
#define W(name) _mm512_##name
#define W_BITS(name) _mm512_##name##_si512
#define W_STORE _mm512_storeu_si512
#define W_EVEN_ODD(even, odd) _mm512_mask_blend_epi32(0xaaaa, even, odd)
#define W_SET64 _mm512_set1_epi64
#define W_COUNT _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define W_XOR3(a, b, c) _mm512_ternarylogic_epi32(a, b, c, 0x96)
#else
enum { COUNTERS = 8 };
typedef __m256i words;
#define W(name) _mm256_##name
#define W_BITS(name) _mm256_##name##_si256
#define W_STORE _mm256_storeu_si256
#define W_EVEN_ODD(even, odd) _mm256_blend_epi32(even, odd, 0xaa)
#define W_SET64 _mm256_set1_epi64x
#define W_COUNT _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)
#define W_XOR3(a, b, c) _mm256_xor_si256(_mm256_xor_si256(a, b), c)
#endif

/* A round for the counters in the lower halves of 64-bit lanes; the upper halves never matter. */
DC__INLINE void philox_round(words c[4], words k0, words k1) {
  words low0 = W(mul_epu32)(c[0], W_SET64(0xD2511F53));
  words low2 = W(mul_epu32)(c[2], W_SET64(0xCD9E8D57));
  c[0] = W_XOR3(W(srli_epi64)(low2, 32), c[1], k0);
  c[2] = W_XOR3(W(srli_epi64)(low0, 32), c[3], k1);
  c[1] = low2;
  c[3] = low0;
}

/* Stores words 0 to 3 of counter 4 i + r, which are in part i of t[r], in the order of the counters. Its vectors are as
 * wide as the reader's. */
DC__INLINE void store_in_order(uint16_t *random_bits, const words t[4]) {
  words *to = (words *)(void *)random_bits;
#ifdef __AVX512F__
  words a = _mm512_shuffle_i32x4(t[0], t[1], 0x44);
  words b = _mm512_shuffle_i32x4(t[2], t[3], 0x44);
  words c = _mm512_shuffle_i32x4(t[0], t[1], 0xee);
  words d = _mm512_shuffle_i32x4(t[2], t[3], 0xee);
  W_STORE(to, _mm512_shuffle_i32x4(a, b, 0x88));
  W_STORE(to + 1, _mm512_shuffle_i32x4(a, b, 0xdd));
  W_STORE(to + 2, _mm512_shuffle_i32x4(c, d, 0x88));
  W_STORE(to + 3, _mm512_shuffle_i32x4(c, d, 0xdd));
#else
  W_STORE(to, _mm256_permute2x128_si256(t[0], t[1], 0x20));
  W_STORE(to + 1, _mm256_permute2x128_si256(t[2], t[3], 0x20));
  W_STORE(to + 2, _mm256_permute2x128_si256(t[0], t[1], 0x31));
  W_STORE(to + 3, _mm256_permute2x128_si256(t[2], t[3], 0x31));
#endif
}

DC__INLINE void philox_vector(uint16_t *random_bits, uint32_t block, uint32_t row, uint32_t plane,
                              const uint32_t *key) {
  /* Counters at even and at odd places are apart, since a multiplication makes a product of two words' size. */
  words count = W(add_epi32)(W(set1_epi32)((int32_t)block), W_COUNT);
  words even[4] = {count, W(set1_epi32)((int32_t)row), W(set1_epi32)((int32_t)plane), W_BITS(setzero)()};
  words odd[4] = {W(srli_epi64)(count, 32), even[1], even[2], even[3]};
  words k0 = W(set1_epi32)((int32_t)key[0]);
  words k1 = W(set1_epi32)((int32_t)key[1]);
  for (int32_t round = 0; round < 10; round++) {
    philox_round(even, k0, k1);
    philox_round(odd, k0, k1);
    k0 = W(add_epi32)(k0, W(set1_epi32)((int32_t)0x9E3779B9u));
    k1 = W(add_epi32)(k1, W(set1_epi32)((int32_t)0xBB67AE85u));
  }
  words c[4];
  for (int32_t w = 0; w < 4; w++) {
    c[w] = W_EVEN_ODD(even[w], W(slli_epi64)(odd[w], 32));
  }
  words low01 = W(unpacklo_epi32)(c[0], c[1]);
  words high01 = W(unpackhi_epi32)(c[0], c[1]);
  words low23 = W(unpacklo_epi32)(c[2], c[3]);
  words high23 = W(unpackhi_epi32)(c[2], c[3]);
  words t[4] = {W(unpacklo_epi64)(low01, low23), W(unpackhi_epi64)(low01, low23), W(unpacklo_epi64)(high01, high23),
                W(unpackhi_epi64)(high01, high23)};
  store_in_order(random_bits, t);
}

static void philox_lanes(uint16_t *random_bits, uint32_t block, uint32_t row, uint32_t plane, const uint32_t *key) {
  for (uint32_t j = 0; j < LANES; j += COUNTERS) {
    philox_vector(random_bits + 8 * j, block + j, row, plane, key);
  }
}
