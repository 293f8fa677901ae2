/* A vector of floats as wide as the including file's instruction set. Its loads and stores convert from and to the
 * 16-bit types, bit for bit as convert.h does. The dtype arguments are constants at every call, so each call becomes
 * one case. */
#ifndef DC_KERNELS_X86_VECTOR_H
#define DC_KERNELS_X86_VECTOR_H

#include <immintrin.h>

#include "kernels/dispatch.h"

#define DC__INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__

enum { WIDTH = 16 };
typedef __m512 vector;

DC__INLINE vector set(float x) {
  return _mm512_set1_ps(x);
}
DC__INLINE vector add(vector a, vector b) {
  return _mm512_add_ps(a, b);
}
DC__INLINE vector multiply(vector a, vector b) {
  return _mm512_mul_ps(a, b);
}
DC__INLINE vector divide(vector a, vector b) {
  return _mm512_div_ps(a, b);
}
/* x where the bits of a and b are the same, else b. */
DC__INLINE vector where_same(vector a, vector b, vector x) {
  return _mm512_mask_mov_ps(b, _mm512_cmpeq_epi32_mask(_mm512_castps_si512(a), _mm512_castps_si512(b)), x);
}
DC__INLINE vector load_f32(const void *p) {
  return _mm512_loadu_ps(p);
}
DC__INLINE void store_f32(void *p, vector v) {
  _mm512_storeu_ps(p, v);
}
DC__INLINE vector load_f16(const void *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}
DC__INLINE void store_f16(void *p, vector v) {
  _mm256_storeu_si256(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
DC__INLINE vector as_f16(vector v) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
DC__INLINE vector load_bf16(const void *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
/* Rounding leaves bits in the lower halves. The processors' own conversion is not used: it flushes subnormals. */
DC__INLINE __m512i round_bf16(vector v) {
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
}
DC__INLINE void store_bf16(void *p, vector v) {
  _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16(v), 16)));
}
DC__INLINE vector as_bf16(vector v) {
  return _mm512_castsi512_ps(_mm512_and_si512(round_bf16(v), _mm512_set1_epi32(-0x10000)));
}

/* Stores 64 bytes past the caches; dst is aligned. */
DC__INLINE void stream_64(void *dst, const void *src) {
  _mm512_stream_si512(dst, _mm512_loadu_si512(src));
}

#else

enum { WIDTH = 8 };
typedef __m256 vector;

DC__INLINE vector set(float x) {
  return _mm256_set1_ps(x);
}
DC__INLINE vector add(vector a, vector b) {
  return _mm256_add_ps(a, b);
}
DC__INLINE vector multiply(vector a, vector b) {
  return _mm256_mul_ps(a, b);
}
DC__INLINE vector divide(vector a, vector b) {
  return _mm256_div_ps(a, b);
}
/* x where the bits of a and b are the same, else b. */
DC__INLINE vector where_same(vector a, vector b, vector x) {
  return _mm256_blendv_ps(b, x,
                          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b))));
}
DC__INLINE vector load_f32(const void *p) {
  return _mm256_loadu_ps(p);
}
DC__INLINE void store_f32(void *p, vector v) {
  _mm256_storeu_ps(p, v);
}
DC__INLINE vector load_f16(const void *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(p));
}
DC__INLINE void store_f16(void *p, vector v) {
  _mm_storeu_si128(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
DC__INLINE vector as_f16(vector v) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
DC__INLINE vector load_bf16(const void *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
/* Rounding leaves bits in the lower halves. */
DC__INLINE __m256i round_bf16(vector v) {
  __m256i bits = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000)), nan);
}
DC__INLINE void store_bf16(void *p, vector v) {
  __m256i upper = _mm256_srli_epi32(round_bf16(v), 16);
  _mm_storeu_si128(p, _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)));
}
DC__INLINE vector as_bf16(vector v) {
  return _mm256_castsi256_ps(_mm256_and_si256(round_bf16(v), _mm256_set1_epi32(-0x10000)));
}

/* Stores 64 bytes past the caches; dst is aligned. */
DC__INLINE void stream_64(void *dst, const void *src) {
  __m256i *d = dst;
  const __m256i *s = src;
  _mm256_stream_si256(d, _mm256_loadu_si256(s));
  _mm256_stream_si256(d + 1, _mm256_loadu_si256(s + 1));
}

#endif

DC__INLINE vector load(const void *array, int32_t dtype, int64_t i) {
  switch (dtype) {
    case DC_FLOAT16:
      return load_f16((const uint16_t *)array + i);
    case DC_BFLOAT16:
      return load_bf16((const uint16_t *)array + i);
    default:
      return load_f32((const float *)array + i);
  }
}

DC__INLINE void store(void *array, int32_t dtype, int64_t i, vector v) {
  switch (dtype) {
    case DC_FLOAT16:
      store_f16((uint16_t *)array + i, v);
      break;
    case DC_BFLOAT16:
      store_bf16((uint16_t *)array + i, v);
      break;
    default:
      store_f32((float *)array + i, v);
  }
}

/* Returns v after a store to the type and a load from it. */
DC__INLINE vector as(vector v, int32_t dtype) {
  switch (dtype) {
    case DC_FLOAT16:
      return as_f16(v);
    case DC_BFLOAT16:
      return as_bf16(v);
    default:
      return v;
  }
}

#endif
