/* A step of orthogonal iteration on a device, beside its product and QR; compiled without contraction. */
#include <math.h>

#include "kernels/cuda/matrix/matrix_view.h"
#include "kernels/cuda/matrix/orthogonal_iteration_args.h"

namespace {

DC_DEVICE int64_t *order_of(const dc__cuda_basis_args &args, int64_t matrix) {
  int64_t *order = *DC_MEMORY(args.orders + matrix, sizeof(void *), alignof(void *));
  return DC_MEMORY(order, args.n * 8, 8);
}
DC_DEVICE int32_t *found_of(const dc__cuda_basis_args &args, int64_t matrix) {
  return DC_MEMORY(args.found + 2 * matrix, 2 * sizeof *args.found, sizeof *args.found);
}

}  // namespace

/* A vector by a warp. */
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

/* The order of sort() in orthogonal_iteration.c, by counting the preceding vectors. */
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
  const bool good =
      (found[0] | found[1]) == 0 && of_bits(report(args.reports, matrix)->max_abs) <= 3.4028234663852886e38;
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
