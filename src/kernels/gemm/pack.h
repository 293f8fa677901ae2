/* Packing of matrix operands into the panels that the tiles read (dc__tile in dispatch.h). */
#ifndef DC_KERNELS_PACK_H
#define DC_KERNELS_PACK_H

#include "kernels/dispatch.h"

/* An operand as a [width, k] matrix: the rows of op(A), or the columns of op(B). */
typedef struct dc__operand {
  const void *data;
  int64_t ld;
  int32_t dtype;
  bool k_runs; /* neighbours in k are neighbours in memory */
} dc__operand;

/* Elements in k that one word of a tile holds. */
static inline int64_t dc__tile_depth(int32_t kind) {
  return kind == DC__TILE_BF16 ? 2 : 1;
}
static inline size_t dc__tile_word(int32_t kind) {
  return kind == DC__TILE_F64 ? sizeof(double) : sizeof(float);
}

/* Packs elements [first, first + width) x [k0, k0 + depth) into panels of `panel` words by `steps`, one after the
 * other. Words beyond width in the last panel, and elements past depth, become 0. depth is at most DC__PACK_DEPTH. */
enum { DC__PACK_DEPTH = 512 };
void dc__pack(void *dst, const dc__tile *tile, int32_t kind, int64_t panel, const dc__operand *operand, int64_t first,
              int64_t width, int64_t k0, int64_t depth);

/* The same for op(A), whose panels may have a layout of their own. */
void dc__pack_a(void *dst, const dc__tile *tile, int32_t kind, const dc__operand *a, int64_t first, int64_t rows,
                int64_t k0, int64_t depth);

#endif
