/* Gradients per sample beside their products, on a device: sums over positions and over samples, squares of norms, a
 * convolution's patches. Sums are made in float64, each in one order. A warp has a row at a time, or a thread a
 * column. */
#include <math.h>

#include "kernels/cuda/float_access.h"
#include "kernels/cuda/per_sample/per_sample_args.h"

namespace {

/* Rows of this warp: the first, and how far to the next. */
DC_DEVICE int64_t first_of_warp() {
  return dc_first() / DC_WARP;
}
DC_DEVICE int64_t warps() {
  return dc_step() / DC_WARP;
}
DC_DEVICE int64_t lane() {
  return dc_thread() % DC_WARP;
}

/* `count` doubles of the device; NULL stays NULL. */
template <typename T>
DC_DEVICE T *doubles(T *data, int64_t count) {
  return data == nullptr ? data : device_array(data, 1, count);
}

/* Elements of float64, float32, or 16 bits. */
template <typename T>
DC_DEVICE T *elements(T *data, int32_t wide, int64_t count) {
  return wide < 0 ? static_cast<T *>(DC_MEMORY(data, count * 2, 2)) : device_array(data, wide, count);
}

DC_DEVICE double before(bool adds, const void *data, int32_t wide, int64_t i) {
  return adds ? get(data, wide, i) : 0;
}

}  // namespace

DC_BLOCK_KERNEL(dc__statistics_kernel, dc__cuda_statistics_args, DC__CUDA_THREADS) {
  const void *x = device_array(args.x, args.wide, args.rows * args.width);
  double *means = doubles(args.mean, args.rows), *rates = doubles(args.rstd, args.rows);
  const double width = static_cast<double>(args.width);
  for (int64_t row = first_of_warp(); row < args.rows; row += warps()) {
    double sum = 0, square = 0;
    for (int64_t i = lane(); i < args.width && args.centred; i += DC_WARP) {
      sum += get(x, args.wide, row * args.width + i);
    }
    const double mean = sum_of_warp(sum) / width;
    for (int64_t i = lane(); i < args.width; i += DC_WARP) {
      const double off = get(x, args.wide, row * args.width + i) - mean;
      square += off * off;
    }
    square = sum_of_warp(square) / width;
    if (lane() == 0) {
      means[row] = mean;
      rates[row] = 1 / sqrt(square + args.eps);
    }
  }
}

/* A column by a thread: neighbouring threads read neighbouring elements. */
DC_KERNEL(dc__columns_kernel, dc__cuda_columns_args, DC__CUDA_THREADS) {
  const int64_t count = args.samples * args.columns, num_positions = args.samples * args.positions;
  const void *delta = device_array(args.delta, args.wide, count * args.positions);
  const void *x = args.x == nullptr ? args.x : device_array(args.x, args.wide, count * args.positions);
  const double *mean = doubles(args.mean, num_positions), *rstd = doubles(args.rstd, num_positions);
  double *sums = doubles(args.sums, count);
  for (int64_t at = dc_first(); at < count; at += dc_step()) {
    const int64_t first = at / args.columns * args.positions;
    double sum = 0;
    for (int64_t t = 0; t < args.positions; t++) {
      const int64_t i = (first + t) * args.columns + at % args.columns;
      const double hat = x == nullptr ? 1 : (get(x, args.wide, i) - mean[first + t]) * rstd[first + t];
      sum += get(delta, args.wide, i) * hat;
    }
    sums[at] = sum;
  }
}

/* A column, whose positions are contiguous, by a warp. */
DC_BLOCK_KERNEL(dc__channels_kernel, dc__cuda_columns_args, DC__CUDA_THREADS) {
  const int64_t count = args.samples * args.columns, groups = args.x == nullptr ? 0 : count / args.group;
  const void *delta = device_array(args.delta, args.wide, count * args.positions);
  const void *x = args.x == nullptr ? args.x : device_array(args.x, args.wide, count * args.positions);
  const double *mean = doubles(args.mean, groups), *rstd = doubles(args.rstd, groups);
  double *sums = doubles(args.sums, count);
  for (int64_t at = first_of_warp(); at < count; at += warps()) {
    double sum = 0;
    for (int64_t t = lane(); t < args.positions; t += DC_WARP) {
      const int64_t i = at * args.positions + t;
      const double hat = x == nullptr ? 1 : (get(x, args.wide, i) - mean[at / args.group]) * rstd[at / args.group];
      sum += get(delta, args.wide, i) * hat;
    }
    sum = sum_of_warp(sum);
    if (lane() == 0) {
      sums[at] = sum;
    }
  }
}

DC_BLOCK_KERNEL(dc__dots_kernel, dc__cuda_dots_args, DC__CUDA_THREADS) {
  const void *a = device_array(args.a, args.wide, args.rows * args.columns);
  const void *b = device_array(args.b, args.wide, args.rows * args.columns);
  double *sums = doubles(args.sums, (args.rows - 1) * args.step + 1);
  for (int64_t row = first_of_warp(); row < args.rows; row += warps()) {
    double sum = 0;
    for (int64_t i = row * args.columns + lane(); i < (row + 1) * args.columns; i += DC_WARP) {
      sum += get(a, args.wide, i) * get(b, args.wide, i);
    }
    sum = sum_of_warp(sum);
    if (lane() == 0) {
      sums[row * args.step] = sum;
    }
  }
}

DC_BLOCK_KERNEL(dc__totals_kernel, dc__cuda_totals_args, DC__CUDA_THREADS) {
  const double *sums = doubles(args.sums, args.count * args.rows);
  double *to = doubles(args.to, (args.count / args.group - 1) * args.step + args.group);
  for (int64_t at = first_of_warp(); at < args.count; at += warps()) {
    double sum = 0;
    for (int64_t row = lane(); row < args.rows; row += DC_WARP) {
      sum += sums[at * args.rows + row];
    }
    sum = sum_of_warp(sum);
    if (lane() == 0) {
      to[at / args.group * args.step + at % args.group] += args.factor * sum;
    }
  }
}

DC_KERNEL(dc__squares_kernel, dc__cuda_squares_args, DC__CUDA_THREADS) {
  const double *parts = doubles(args.parts, args.samples * args.width);
  void *squares = device_array(args.squares, args.wide, args.samples);
  for (int64_t n = dc_first(); n < args.samples; n += dc_step()) {
    double sum = 0;
    for (int64_t i = 0; i < args.width; i++) {
      sum += parts[n * args.width + i];
    }
    /* Rounding may make it negative; NaN stays. */
    put(squares, args.wide, n, before(args.accumulate, squares, args.wide, n) + (sum < 0 ? 0 : sum));
  }
}

DC_KERNEL(dc__weighted_sum_kernel, dc__cuda_weighted_sum_args, DC__CUDA_THREADS) {
  const double *columns = doubles(args.columns, args.samples * args.count);
  const void *factors = args.factors == nullptr ? args.factors : device_array(args.factors, args.wide, args.samples);
  void *out = device_array(args.out, args.wide, args.count);
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    double sum = 0;
    for (int64_t n = 0; n < args.samples; n++) {
      const double factor = factors == nullptr ? 1 : get(factors, args.wide, n);
      sum += factor != 0 ? factor * columns[n * args.count + i] : 0;
    }
    put(out, args.wide, i, sum + before(args.accumulate, out, args.wide, i));
  }
}

DC_KERNEL(dc__clip_kernel, dc__cuda_clip_args, DC__CUDA_THREADS) {
  const void *squares = device_array(args.squares, args.wide, args.count);
  void *factors = device_array(args.factors, args.wide, args.count);
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    const double square = get(squares, args.wide, i);
    const bool finite = fabs(square) <= 1.7976931348623157e308; /* false for NaN */
    put(factors, args.wide, i, finite ? fmin(1.0, args.max_norm / (sqrt(square) + 1e-6)) : 0);
  }
}

/* The grid's axes are positions, a row, and a sample. */
DC_KERNEL(dc__im2col_kernel, dc__cuda_im2col_args, DC__CUDA_THREADS) {
  const int64_t kernel_size = args.kernel[0] * args.kernel[1] * args.kernel[2], rows = args.channels * kernel_size;
  const int64_t pixels = args.size[0] * args.size[1] * args.size[2];
  const int64_t positions = args.size_out[0] * args.size_out[1] * args.size_out[2];
  const void *from = pixels == 0 ? args.from : elements(args.from, args.wide, args.samples * args.channels * pixels);
  const void *factors = args.factors == nullptr ? args.factors : device_array(args.factors, args.wide, args.samples);
  void *to = elements(args.to, args.wide, (args.samples - 1) * args.step + (rows - 1) * args.pitch + positions);
  for (int64_t n = dc_block(2); n < args.samples; n += dc_blocks(2)) {
    const double factor = factors == nullptr ? 1 : get(factors, args.wide, n);
    for (int64_t row = dc_block(1); row < rows; row += dc_blocks(1)) {
      const int64_t channel = n * args.channels + row / kernel_size, tap = row % kernel_size;
      const int64_t k[3] = {tap / (args.kernel[1] * args.kernel[2]), tap / args.kernel[2] % args.kernel[1],
                            tap % args.kernel[2]};
      for (int64_t p = dc_first(); p < positions; p += dc_step()) {
        const int64_t o[3] = {p / (args.size_out[1] * args.size_out[2]), p / args.size_out[2] % args.size_out[1],
                              p % args.size_out[2]};
        int64_t at = channel;
        bool in_bounds = factor != 0;
        DC_UNROLL
        for (int d = 0; d < 3; d++) {
          const int64_t i = o[d] * args.stride[d] - args.padding[d] + k[d] * args.dilation[d];
          in_bounds = in_bounds && i >= 0 && i < args.size[d];
          at = at * args.size[d] + i;
        }
        const int64_t to_index = n * args.step + row * args.pitch + p;
        if (args.wide < 0) {
          static_cast<uint16_t *>(to)[to_index] = in_bounds ? static_cast<const uint16_t *>(from)[at] : 0;
          continue;
        }
        const double x = in_bounds ? get(from, args.wide, at) : 0;
        put(to, args.wide, to_index, args.scaled ? factor * x : x);
      }
    }
  }
}
