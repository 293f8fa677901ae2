/* Packing for the tiles of gemm_vector.h and gemm_amx.c, which include this file. Words from rows that run along k are
 * transposed in registers, words from rows that run across k are copied panel by panel. */

#define PACK_INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__

typedef __m512i lanes;
#define ZERO_LANES _mm512_setzero_si512
PACK_INLINE __mmask16 first_lanes(int64_t count) {
  return (__mmask16)(count >= LANES ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1u);
}
PACK_INLINE lanes load_lanes(const void *from, int64_t count) {
  return _mm512_maskz_loadu_epi32(first_lanes(count), from);
}
PACK_INLINE void store_lanes(void *to, int64_t count, lanes x) {
  _mm512_mask_storeu_epi32(to, first_lanes(count), x);
}
/* Transposes LANES x LANES words. */
PACK_INLINE void transpose(lanes r[LANES]) {
  lanes t[LANES];
  _Pragma("GCC unroll 8") for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  _Pragma("GCC unroll 4") for (int i = 0; i < LANES; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

#else

typedef __m256i lanes;
#define ZERO_LANES _mm256_setzero_si256

PACK_INLINE lanes first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(count < LANES ? count : LANES)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
PACK_INLINE lanes load_lanes(const void *from, int64_t count) {
  return count >= LANES ? _mm256_loadu_si256(from) : _mm256_maskload_epi32(from, first_lanes(count));
}
PACK_INLINE void store_lanes(void *to, int64_t count, lanes x) {
  if (count >= LANES) {
    _mm256_storeu_si256(to, x);
  } else { /* MR words: a masked store costs more */
    _mm_storeu_si128(to, _mm256_castsi256_si128(x));
    _mm_storel_epi64((__m128i *)(void *)((char *)to + 16), _mm256_extracti128_si256(x, 1));
  }
}

/* Transposes LANES x LANES words. */
PACK_INLINE void transpose(lanes r[LANES]) {
  lanes t[LANES];
  _Pragma("GCC unroll 4") for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  _Pragma("GCC unroll 2") for (int i = 0; i < LANES; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
  _Pragma("GCC unroll 8") for (int i = 0; i < LANES; i++) {
    r[i] = t[i];
  }
}

#endif

#ifndef __AVX512BF16__

/* The same for float64, in squares of SQUARE x SQUARE. */
#ifdef __AVX512F__
enum { SQUARE = 8 };
typedef __m512d wide;
PACK_INLINE wide load_wide(const char *from, int64_t count) {
  return _mm512_maskz_loadu_pd((__mmask8)first_lanes(count < SQUARE ? count : SQUARE), from);
}
PACK_INLINE void store_wide(double *to, int64_t count, wide x) {
  _mm512_mask_storeu_pd(to, (__mmask8)first_lanes(count < SQUARE ? count : SQUARE), x);
}
PACK_INLINE void transpose_wide(wide r[SQUARE]) {
  wide t[SQUARE];
  _Pragma("GCC unroll 4") for (int i = 0; i < SQUARE; i += 2) {
    t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
  }
  _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) { /* columns 0 and 4, or 1 and 5; then 2 and 6, or 3 and 7 */
    r[i] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0x88);
    r[i + 2] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd);
    r[i + 4] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0x88);
    r[i + 6] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0xdd);
  }
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f64x2(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f64x2(r[i], r[i + 4], 0xdd);
  }
  _Pragma("GCC unroll 8") for (int i = 0; i < SQUARE; i++) {
    r[i] = t[i];
  }
}
#else
enum { SQUARE = 4 };
typedef __m256d wide;
PACK_INLINE __m256i first_wide(int64_t count) {
  return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
}
PACK_INLINE wide load_wide(const char *from, int64_t count) {
  return _mm256_maskload_pd((const double *)(const void *)from, first_wide(count));
}
PACK_INLINE void store_wide(double *to, int64_t count, wide x) {
  _mm256_maskstore_pd(to, first_wide(count), x);
}
PACK_INLINE void transpose_wide(wide r[SQUARE]) {
  const wide a = _mm256_unpacklo_pd(r[0], r[1]);
  const wide b = _mm256_unpackhi_pd(r[0], r[1]);
  const wide c = _mm256_unpacklo_pd(r[2], r[3]);
  const wide d = _mm256_unpackhi_pd(r[2], r[3]);
  r[0] = _mm256_permute2f128_pd(a, c, 0x20);
  r[1] = _mm256_permute2f128_pd(b, d, 0x20);
  r[2] = _mm256_permute2f128_pd(a, c, 0x31);
  r[3] = _mm256_permute2f128_pd(b, d, 0x31);
}
#endif

static void pack_rows_wide(void *dst, int64_t panel, const void *src, int64_t ld, int64_t rows, int64_t steps) {
  for (int64_t p = 0; p < steps; p += SQUARE) {
    for (int64_t i = 0; i < panel; i += SQUARE) {
      wide r[SQUARE];
      _Pragma("GCC unroll 8") for (int j = 0; j < SQUARE; j++) {
        const char *at = (const char *)src + (i + j) * ld + p * 8;
        r[j] = load_wide(at, i + j < rows ? steps - p : 0);
        __builtin_prefetch(at + panel * ld);
      }
      transpose_wide(r);
      _Pragma("GCC unroll 8") for (int j = 0; j < SQUARE; j++) {
        if (p + j < steps) {
          store_wide((double *)dst + (p + j) * panel + i, panel - i, r[j]);
        }
      }
    }
  }
}

#endif

/* Packs a panel: dst[p * panel + i] = src[i][p], from rows that lie `ld` bytes apart. */
PACK_INLINE void panel_of_rows(uint32_t *dst, int64_t panel, const char *src, int64_t ld, int64_t rows, int64_t steps) {
  for (int64_t p = 0; p < steps; p += LANES) {
    const int64_t part = steps - p < LANES ? steps - p : LANES;
    for (int64_t i = 0; i < panel; i += LANES) {
      lanes r[LANES];
      _Pragma("GCC unroll 16") for (int j = 0; j < LANES; j++) {
        const char *at = src + (i + j) * ld + p * 4;
        r[j] = i + j < rows ? load_lanes(at, part) : ZERO_LANES();
        __builtin_prefetch(at + panel * ld); /* the next panel's: hardware prefetchers do not follow so long a stride */
      }
      transpose(r);
      _Pragma("GCC unroll 16") for (int j = 0; j < LANES; j++) {
        if (j < part) {
          store_lanes(dst + (p + j) * panel + i, panel - i, r[j]);
        }
      }
    }
  }
}

static void pack_rows(void *dst, int64_t panel, const void *src, int64_t ld, int64_t rows, int64_t steps) {
  if (panel == MR) {
    panel_of_rows(dst, MR, src, ld, rows, steps);
  } else {
    panel_of_rows(dst, 2 * LANES, src, ld, rows, steps);
  }
}

#ifdef __AVX512BF16__
enum { DEPTH = 2 };
#else
enum { DEPTH = 1 };
#endif

/* Loads the words of one step: pairs from two rows for the tile of bfloat16, else one row. */
PACK_INLINE lanes load_step(const char *src, int64_t ld, int64_t p, int64_t depth, int64_t i, int64_t count) {
#ifdef __AVX512BF16__
  const __mmask16 some = first_lanes(count);
  const char *low = src + 2 * p * ld + i * 2;
  lanes pair = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, low));
  if (2 * p + 1 < depth) {
    lanes high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, low + ld));
    pair = _mm512_or_si512(pair, _mm512_slli_epi32(high, 16));
  }
  return pair;
#else
  (void)depth;
  return load_lanes(src + p * ld + i * 4, count);
#endif
}

enum { RUN = 8 }; /* steps copied at a time, so that both sides are read and written in runs */

/* Packs panels one after the other: dst[p * panel + i] = src[p][i]. */
PACK_INLINE void panels_of_columns(uint32_t *dst, int64_t panel, const char *src, int64_t ld, int64_t width,
                                   int64_t depth, int64_t steps) {
  const int64_t all = (depth + DEPTH - 1) / DEPTH;
  for (int64_t begin = 0; begin < all; begin += RUN) {
    const int64_t end = begin + RUN < all ? begin + RUN : all;
    for (int64_t i = 0; i < width; i += panel) {
      uint32_t *d = dst + i * steps;
      if (width - i >= panel) {
        for (int64_t p = begin; p < end; p++) {
          __builtin_prefetch(src + (p + RUN) * DEPTH * ld + i * (4 / DEPTH));
          if (DEPTH == 2) {
            __builtin_prefetch(src + ((p + RUN) * DEPTH + 1) * ld + i * (4 / DEPTH));
          }
          for (int64_t l = 0; l < panel; l += LANES) {
            store_lanes(d + p * panel + l, panel - l, load_step(src, ld, p, depth, i + l, panel - l));
          }
        }
      } else {
        for (int64_t p = begin; p < end; p++) {
          for (int64_t l = 0; l < panel; l += LANES) {
            store_lanes(d + p * panel + l, panel - l, load_step(src, ld, p, depth, i + l, width - i - l));
          }
        }
      }
    }
  }
}

static void pack_columns(void *dst, int64_t panel, int64_t steps, const void *src, int64_t ld, int64_t width,
                         int64_t depth) {
  if (panel == MR) {
    panels_of_columns(dst, MR, src, ld, width, depth, steps);
  } else {
    panels_of_columns(dst, 2 * LANES, src, ld, width, depth, steps);
  }
}
