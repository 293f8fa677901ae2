/* Copies, casts and sums of floating-point types that check their output. They keep the largest magnitude as bits,
 * which have the order of the numbers. That takes an "and" and a maximum beside each load and store. INIT names the
 * function that puts them into a table. */
#include <string.h>

#include "kernels/x86/vector.h"

#ifdef __AVX512F__

typedef __m512i integers;

DC__INLINE integers load_bits(const void *p) {
  return _mm512_loadu_si512(p);
}
DC__INLINE void store_bits(void *p, integers x) {
  _mm512_storeu_si512(p, x);
}
DC__INLINE void stream_bits(void *p, integers x) {
  _mm512_stream_si512(p, x);
}
DC__INLINE integers bits_of(vector v) {
  return _mm512_castps_si512(v);
}
DC__INLINE integers set_bits(int64_t x) {
  return _mm512_set1_epi64(x);
}
DC__INLINE integers and_bits(integers a, integers b) {
  return _mm512_and_si512(a, b);
}
DC__INLINE integers larger_16(integers a, integers b) {
  return _mm512_max_epi16(a, b);
}
DC__INLINE integers larger_32(integers a, integers b) {
  return _mm512_max_epi32(a, b);
}

#else

typedef __m256i integers;

DC__INLINE integers load_bits(const void *p) {
  return _mm256_loadu_si256(p);
}
DC__INLINE void store_bits(void *p, integers x) {
  _mm256_storeu_si256(p, x);
}
DC__INLINE void stream_bits(void *p, integers x) {
  _mm256_stream_si256(p, x);
}
DC__INLINE integers bits_of(vector v) {
  return _mm256_castps_si256(v);
}
DC__INLINE integers set_bits(int64_t x) {
  return _mm256_set1_epi64x(x);
}
DC__INLINE integers and_bits(integers a, integers b) {
  return _mm256_and_si256(a, b);
}
DC__INLINE integers larger_16(integers a, integers b) {
  return _mm256_max_epi16(a, b);
}
DC__INLINE integers larger_32(integers a, integers b) {
  return _mm256_max_epi32(a, b);
}

#endif

/* Maxima run in several chains side by side, since each waits for the one before it in its chain. */
enum { BYTES = sizeof(integers), LINE = 64, CHAINS = DC__KERNELS_STEP / WIDTH };

/* ---- copies ---- */

/* A mask of magnitudes' bits, the bits of infinity, and whether magnitudes are compared as 16-bit integers. The upper
 * half of a float64 is enough. */
typedef struct finite_test {
  int64_t mask;
  int32_t infinity;
  bool halves;
} finite_test;

DC__INLINE finite_test finite_test_of(int32_t dtype) {
  switch (dtype) {
    case DC_FLOAT16:
      return (finite_test){0x7fff7fff7fff7fff, 0x7c00, true};
    case DC_BFLOAT16:
      return (finite_test){0x7fff7fff7fff7fff, 0x7f80, true};
    case DC_FLOAT32:
      return (finite_test){0x7fffffff7fffffff, 0x7f800000, false};
    default:
      return (finite_test){0x7fffffff00000000, 0x7ff00000, false};
  }
}

DC__INLINE bool all_below(const integers max_bits[CHAINS], int32_t infinity, bool halves) {
  union {
    integers all[CHAINS];
    int32_t words[CHAINS * BYTES / 4];
    int16_t halves[CHAINS * BYTES / 2];
  } lanes;
  memcpy(lanes.all, max_bits, sizeof lanes.all);
  int32_t largest = 0;
  for (size_t i = 0; i < (halves ? sizeof lanes.halves / 2 : sizeof lanes.words / 4); i++) {
    const int32_t lane = halves ? lanes.halves[i] : lanes.words[i];
    largest = lane > largest ? lane : largest;
  }
  return largest < infinity;
}

DC__INLINE void copy_line(char *d, const char *s, integers max_bits[CHAINS], finite_test l, bool stream) {
  const integers mask = set_bits(l.mask);
  for (size_t i = 0; i < LINE / BYTES; i++) {
    const integers x = load_bits(s + i * BYTES);
    if (stream) {
      stream_bits(d + i * BYTES, x);
    } else {
      store_bits(d + i * BYTES, x);
    }
    max_bits[i] = l.halves ? larger_16(max_bits[i], and_bits(x, mask)) : larger_32(max_bits[i], and_bits(x, mask));
  }
}

/* Copies whole lines of d. The first and the last may overlap others, which are then written twice, with the same
 * bits. */
DC__INLINE bool combine_copy(void *dst, const void *src, int64_t count, int32_t dtype) {
  const finite_test l = finite_test_of(dtype);
  const size_t size = l.halves ? 2 : dtype == DC_FLOAT32 ? 4 : 8;
  const size_t bytes = (size_t)count * size;
  char *d = dst;
  const char *s = src;
  integers max_bits[CHAINS] = {{0}};
  if (bytes < DC__COPY_STREAM || (uintptr_t)d % size != 0) {
    for (size_t i = 0; i < bytes; i += LINE) {
      copy_line(d + i, s + i, max_bits, l, false);
    }
    return all_below(max_bits, l.infinity, l.halves);
  }
  copy_line(d, s, max_bits, l, false);
  for (size_t i = (size_t)(-(uintptr_t)d % LINE); i + LINE <= bytes; i += LINE) {
    copy_line(d + i, s + i, max_bits, l, true);
  }
  _mm_sfence(); /* orders non-temporal stores before the caller's signal that the work is done */
  copy_line(d + bytes - LINE, s + bytes - LINE, max_bits, l, false);
  return all_below(max_bits, l.infinity, l.halves);
}

/* ---- casts and sums, in float32 ---- */

/* The smallest magnitude that becomes infinite in the type: halfway from its largest number to the next one. */
DC__INLINE int32_t overflow(int32_t dtype) {
  return dtype == DC_FLOAT16 ? 0x477ff000 : dtype == DC_BFLOAT16 ? 0x7f7f8000 : 0x7f800000;
}

DC__INLINE bool convert(void *dst, int32_t to, const void *src, int32_t from, int64_t count, bool adds) {
  const integers mask = set_bits(0x7fffffff7fffffff);
  integers max_bits[CHAINS] = {{0}};
  for (int64_t i = 0; i < count; i += DC__KERNELS_STEP) {
    for (int64_t k = 0; k < CHAINS; k++) {
      const int64_t at = i + k * WIDTH;
      const vector v = adds ? add(load(dst, to, at), load(src, from, at)) : load(src, from, at);
      store(dst, to, at, v);
      max_bits[k] = larger_32(max_bits[k], and_bits(bits_of(v), mask));
    }
  }
  return all_below(max_bits, overflow(to), false);
}

#define COPY(name, dtype)                                       \
  static bool name(void *dst, const void *src, int64_t count) { \
    return combine_copy(dst, src, count, dtype);                \
  }
#define CONVERT(name, to, from, adds)                           \
  static bool name(void *dst, const void *src, int64_t count) { \
    return convert(dst, to, src, from, count, adds);            \
  }

COPY(copy_f32, DC_FLOAT32)
COPY(copy_f64, DC_FLOAT64)
COPY(copy_f16, DC_FLOAT16)
COPY(copy_bf16, DC_BFLOAT16)
CONVERT(f32_of_f16, DC_FLOAT32, DC_FLOAT16, false)
CONVERT(f32_of_bf16, DC_FLOAT32, DC_BFLOAT16, false)
CONVERT(f16_of_f32, DC_FLOAT16, DC_FLOAT32, false)
CONVERT(f16_of_bf16, DC_FLOAT16, DC_BFLOAT16, false)
CONVERT(bf16_of_f32, DC_BFLOAT16, DC_FLOAT32, false)
CONVERT(bf16_of_f16, DC_BFLOAT16, DC_FLOAT16, false)
CONVERT(f32_and_f32, DC_FLOAT32, DC_FLOAT32, true)
CONVERT(f32_and_f16, DC_FLOAT32, DC_FLOAT16, true)
CONVERT(f32_and_bf16, DC_FLOAT32, DC_BFLOAT16, true)
CONVERT(f16_and_f16, DC_FLOAT16, DC_FLOAT16, true)
CONVERT(f16_and_f32, DC_FLOAT16, DC_FLOAT32, true)
CONVERT(bf16_and_bf16, DC_BFLOAT16, DC_BFLOAT16, true)
CONVERT(bf16_and_f32, DC_BFLOAT16, DC_FLOAT32, true)

void INIT(dc__kernel_table *table) {
  dc__combine_fn(*set)[DC__KERNELS_DTYPES] = table->combine[false];
  dc__combine_fn(*sum)[DC__KERNELS_DTYPES] = table->combine[true];
  set[DC_FLOAT32][DC_FLOAT32] = copy_f32;
  set[DC_FLOAT64][DC_FLOAT64] = copy_f64;
  set[DC_FLOAT16][DC_FLOAT16] = copy_f16;
  set[DC_BFLOAT16][DC_BFLOAT16] = copy_bf16;
  set[DC_FLOAT32][DC_FLOAT16] = f32_of_f16;
  set[DC_FLOAT32][DC_BFLOAT16] = f32_of_bf16;
  set[DC_FLOAT16][DC_FLOAT32] = f16_of_f32;
  set[DC_FLOAT16][DC_BFLOAT16] = f16_of_bf16;
  set[DC_BFLOAT16][DC_FLOAT32] = bf16_of_f32;
  set[DC_BFLOAT16][DC_FLOAT16] = bf16_of_f16;
  sum[DC_FLOAT32][DC_FLOAT32] = f32_and_f32;
  sum[DC_FLOAT32][DC_FLOAT16] = f32_and_f16;
  sum[DC_FLOAT32][DC_BFLOAT16] = f32_and_bf16;
  sum[DC_FLOAT16][DC_FLOAT16] = f16_and_f16;
  sum[DC_FLOAT16][DC_FLOAT32] = f16_and_f32;
  sum[DC_BFLOAT16][DC_BFLOAT16] = bf16_and_bf16;
  sum[DC_BFLOAT16][DC_FLOAT32] = bf16_and_f32;
}
