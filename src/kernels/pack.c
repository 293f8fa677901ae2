/* Packing of matrix operands: rows that run along k are transposed into the panels, others copied. */
#include "kernels/pack.h"

#include <string.h>

#include "kernels/convert.h"

enum { CHUNK = 1024 }; /* elements converted at a time */

typedef uint32_t word32 __attribute__((may_alias));
typedef uint32_t loose32 DC__ANYWHERE;

static const void *element(const dc__operand *operand, int64_t row, int64_t column) {
  return (const char *)operand->data + (size_t)(row * operand->ld + column) * dc_dtype_size(operand->dtype);
}

/* dst[p * panel + i] = src[i][p]. Eight rows at a time, so that a line of dst is written once. */
static void transpose32(word32 *dst, int64_t panel, const loose32 *src, int64_t ld, int64_t rows, int64_t steps) {
  int64_t i = 0;
  for (; i + 8 <= rows; i += 8) {
    const loose32 *s = src + i * ld;
    for (int64_t p = 0; p < steps; p++) {
      word32 *d = dst + p * panel + i;
      for (int64_t r = 0; r < 8; r++) {
        d[r] = s[r * ld + p];
      }
    }
  }
  for (; i < rows; i++) {
    for (int64_t p = 0; p < steps; p++) {
      dst[p * panel + i] = src[i * ld + p];
    }
  }
}

static void rows_f64(double *dst, int64_t panel, const dc__f64 *src, int64_t ld, int64_t rows, int64_t steps) {
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t p = 0; p < steps; p++) {
      dst[p * panel + i] = src[i * ld + p];
    }
  }
}

/* 16-bit rows as float32. */
static void rows_converted(word32 *dst, int64_t panel, const dc__operand *operand, int64_t row, int64_t rows,
                           int64_t k0, int64_t depth) {
  float line[CHUNK];
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t p0 = 0; p0 < depth; p0 += CHUNK) {
      int64_t part = depth - p0 < CHUNK ? depth - p0 : CHUNK;
      dc__cast(line, DC_FLOAT32, element(operand, row + i, k0 + p0), operand->dtype, part);
      for (int64_t p = 0; p < part; p++) {
        dst[(p0 + p) * panel + i] = dc__bits_of_f32(line[p]);
      }
    }
  }
}

/* Rows of bfloat16: a pair is a word as it lies. An odd last element gets a zero beside it. */
static void rows_bf16(word32 *dst, int64_t panel, const dc__operand *operand, int64_t row, int64_t rows, int64_t k0,
                      int64_t depth) {
  if (operand->ld % 2 == 0) {
    transpose32(dst, panel, element(operand, row, k0), operand->ld / 2, rows, depth / 2);
  } else {
    for (int64_t i = 0; i < rows; i++) {
      transpose32(dst + i, panel, element(operand, row + i, k0), 0, 1, depth / 2);
    }
  }
  if (depth % 2 != 0) {
    for (int64_t i = 0; i < rows; i++) {
      dst[depth / 2 * panel + i] = *(const dc__half *)element(operand, row + i, k0 + depth - 1);
    }
  }
}

static void pack_rows(void *dst, int32_t tile, int64_t panel, const dc__operand *operand, int64_t row, int64_t rows,
                      int64_t k0, int64_t depth) {
  if (tile == DC__TILE_F64) {
    rows_f64(dst, panel, element(operand, row, k0), operand->ld, rows, depth);
  } else if (tile == DC__TILE_BF16) {
    rows_bf16(dst, panel, operand, row, rows, k0, depth);
  } else if (operand->dtype == DC_FLOAT32) {
    transpose32(dst, panel, element(operand, row, k0), operand->ld, rows, depth);
  } else {
    rows_converted(dst, panel, operand, row, rows, k0, depth);
  }
}

/* One step of all panels: line is `width` words. */
static void spread(char *dst, size_t word, int64_t panel, int64_t steps, int64_t step, const void *line,
                   int64_t width) {
  const char *from = line;
  for (int64_t i = 0; i < width; i += panel) {
    int64_t part = width - i < panel ? width - i : panel;
    memcpy(dst + (size_t)((i * steps) + step * panel) * word, from + (size_t)i * word, (size_t)part * word);
  }
}

static void pack_columns(void *dst, int32_t tile, int64_t panel, const dc__operand *operand, int64_t first,
                         int64_t width, int64_t k0, int64_t depth) {
  int64_t step = dc__tile_depth(tile);
  int64_t steps = (depth + step - 1) / step;
  size_t word = dc__tile_word(tile);
  for (int64_t p = 0; p < depth; p += step) {
    for (int64_t i = 0; i < width; i += CHUNK / panel * panel) {
      int64_t most = CHUNK / panel * panel;
      int64_t part = width - i < most ? width - i : most;
      const void *line = element(operand, k0 + p, first + i);
      float converted[CHUNK];
      if (tile == DC__TILE_BF16) {
        const dc__half *low = line;
        const dc__half *high = p + 1 < depth ? element(operand, k0 + p + 1, first + i) : NULL;
        for (int64_t c = 0; c < part; c++) {
          converted[c] = dc__f32_of_bits(low[c] | (high != NULL ? (uint32_t)high[c] << 16 : 0u));
        }
        line = converted;
      } else if (tile == DC__TILE_F32 && operand->dtype != DC_FLOAT32) {
        dc__cast(converted, DC_FLOAT32, line, operand->dtype, part);
        line = converted;
      }
      spread((char *)dst + (size_t)(i * steps) * word, word, panel, steps, p / step, line, part);
    }
  }
}

void dc__pack(void *dst, int32_t tile, int64_t panel, const dc__operand *operand, int64_t first, int64_t width,
              int64_t k0, int64_t depth) {
  size_t word = dc__tile_word(tile);
  int64_t steps = (depth + dc__tile_depth(tile) - 1) / dc__tile_depth(tile);
  if (width % panel != 0) {
    memset((char *)dst + (size_t)(width / panel * panel * steps) * word, 0, (size_t)(panel * steps) * word);
  }
  if (!operand->k_runs) {
    pack_columns(dst, tile, panel, operand, first, width, k0, depth);
    return;
  }
  for (int64_t i = 0; i < width; i += panel) {
    int64_t rows = width - i < panel ? width - i : panel;
    pack_rows((char *)dst + (size_t)(i * steps) * word, tile, panel, operand, first + i, rows, k0, depth);
  }
}
