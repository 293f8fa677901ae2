/* The steps of Newton's iteration on a device, beside its products; compiled without contraction. */
#include <math.h>

#include "kernels/cuda/matrix/inverse_root_newton_args.h"
#include "kernels/cuda/matrix/matrix_view.h"

namespace {

enum { TILE = DC__CUDA_MATRIX_TILE };

}  // namespace

/* A tile of m's lower triangle. */
DC_BLOCK_KERNEL(dc__newton_distance_kernel, dc__cuda_newton_args, DC__CUDA_TILE_THREADS) {
  DC_SHARED(double, tile, [TILE][TILE + 1]);
  const int32_t matrix = static_cast<int32_t>(dc_block(2));
  const int64_t j0 = static_cast<int64_t>(dc_block(0)) * TILE, i0 = static_cast<int64_t>(dc_block(1)) * TILE;
  dc__cuda_matrix_stats *r = report(args.reports, matrix);
  if (j0 > i0 || (r->newton.end != DC__NEWTON_CONTINUES && !args.ended)) {
    return;
  }
  const int64_t n = args.n, column = dc_thread() % TILE;
  char *matrices = static_cast<char *>(args.m);
  void *m = device_array(static_cast<void *>(matrices + matrix * n * n * (args.wide ? 8 : 4)), args.wide, n * n);
  uint64_t distance = 0;
  for (int64_t row = dc_thread() / TILE; row < TILE; row += dc_threads() / TILE) {
    const int64_t i = i0 + row, j = j0 + column;
    if (i < n && j <= i) {
      const double x = get(m, args.wide, i * n + j);
      distance = larger(distance, bits_of(x - (i == j ? 1 : 0)));
      tile[row][column] = x;
    }
  }
  warp_atomic_max(&r->distance, distance);
  dc_sync();
  for (int64_t row = dc_thread() / TILE; row < TILE; row += dc_threads() / TILE) {
    const int64_t i = i0 + column, j = j0 + row; /* the transposed place */
    if (i < n && j < i) {
      put(m, args.wide, j * n + i, tile[column][row]);
    }
  }
}

DC_KERNEL(dc__newton_check_kernel, dc__cuda_newton_args, DC_WARP) {
  const int32_t matrix = static_cast<int32_t>(dc_thread());
  if (matrix >= args.count) {
    return;
  }
  dc__cuda_matrix_stats *r = report(args.reports, matrix);
  r->refused = 0;
  if (r->newton.end == DC__NEWTON_CONTINUES) {
    r->refused = !dc__newton_check_convergence(&r->newton, of_bits(r->distance),
                                               static_cast<int32_t>(args.rough >> matrix & 1u));
  }
  r->distance = 0;
}

DC_KERNEL(dc__newton_restore_kernel, dc__cuda_newton_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  if (!report(args.reports, matrix)->refused) {
    return;
  }
  const int64_t n = args.n, count = args.count * n * n;
  const void *x = device_array(args.x, args.wide, count);
  void *next = device_array(args.next, args.wide, count);
  for (int64_t i = first_row(); i < n; i += next_row()) {
    for (int64_t j = dc_thread(); j < n; j += dc_threads()) {
      const int64_t at = (matrix * n + i) * n + j;
      put(next, args.wide, at, get(x, args.wide, at));
    }
  }
}
