/* The matrix operators' shared work beside products on a device: matrices read through their strides, measured, scaled
 * and written. Numbers are computed in float64 and rounded to the matrix's type, without contraction. A warp or a block
 * has a row at a time. */
#include <math.h>

#include "kernels/cuda/matrix/matrix_view.h"

DC_BLOCK_KERNEL(dc__measure_kernel, dc__cuda_measure_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  const matrix_view a = matrix_view_of(args.from, matrix);
  dc__cuda_matrix_stats *r = report(args.reports, matrix);
  const bool symmetric = args.low + args.high != 0;
  uint64_t max_abs = 0, max_combined = 0, asymmetry = 0;
  for (int64_t i = first_row(); i < args.from.rows; i += next_row()) {
    for (int64_t j = dc_thread(); j < args.from.cols; j += dc_threads()) {
      const double low = a.at(i, j);
      max_abs = larger(max_abs, bits_of(low));
      if (symmetric && j <= i) {
        const double high = a.at(j, i);
        max_combined = larger(max_combined, bits_of(low * args.low + high * args.high));
        asymmetry = larger(asymmetry, bits_of(low / 2 - high / 2));
      }
    }
  }
  warp_atomic_max(&r->max_abs, max_abs);
  warp_atomic_max(&r->max_combined, max_combined);
  warp_atomic_max(&r->asymmetry, asymmetry);
}

DC_KERNEL(dc__load_kernel, dc__cuda_load_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  if ((args.mask >> matrix & 1u) == 0) {
    return;
  }
  const matrix_view a = matrix_view_of(args.from, matrix), to = matrix_view_of(args.to, matrix);
  const bool symmetric = args.low + args.high != 0;
  double first = 1, second = args.factor[matrix];
  if (args.unit > 0) {
    const double length = sqrt(report(args.reports, matrix)->norm);
    second = 1 / (length > args.unit ? length : args.unit);
  } else if (args.reports != nullptr) {
    const dc__cuda_matrix_stats *r = report(args.reports, matrix);
    const double largest = of_bits(symmetric && r->max_combined > 0 ? r->max_combined : r->max_abs);
    const int exponent = largest > 0 && largest <= 1.7976931348623157e308 ? -ilogb(largest) : 0;
    first = ldexp(1.0, exponent / 2);
    second = ldexp(1.0, exponent - exponent / 2);
  }
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

/* A row by a warp. */
DC_BLOCK_KERNEL(dc__row_sums_kernel, dc__cuda_matrix_norm_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  const matrix_view a = matrix_view_of(args.from, matrix);
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

/* A matrix by a warp. */
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
    report(args.reports, matrix)->norm = all;
  }
}

DC_KERNEL(dc__affine_kernel, dc__cuda_affine_args, DC__CUDA_MATRIX_THREADS) {
  const int32_t matrix = static_cast<int32_t>(dc_block(1));
  const bool converged = args.reports != nullptr && report(args.reports, matrix)->newton.end != DC__NEWTON_CONTINUES;
  const double factor = args.factor[matrix], shift = converged ? 1 : args.shift[matrix];
  const int64_t count = args.count * args.rows * args.cols, base = matrix * args.rows * args.cols;
  const void *from = device_array(args.from, args.wide, count);
  void *to = device_array(args.to, args.wide, count);
  for (int64_t i = first_row(); i < args.rows; i += next_row()) {
    for (int64_t j = dc_thread(); j < args.cols; j += dc_threads()) {
      const int64_t at = base + i * args.cols + j;
      put(to, args.wide, at, converged ? 0 : factor * get(from, args.wide, at));
      if (i == j) {
        put(to, args.wide, at, get(to, args.wide, at) + shift);
      }
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
