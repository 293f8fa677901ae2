/* Kronecker products on a device, and division by them; compiled without contraction. */
#include <math.h>

#include "kernels/cuda/matrix/kron_args.h"
#include "kernels/cuda/matrix/matrix_view.h"

DC_KERNEL(dc__kron_kernel, dc__cuda_kron_args, DC__CUDA_MATRIX_THREADS) {
  const matrix_view a = matrix_view_of(args.a, 0), b = matrix_view_of(args.b, 0), to = matrix_view_of(args.to, 0);
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
