/* What the matrix operators do beside products, on a device: matrices read through their strides, measured, scaled and
 * written; the steps of Newton's iteration; Kronecker products. Numbers are computed in float64 and rounded to the
 * matrix's type, without contraction. A warp or a block has a row at a time. */
#include <math.h>

#include "kernels/cuda/gpu.h"

#include "kernels/cuda/matrix_view.h"

namespace {

enum { TILE = DC__CUDA_MATRIX_TILE };

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

DC_DEVICE int64_t *order_of(const dc__cuda_basis_args &args, int64_t matrix) {
  int64_t *order = *DC_MEMORY(args.orders + matrix, sizeof(void *), alignof(void *));
  return DC_MEMORY(order, args.n * 8, 8);
}
DC_DEVICE int32_t *found_of(const dc__cuda_basis_args &args, int64_t matrix) {
  return DC_MEMORY(args.found + 2 * matrix, 2 * sizeof *args.found, sizeof *args.found);
}

}  // namespace

DC_BLOCK_KERNEL(dc__measure_kernel, dc__cuda_measure_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  const view a = view_of(args.from, matrix);
  dc__cuda_matrix_stats *r = report(args.reports, matrix);
  uint64_t most = 0, apart = 0;
  for (int64_t i = first_row(); i < args.from.rows; i += next_row()) {
    for (int64_t j = dc_thread(); j < args.from.cols; j += dc_threads()) {
      const double low = a.at(i, j);
      most = larger(most, bits_of(low));
      if (args.mirrored && j < i) {
        const double high = a.at(j, i);
        apart = larger(apart, bits_of(low / 2 - high / 2));
      }
    }
  }
  raise(&r->most, most);
  raise(&r->apart, apart);
}

DC_KERNEL(dc__load_kernel, dc__cuda_load_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  if ((args.mask >> matrix & 1u) == 0) {
    return;
  }
  const view a = view_of(args.from, matrix), to = view_of(args.to, matrix);
  double first = 1, second = args.factor[matrix];
  if (args.unit > 0) {
    const double length = sqrt(report(args.reports, matrix)->fold);
    second = 1 / (length > args.unit ? length : args.unit);
  } else if (args.reports != nullptr) {
    const double most = of_bits(report(args.reports, matrix)->most);
    const int exponent = most > 0 && most <= 1.7976931348623157e308 ? -ilogb(most) : 0;
    first = ldexp(1.0, exponent / 2);
    second = ldexp(1.0, exponent - exponent / 2);
  }
  const bool symmetric = args.low + args.high != 0;
  const double low = args.low * first, high = args.high * first;
  for (int64_t i = first_row(); i < args.to.rows; i += next_row()) {
    for (int64_t j = dc_thread(); j < args.to.cols; j += dc_threads()) {
      double x;
      if (symmetric) {
        const int64_t down = i > j ? i : j, across = i > j ? j : i;
        x = a.at(down, across) * low + (high != 0 ? a.at(across, down) * high : 0);
      } else {
        x = a.at(i, j) * first;
      }
      put(const_cast<void *>(to.data), to.wide, i * to.row_stride + j * to.col_stride, x * second);
    }
  }
}

/* Of each row, by a warp. */
DC_BLOCK_KERNEL(dc__row_sums_kernel, dc__cuda_matrix_norm_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  const view a = view_of(args.from, matrix);
  double *sums = device_array(args.sums + matrix * args.from.rows, 1, args.from.rows);
  const int64_t warps = dc_threads() / DC_WARP;
  for (int64_t i = first_row() * warps + dc_thread() / DC_WARP; i < args.from.rows; i += next_row() * warps) {
    double sum = 0;
    for (int64_t j = dc_thread() % DC_WARP; j < args.from.cols; j += DC_WARP) {
      const double x = a.at(i, j);
      sum += args.squares ? x * x : fabs(x);
    }
    sum = sum_of_warp(sum);
    if (dc_thread() % DC_WARP == 0) {
      sums[i] = sum;
    }
  }
}

/* Of each matrix, by one warp. */
DC_BLOCK_KERNEL(dc__matrix_norm_kernel, dc__cuda_matrix_norm_args, DC_WARP) {
  const int32_t matrix = static_cast<int32_t>(dc_block());
  const double *sums = device_array(args.sums + matrix * args.from.rows, 1, args.from.rows);
  double all = 0;
  for (int64_t i = dc_thread(); i < args.from.rows; i += DC_WARP) {
    all = args.squares ? all + sums[i] : fmax(all, sums[i]);
  }
  for (uint32_t step = DC_WARP / 2; step > 0; step /= 2) {
    const double other = dc_shuffle_xor(all, step);
    all = args.squares ? all + other : fmax(all, other);
  }
  if (dc_thread() == 0) {
    report(args.reports, matrix)->fold = all;
  }
}

DC_KERNEL(dc__affine_kernel, dc__cuda_affine_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  const bool ended = args.reports != nullptr && report(args.reports, matrix)->newton.end != DC__NEWTON_CONTINUES;
  const double factor = args.factor[matrix], shift = ended ? 1 : args.shift[matrix];
  const int64_t count = args.count * args.rows * args.cols, base = matrix * args.rows * args.cols;
  const void *from = device_array(args.from, args.wide, count);
  void *to = device_array(args.to, args.wide, count);
  for (int64_t i = first_row(); i < args.rows; i += next_row()) {
    for (int64_t j = dc_thread(); j < args.cols; j += dc_threads()) {
      const int64_t at = base + i * args.cols + j;
      put(to, args.wide, at, ended ? 0 : factor * get(from, args.wide, at));
      if (i == j) {
        put(to, args.wide, at, get(to, args.wide, at) + shift);
      }
    }
  }
}

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
  uint64_t most = 0;
  for (int64_t row = dc_thread() / TILE; row < TILE; row += dc_threads() / TILE) {
    const int64_t i = i0 + row, j = j0 + column;
    if (i < n && j <= i) {
      const double x = get(m, args.wide, i * n + j);
      most = larger(most, bits_of(x - (i == j ? 1 : 0)));
      tile[row][column] = x;
    }
  }
  raise(&r->distance, most);
  dc_sync();
  for (int64_t row = dc_thread() / TILE; row < TILE; row += dc_threads() / TILE) {
    const int64_t i = i0 + column, j = j0 + row; /* where it came from */
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

DC_KERNEL(dc__scale_kernel, dc__cuda_scale_args, DC__CUDA_MATRIX_THREADS) {
  const int64_t matrix = static_cast<int64_t>(dc_block(1)) * args.rows;
  void *x = device_array(args.x, args.wide, args.count * args.rows * args.cols);
  const double *factors = device_array(args.factors, 1, args.count * args.rows);
  for (int64_t i = first_row(); i < args.rows; i += next_row()) {
    for (int64_t j = dc_thread(); j < args.cols; j += dc_threads()) {
      const int64_t at = (matrix + i) * args.cols + j;
      put(x, args.wide, at, factors[matrix + i] * get(x, args.wide, at));
    }
  }
}

DC_KERNEL(dc__warm_start_residual_kernel, dc__cuda_warm_start_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  const int64_t n = args.n, count = args.count * n * n, base = matrix * n * n;
  const void *b = device_array(args.from, args.wide, count);
  void *to = device_array(args.to, args.to_wide, count);
  const double *inverse = device_array(args.factors, 1, args.count * n) + matrix * n;
  for (int64_t i = first_row(); i < n; i += next_row()) {
    for (int64_t j = dc_thread(); j < n; j += dc_threads()) {
      const int64_t down = i > j ? i : j, across = i > j ? j : i;
      const double x = get(b, args.wide, base + down * n + across) * args.first[matrix] * args.second[matrix];
      put(to, args.to_wide, base + i * n + j, i == j ? 0 : x * inverse[down] * inverse[across]);
    }
  }
}

DC_KERNEL(dc__warm_start_root_kernel, dc__cuda_warm_start_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  const int64_t n = args.n, count = args.count * n * n, base = matrix * n * n;
  const void *b = device_array(args.from, args.wide, count);
  void *to = device_array(args.to, args.to_wide, count);
  const double *y = device_array(args.factors, 1, args.count * n) + matrix * n;
  for (int64_t i = first_row(); i < n; i += next_row()) {
    for (int64_t j = dc_thread(); j < n; j += dc_threads()) {
      double g = j == i ? 1 / sqrt(y[i]) : 0;
      if (j < i) {
        double sum = 1, power = 1;
        for (int32_t k = 1; k < args.root; k++) { /* Horner in y[i], with the powers of y[j] */
          power *= y[j];
          sum = sum * y[i] + power;
        }
        const double x = get(b, args.wide, base + i * n + j) * args.first[matrix] * args.second[matrix];
        g = -x / (y[i] * sqrt(y[j]) * sum);
      }
      put(to, args.to_wide, base + i * n + j, g);
    }
  }
}

/* Of each vector, by a warp. */
DC_BLOCK_KERNEL(dc__basis_values_kernel, dc__cuda_basis_args, DC__CUDA_MATRIX_THREADS) {
  const int64_t n = args.n, matrix = dc_block(1), warps = dc_threads() / DC_WARP;
  const float *q = device_array(args.q + matrix * n * n, 0, n * n),
              *p = device_array(args.p + matrix * n * n, 0, n * n);
  double *values = device_array(args.values + matrix * n, 1, n);
  for (int64_t i = first_row() * warps + dc_thread() / DC_WARP; i < n; i += next_row() * warps) {
    double sum = 0;
    for (int64_t j = dc_thread() % DC_WARP; j < n; j += DC_WARP) {
      sum += static_cast<double>(q[i * n + j]) * static_cast<double>(p[i * n + j]);
    }
    sum = sum_of_warp(sum);
    if (dc_thread() % DC_WARP == 0) {
      values[i] = sum;
    }
  }
}

/* As orthogonal_iteration.c's sort(), by counting what comes first. */
DC_KERNEL(dc__basis_order_kernel, dc__cuda_basis_args, DC__CUDA_MATRIX_THREADS) {
  const int64_t n = args.n, matrix = dc_block(1);
  const double *values = device_array(args.values + matrix * n, 1, n);
  int64_t *order = order_of(args, matrix);
  for (int64_t k = dc_first(); k < n; k += dc_step()) {
    int64_t first = 0;
    bool finite = true;
    for (int64_t j = 0; j < n; j++) {
      first += values[j] > values[k] || (values[j] == values[k] && j < k);
      finite = finite && fabs(values[j]) <= 1.7976931348623157e308;
    }
    order[finite ? first : k] = k;
    if (k == 0) {
      int32_t *found = found_of(args, matrix);
      found[0] = found[1] = 1;
    }
  }
}

DC_KERNEL(dc__basis_sort_kernel, dc__cuda_basis_args, DC__CUDA_MATRIX_THREADS) {
  const int64_t n = args.n, matrix = dc_block(1);
  const float *p = device_array(args.p + matrix * n * n, 0, n * n);
  float *sorted = device_array(args.sorted + matrix * n * n, 0, n * n);
  const int64_t *order = order_of(args, matrix);
  for (int64_t i = first_row(); i < n; i += next_row()) {
    for (int64_t j = dc_thread(); j < n; j += dc_threads()) {
      sorted[i * n + j] = p[order[i] * n + j];
    }
  }
}

DC_KERNEL(dc__basis_store_kernel, dc__cuda_basis_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  const int64_t n = args.n;
  const float *sorted = device_array(args.sorted + matrix * n * n, 0, n * n);
  float *to =
      device_array(static_cast<float *>(*DC_MEMORY(args.to + matrix, sizeof(void *), alignof(void *))), 0, n * n);
  const int32_t *found = found_of(args, matrix);
  const bool good = (found[0] | found[1]) == 0 && of_bits(report(args.reports, matrix)->most) <= 3.4028234663852886e38;
  int64_t *order = order_of(args, matrix);
  for (int64_t i = first_row(); i < n; i += next_row()) {
    for (int64_t j = dc_thread(); j < n; j += dc_threads()) {
      if (good) {
        to[i * n + j] = sorted[j * n + i];
      } else if (i == 0) {
        order[j] = j;
      }
    }
  }
  if (dc_first() == 0) {
    *DC_MEMORY(args.failed + matrix, sizeof *args.failed, sizeof *args.failed) = !good;
  }
}

DC_KERNEL(dc__kron_kernel, dc__cuda_kron_args, DC__CUDA_MATRIX_THREADS) {
  const view a = view_of(args.a, 0), b = view_of(args.b, 0), to = view_of(args.to, 0);
  for (int64_t i = first_row(); i < args.to.rows; i += next_row()) {
    const int64_t up = i / args.b.rows, down = i % args.b.rows;
    for (int64_t j = dc_thread(); j < args.to.cols; j += dc_threads()) {
      const double left = a.at(up, j / args.b.cols), right = b.at(down, j % args.b.cols);
      put(const_cast<void *>(to.data), to.wide, i * to.row_stride + j, left * right);
    }
  }
}

DC_KERNEL(dc__damp_kernel, dc__cuda_damp_args, DC__CUDA_MATRIX_THREADS) {
  const int64_t rows = args.count * args.rows;
  void *x = device_array(args.x, args.wide, rows * args.cols);
  const void *a = device_array(args.a, args.wide, rows), *b = device_array(args.b, args.wide, args.count * args.cols);
  bool positive = true;
  for (int64_t i = first_row(); i < rows; i += next_row()) {
    for (int64_t j = dc_thread(); j < args.cols; j += dc_threads()) {
      const double other = get(b, args.wide, i / args.rows * args.cols + j);
      const double sum = get(a, args.wide, i) * other + args.damping;
      positive = positive && sum > 0;
      put(x, args.wide, i * args.cols + j, get(x, args.wide, i * args.cols + j) / sum);
    }
  }
  if (args.refused != nullptr && !positive) {
    dc_atomic_max(DC_MEMORY(args.refused, 8, 8), 1);
  }
}
