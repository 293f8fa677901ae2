/* The matrix product of bfloat16 with AMX: 32 by 32 sums in four tiles, from two tiles of A and two of B of 16 words of
 * k each. B's panels are those of gemm_vector.h; A's are pieces of 16 words in k, each [MR][16] dense, the last one
 * narrower. Narrower pieces are padded with zeros on the stack: that costs less than changing the tiles' shape.
 * Denormals count as zeros, as in AVX-512's bfloat16 products. */
#include <immintrin.h>
#include <string.h>

#include "kernels/dispatch.h"

enum { MR = 32, NR = 32, LANES = 16 };
enum { AHEAD = 2 }; /* pieces by which A is prefetched: it comes from the second-level cache */

#include "kernels/x86/gemm/pack_vector.h"

/* Configures all eight tiles with 16 rows of 64 bytes. */
static void amx_begin(void) {
  static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&shape);
}

static void amx_end(void) {
  _tile_release();
}

/* x: [MR][16] words; y: [16][NR]. */
PACK_INLINE void multiply(const uint32_t *x, const uint32_t *y) {
  _tile_loadd(4, x, 64);
  _tile_loadd(6, y, 4 * NR);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, y + LANES, 4 * NR);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, x + LANES * LANES, 64);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

static void multiply_rest(const uint32_t *x, const uint32_t *y, int64_t rest) {
  _Alignas(64) uint32_t wide[MR][LANES], tall[LANES][NR] = {{0}};
  for (int64_t i = 0; i < MR; i++) {
    _mm512_store_si512(wide[i], load_lanes(x + i * rest, rest));
  }
  memcpy(tall, y, (size_t)rest * sizeof tall[0]);
  __asm__ volatile("" ::: "memory"); /* compilers do not see that tiles read memory */
  multiply(wide[0], tall[0]);
}

static void tile_bf16(int64_t steps, const void *a, const void *b, void *acc, int64_t ld, bool add) {
  const uint32_t *x = a, *y = b;
  float *sums = acc, *below = sums + LANES * ld;
  const int64_t rest = steps % LANES;
  if (add) {
    _tile_loadd(0, sums, 4 * ld);
    _tile_loadd(1, sums + LANES, 4 * ld);
    _tile_loadd(2, below, 4 * ld);
    _tile_loadd(3, below + LANES, 4 * ld);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t p = 0; p + LANES <= steps; p += LANES, x += MR * LANES, y += NR * LANES) {
    _Pragma("GCC unroll 32") for (int64_t i = 0; i < MR; i++) {
      __builtin_prefetch(x + (AHEAD * MR + i) * LANES);
    }
    multiply(x, y);
  }
  if (rest != 0) {
    multiply_rest(x, y, rest);
  }
  _tile_stored(0, sums, 4 * ld);
  _tile_stored(1, sums + LANES, 4 * ld);
  _tile_stored(2, below, 4 * ld);
  _tile_stored(3, below + LANES, 4 * ld);
}

/* ---- A ---- */

/* Loads a piece of a row that runs along k. */
PACK_INLINE lanes load_pairs(const char *src, int64_t elements) {
  const __mmask32 some = elements >= 2 * LANES ? 0xffffffffu : (1u << elements) - 1u;
  return _mm512_maskz_loadu_epi16(some, src);
}

static void pack_rows_of_a(uint32_t *to, const char *src, int64_t ld, int64_t rows, int64_t depth) {
  for (int64_t k = 0; k < depth; k += 2 * LANES) {
    const int64_t some = depth - k < 2 * LANES ? depth - k : 2 * LANES, words = (some + 1) / 2;
    for (int64_t i = 0; i < MR; i++, to += words) {
      store_lanes(to, words, i < rows ? load_pairs(src + i * ld + 2 * k, some) : ZERO_LANES());
    }
  }
}

static void pack_columns_of_a(uint32_t *to, const char *src, int64_t ld, int64_t rows, int64_t depth) {
  for (int64_t k = 0; k < depth; k += 2 * LANES) {
    const int64_t some = depth - k < 2 * LANES ? depth - k : 2 * LANES, words = (some + 1) / 2;
    for (int64_t first = 0; first < MR; first += LANES) {
      lanes r[LANES];
      for (int64_t p = 0; p < LANES; p++) {
        r[p] = p < words ? load_step(src + k * ld, ld, p, some, first, rows - first) : ZERO_LANES();
      }
      transpose(r);
      for (int64_t i = 0; i < LANES; i++, to += words) {
        store_lanes(to, words, r[i]);
      }
    }
  }
}

static void pack_a(void *dst, const void *src, int64_t ld, bool k_runs, int64_t rows, int64_t depth) {
  if (k_runs) {
    pack_rows_of_a(dst, src, ld, rows, depth);
  } else {
    pack_columns_of_a(dst, src, ld, rows, depth);
  }
}

void dc__gemm_amx(dc__kernel_table *table) {
  table->tile[DC__TILE_BF16] = (dc__tile){.fn = tile_bf16,
                                          .pack_rows = pack_rows,
                                          .pack_columns = pack_columns,
                                          .mr = MR,
                                          .nr = NR,
                                          .pack_a = pack_a,
                                          .begin = amx_begin,
                                          .end = amx_end};
}
