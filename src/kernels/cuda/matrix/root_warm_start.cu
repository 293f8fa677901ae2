/* Warm starts of roots on a device, beside their products; compiled without contraction. */
#include <math.h>

#include "kernels/cuda/matrix/matrix_view.h"
#include "kernels/cuda/matrix/root_warm_start_args.h"

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
