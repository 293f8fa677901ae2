/* In kernels: matrices through their strides, and maxima of magnitudes. */
#ifndef DC_KERNELS_CUDA_MATRIX_VIEW_H
#define DC_KERNELS_CUDA_MATRIX_VIEW_H

#include <math.h>

#include "kernels/cuda/float_access.h"
#include "kernels/cuda/matrix/matrix_args.h"

namespace {

/* One matrix through its strides, of any sign. */
struct matrix_view {
  const void *data;
  int64_t row_stride, col_stride;
  int32_t wide;
  DC_MEMBER double at(int64_t i, int64_t j) const {
    return get(data, wide, i * row_stride + j * col_stride);
  }
};
DC_DEVICE matrix_view matrix_view_of(const dc__cuda_matrices &m, int32_t matrix) {
  const int64_t size = m.wide ? 8 : 4, down = (m.rows - 1) * m.row_stride, right = (m.cols - 1) * m.col_stride;
  const int64_t below = (down < 0 ? down : 0) + (right < 0 ? right : 0);
  const int64_t above = (down > 0 ? down : 0) + (right > 0 ? right : 0);
  (void)above;
  char *first = static_cast<char *>(m.data) + matrix * m.batch_stride * size;
  if (m.pointers != nullptr) {
    first = static_cast<char *>(*DC_MEMORY(m.pointers + matrix, sizeof(void *), alignof(void *)));
  }
  char *lowest = first + below * size;
  lowest = DC_MEMORY(lowest, (above - below + 1) * size, static_cast<size_t>(size));
  return {lowest - below * size, m.row_stride, m.col_stride, m.wide};
}

DC_DEVICE uint64_t bits_of(double x) {
  union {
    double value;
    uint64_t bits;
  } both = {fabs(x)};
  return both.bits;
}
DC_DEVICE double of_bits(uint64_t bits) {
  union {
    uint64_t bits;
    double value;
  } both = {bits};
  return both.value;
}

DC_DEVICE uint64_t larger(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

/* Raises *at to the largest value of a warp. */
DC_DEVICE void warp_atomic_max(uint64_t *at, uint64_t value) {
  for (uint32_t step = DC_WARP / 2; step > 0; step /= 2) {
    value = larger(value, dc_shuffle_xor(value, step));
  }
  if (dc_thread() % DC_WARP == 0) {
    dc_atomic_max(at, value);
  }
}

DC_DEVICE dc__cuda_matrix_stats *report(dc__cuda_matrix_stats *reports, int32_t matrix) {
  return DC_MEMORY(reports + matrix, sizeof *reports, alignof(dc__cuda_matrix_stats));
}
DC_DEVICE const dc__cuda_matrix_stats *report(const dc__cuda_matrix_stats *reports, int32_t matrix) {
  return DC_MEMORY(reports + matrix, sizeof *reports, alignof(dc__cuda_matrix_stats));
}

/* Rows of this block, or of its warps: first, and how far to the next. */
DC_DEVICE int64_t first_row() {
  return static_cast<int64_t>(dc_block());
}
DC_DEVICE int64_t next_row() {
  return static_cast<int64_t>(dc_blocks());
}

}  // namespace

#endif
