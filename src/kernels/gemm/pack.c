/* Packing of matrix operands: rows that run along k are transposed into the panels, others copied. 16-bit elements are
 * converted to float32 first, unless the tile takes them. */
#include "kernels/gemm/pack.h"

#include <string.h>

#include "kernels/elementwise/convert.h"

/* dst[p * panel + i] = src[i][p]. Eight rows at a time, so that a line of dst is written once. */
#define PACK_ROWS(name, word, loose)                                                                               \
  void name(void *dst, int64_t panel, const void *src, int64_t ld, int64_t rows, int64_t steps) {                  \
    word *to = dst;                                                                                                \
    for (int64_t i = 0; i < panel; i += 8) {                                                                       \
      const int64_t most = panel - i < 8 ? panel - i : 8;                                                          \
      for (int64_t p = 0; p < steps; p++) {                                                                        \
        for (int64_t r = i; r < i + most; r++) {                                                                   \
          to[p * panel + r] = r < rows ? ((const loose *)(const void *)((const char *)src + r * ld))[p] : (word)0; \
        }                                                                                                          \
      }                                                                                                            \
    }                                                                                                              \
  }

#define PACK_COLUMNS(name, word)                                                                                  \
  void name(void *dst, int64_t panel, int64_t steps, const void *src, int64_t ld, int64_t width, int64_t depth) { \
    for (int64_t i = 0; i < width; i += panel) {                                                                  \
      const int64_t part = width - i < panel ? width - i : panel;                                                 \
      for (int64_t p = 0; p < depth; p++) {                                                                       \
        word *to = (word *)dst + i * steps + p * panel;                                                           \
        memcpy(to, (const char *)src + p * ld + i * (int64_t)sizeof *to, (size_t)part * sizeof *to);              \
        for (int64_t r = part; r < panel; r++) {                                                                  \
          to[r] = 0;                                                                                              \
        }                                                                                                         \
      }                                                                                                           \
    }                                                                                                             \
  }

PACK_ROWS(dc__pack_rows_f32, float, dc__f32)
PACK_ROWS(dc__pack_rows_f64, double, dc__f64)
PACK_COLUMNS(dc__pack_columns_f32, float)
PACK_COLUMNS(dc__pack_columns_f64, double)

static const char *element(const dc__operand *operand, int64_t row, int64_t column) {
  return (const char *)operand->data + (row * operand->ld + column) * (int64_t)dc_dtype_size(operand->dtype);
}

typedef struct pack_task {
  const dc__tile *tile;
  int64_t panel;
  const dc__operand *operand;
  bool converted; /* elements are converted to float32 */
} pack_task;

/* Maximum rows of a panel; rows across k, and their elements, that are converted at a time. */
enum { MOST_PANEL = 32, LINES = 8, LINE = 1024 };

/* Packs one panel from rows along k. */
static void rows_panel(const pack_task *t, char *dst, int64_t row, int64_t rows, int64_t k0, int64_t depth,
                       int64_t step) {
  const dc__operand *operand = t->operand;
  const char *src = element(operand, row, k0);
  int64_t ld = operand->ld * (int64_t)dc_dtype_size(operand->dtype);
  float lines[MOST_PANEL][DC__PACK_DEPTH];
  if (t->converted) {
    for (int64_t i = 0; i < rows; i++) {
      dc__cast(lines[i], DC_FLOAT32, src + i * ld, operand->dtype, depth);
    }
    src = (const char *)lines;
    ld = sizeof lines[0];
  }
  t->tile->pack_rows(dst, t->panel, src, ld, rows, depth / step);
  if (depth % step != 0) { /* the last word has half a pair */
    uint32_t *last = (uint32_t *)(void *)dst + depth / step * t->panel;
    memset(last, 0, (size_t)t->panel * sizeof *last);
    for (int64_t i = 0; i < rows; i++) {
      last[i] = *(const dc__half *)(const void *)(src + i * ld + (depth - 1) * 2);
    }
  }
}

/* Packs panels from rows across k, which are converted to float32 a few at a time. */
static void columns_converted(const pack_task *t, float *dst, int64_t first, int64_t width, int64_t k0, int64_t depth) {
  float lines[LINES][LINE];
  const int64_t most = LINE / t->panel * t->panel;
  for (int64_t i = 0; i < width; i += most) {
    const int64_t part = width - i < most ? width - i : most;
    for (int64_t p = 0; p < depth; p += LINES) {
      const int64_t some = depth - p < LINES ? depth - p : LINES;
      for (int64_t l = 0; l < some; l++) {
        dc__cast(lines[l], DC_FLOAT32, element(t->operand, k0 + p + l, first + i), t->operand->dtype, part);
      }
      t->tile->pack_columns(dst + i * depth + p * t->panel, t->panel, depth, lines, sizeof lines[0], part, some);
    }
  }
}

void dc__pack(void *dst, const dc__tile *tile, int32_t kind, int64_t panel, const dc__operand *operand, int64_t first,
              int64_t width, int64_t k0, int64_t depth) {
  const pack_task t = {.tile = tile,
                       .panel = panel,
                       .operand = operand,
                       .converted = kind == DC__TILE_F32 && operand->dtype != DC_FLOAT32};
  const int64_t step = dc__tile_depth(kind);
  const int64_t steps = (depth + step - 1) / step;
  if (operand->k_runs) {
    for (int64_t i = 0; i < width; i += panel) {
      const int64_t rows = width - i < panel ? width - i : panel;
      rows_panel(&t, (char *)dst + (size_t)(i * steps) * dc__tile_word(kind), first + i, rows, k0, depth, step);
    }
  } else if (t.converted) {
    columns_converted(&t, dst, first, width, k0, depth);
  } else {
    tile->pack_columns(dst, panel, steps, element(operand, k0, first),
                       operand->ld * (int64_t)dc_dtype_size(operand->dtype), width, depth);
  }
}

void dc__pack_a(void *dst, const dc__tile *tile, int32_t kind, const dc__operand *a, int64_t first, int64_t rows,
                int64_t k0, int64_t depth) {
  if (tile->pack_a == NULL) {
    dc__pack(dst, tile, kind, tile->mr, a, first, rows, k0, depth);
    return;
  }
  const int64_t step = dc__tile_depth(kind);
  const int64_t steps = (depth + step - 1) / step;
  for (int64_t i = 0; i < rows; i += tile->mr) {
    const char *src = a->k_runs ? element(a, first + i, k0) : element(a, k0, first + i);
    tile->pack_a((char *)dst + (size_t)(i * steps) * dc__tile_word(kind), src, a->ld * (int64_t)dc_dtype_size(a->dtype),
                 a->k_runs, rows - i < tile->mr ? rows - i : tile->mr, depth);
  }
}
