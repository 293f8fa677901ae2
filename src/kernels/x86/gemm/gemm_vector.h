/* The tiles of the matrix product: MR rows of accumulators, two vectors wide. INIT names the function that puts them
 * into a table. */
#include <immintrin.h>

#include "kernels/dispatch.h"

#ifdef __AVX512F__
enum { MR = 14, LANES = 16 }; /* 28 of 32 registers */
typedef __m512 vector;
typedef __m512d vector_f64;
#define F(name) _mm512_##name
#else
enum { MR = 6, LANES = 8 }; /* 12 of 16 registers */
typedef __m256 vector;
typedef __m256d vector_f64;
#define F(name) _mm256_##name
#endif

#include "kernels/x86/gemm/pack_vector.h"

enum { AHEAD = 16 }; /* steps by which A is prefetched, across panels: it comes from the second-level cache */

/* SUM(c, x, y) is c + x y, where x is one word of a row, broadcast to a vector. */
#define TILE(name, type, vec, width, ZERO, LOAD, STORE, ADD, SPREAD, SUM)                          \
  static void name(int64_t steps, const void *a, const void *b, void *acc, int64_t ld, bool add) { \
    const type *x = a;                                                                             \
    const type *y = b;                                                                             \
    vec sum[MR][2];                                                                                \
    _Pragma("GCC unroll 16") for (int i = 0; i < MR; i++) {                                        \
      sum[i][0] = ZERO();                                                                          \
      sum[i][1] = ZERO();                                                                          \
    }                                                                                              \
    for (int64_t p = 0; p < steps; p++, x += MR, y += 2 * (width)) {                               \
      __builtin_prefetch(x + AHEAD * MR);                                                          \
      vec y0 = LOAD(y);                                                                            \
      vec y1 = LOAD(y + (width));                                                                  \
      _Pragma("GCC unroll 16") for (int i = 0; i < MR; i++) {                                      \
        vec r = SPREAD(x[i]);                                                                      \
        sum[i][0] = SUM(sum[i][0], r, y0);                                                         \
        sum[i][1] = SUM(sum[i][1], r, y1);                                                         \
      }                                                                                            \
    }                                                                                              \
    type *out = acc;                                                                               \
    if (add) {                                                                                     \
      _Pragma("GCC unroll 16") for (int i = 0; i < MR; i++) {                                      \
        sum[i][0] = ADD(LOAD(out + i * ld), sum[i][0]);                                            \
        sum[i][1] = ADD(LOAD(out + i * ld + (width)), sum[i][1]);                                  \
      }                                                                                            \
    }                                                                                              \
    _Pragma("GCC unroll 16") for (int i = 0; i < MR; i++) {                                        \
      STORE(out + i * ld, sum[i][0]);                                                              \
      STORE(out + i * ld + (width), sum[i][1]);                                                    \
    }                                                                                              \
  }

#ifdef __AVX512BF16__

typedef float word __attribute__((may_alias)); /* a pair of bfloat16 */
#define SUM_BF16(c, x, y) _mm512_dpbf16_ps(c, (__m512bh)(x), (__m512bh)(y))
TILE(tile_bf16, word, vector, LANES, _mm512_setzero_ps, _mm512_load_ps, _mm512_store_ps, _mm512_add_ps, _mm512_set1_ps,
     SUM_BF16)

void INIT(dc__kernel_table *table) {
  table->tile[DC__TILE_BF16] =
      (dc__tile){.fn = tile_bf16, .pack_rows = pack_rows, .pack_columns = pack_columns, .mr = MR, .nr = 2 * LANES};
}

#else

#define SUM_F32(c, x, y) F(fmadd_ps)(x, y, c)
#define SUM_F64(c, x, y) F(fmadd_pd)(x, y, c)
TILE(tile_f32, float, vector, LANES, F(setzero_ps), F(load_ps), F(store_ps), F(add_ps), F(set1_ps), SUM_F32)
TILE(tile_f64, double, vector_f64, LANES / 2, F(setzero_pd), F(load_pd), F(store_pd), F(add_pd), F(set1_pd), SUM_F64)

void INIT(dc__kernel_table *table) {
  table->tile[DC__TILE_F32] =
      (dc__tile){.fn = tile_f32, .pack_rows = pack_rows, .pack_columns = pack_columns, .mr = MR, .nr = 2 * LANES};
  table->tile[DC__TILE_F64] = (dc__tile){
      .fn = tile_f64, .pack_rows = pack_rows_wide, .pack_columns = dc__pack_columns_f64, .mr = MR, .nr = LANES};
}

#endif
