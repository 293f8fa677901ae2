/* The nearest Kronecker product on a device: a power iteration on the matrix of blocks, which is never written out.
 * Sums are made in float64, each in one order. A step after the end of the iteration does nothing. */
#include "kernels/cuda/matrix/kron_nearest_args.h"
#include "kernels/cuda/matrix/matrix_view.h"

namespace {

enum { THREADS = DC__CUDA_MATRIX_THREADS, BLOCKS = DC__CUDA_NEAREST_BLOCKS };

/* The vector that the step computes. */
struct step_vector {
  int64_t count;
  int32_t chunks;
  double *x;
};
DC_DEVICE step_vector step_vector_of(const dc__cuda_nearest_args &args) {
  const int64_t outer = args.m * args.n, inner = args.p * args.q;
  return args.inner ? step_vector{inner, args.chunks[0], device_array(args.v, 1, inner)}
                    : step_vector{outer, args.chunks[1], device_array(args.u, 1, outer)};
}
DC_DEVICE dc__cuda_nearest_result *result_of(const dc__cuda_nearest_args &args) {
  return DC_MEMORY(args.result, sizeof *args.result, alignof(dc__cuda_nearest_result));
}
DC_DEVICE bool continues(const dc__cuda_nearest_args &args) {
  return dc__nearest_continues(&result_of(args)->state);
}

/* Rows [begin, end) of a chunk. */
DC_DEVICE int64_t begin_of(int64_t rows, int64_t chunk, int32_t chunks) {
  return rows * chunk / chunks;
}

/* The same in every thread of the block. */
DC_DEVICE double sum_of_block(double x, double (&sums)[THREADS / DC_WARP]) {
  x = sum_of_warp(x);
  dc_sync(); /* all threads have read the last sum */
  if (dc_thread() % DC_WARP == 0) {
    sums[dc_thread() / DC_WARP] = x;
  }
  dc_sync();
  double all = 0;
  for (uint32_t w = 0; w < dc_threads() / DC_WARP; w++) {
    all += sums[w];
  }
  return all;
}

}  // namespace

DC_KERNEL(dc__nearest_guess_kernel, dc__cuda_nearest_args, THREADS) {
  double *u = device_array(args.u, 1, args.m * args.n);
  for (int64_t i = dc_first(); i < args.m * args.n; i += dc_step()) {
    u[i] = dc__nearest_guess(i / args.n, i % args.n, args.m, args.n);
  }
}

/* v from u: an element by a thread; the grid's second axis is the chunk of u's rows. */
DC_KERNEL(dc__nearest_inner_kernel, dc__cuda_nearest_args, THREADS) {
  if (!continues(args)) {
    return;
  }
  const matrix_view x = matrix_view_of(args.x, 0);
  const int64_t count = args.p * args.q, chunk = dc_block(1);
  const double *u = device_array(args.u, 1, args.m * args.n);
  double *parts = device_array(args.parts, 1, args.chunks[0] * count);
  for (int64_t at = dc_first(); at < count; at += dc_step()) {
    const int64_t k = at / args.q, l = at % args.q;
    double sum = 0;
    for (int64_t i = begin_of(args.m, chunk, args.chunks[0]); i < begin_of(args.m, chunk + 1, args.chunks[0]); i++) {
      for (int64_t j = 0; j < args.n; j++) {
        sum += u[i * args.n + j] * (x.at(i * args.p + k, j * args.q + l) * args.first * args.second);
      }
    }
    parts[chunk * count + at] = sum;
  }
}

/* u from v: an element by a warp. */
DC_BLOCK_KERNEL(dc__nearest_outer_kernel, dc__cuda_nearest_args, THREADS) {
  if (!continues(args)) {
    return;
  }
  const matrix_view x = matrix_view_of(args.x, 0);
  const int64_t count = args.m * args.n, chunk = dc_block(1);
  const double *v = device_array(args.v, 1, args.p * args.q);
  double *parts = device_array(args.parts, 1, args.chunks[1] * count);
  const int64_t begin = begin_of(args.p, chunk, args.chunks[1]) * args.q;
  const int64_t end = begin_of(args.p, chunk + 1, args.chunks[1]) * args.q;
  for (int64_t at = dc_first() / DC_WARP; at < count; at += dc_step() / DC_WARP) {
    const int64_t i = at / args.n * args.p, j = at % args.n * args.q;
    double sum = 0;
    for (int64_t e = begin + dc_thread() % DC_WARP; e < end; e += DC_WARP) {
      sum += v[e] * (x.at(i + e / args.q, j + e % args.q) * args.first * args.second);
    }
    sum = sum_of_warp(sum);
    if (dc_thread() % DC_WARP == 0) {
      parts[chunk * count + at] = sum;
    }
  }
}

/* The chunks' sum, and each block's squares. */
DC_BLOCK_KERNEL(dc__nearest_reduce_kernel, dc__cuda_nearest_args, THREADS) {
  DC_SHARED(double, sums, [THREADS / DC_WARP]);
  if (!continues(args)) {
    return;
  }
  const step_vector s = step_vector_of(args);
  const double *parts = device_array(args.parts, 1, s.chunks * s.count);
  double *next = device_array(args.next, 1, s.count), *squares = device_array(args.squares, 1, BLOCKS);
  double square = 0;
  for (int64_t i = dc_first(); i < s.count; i += dc_step()) {
    double sum = 0;
    for (int64_t chunk = 0; chunk < s.chunks; chunk++) {
      sum += parts[chunk * s.count + i];
    }
    next[i] = sum;
    square += sum * sum;
  }
  square = sum_of_block(square, sums);
  if (dc_thread() == 0) {
    squares[dc_block()] = square;
  }
}

/* Each block adds up the squares of all, in one order. */
DC_BLOCK_KERNEL(dc__nearest_normalise_kernel, dc__cuda_nearest_args, THREADS) {
  DC_SHARED(double, sums, [THREADS / DC_WARP]);
  if (!continues(args)) {
    return;
  }
  const step_vector s = step_vector_of(args);
  const double *next = device_array(args.next, 1, s.count), *squares = device_array(args.squares, 1, BLOCKS);
  const double norm = sqrt(sum_of_block(dc_thread() < dc_blocks() ? squares[dc_thread()] : 0, sums));
  double trace = 0;
  uint64_t change = 0;
  for (int64_t i = dc_first(); i < s.count; i += dc_step()) {
    const double value = norm > 0 ? next[i] / norm : 0;
    change = larger(change, bits_of(value - s.x[i]));
    trace += value;
    s.x[i] = value;
  }
  if (args.inner) {
    warp_atomic_max(&result_of(args)->change, change);
  }
  trace = sum_of_block(trace, sums);
  if (dc_thread() == 0 && args.inner) {
    device_array(args.traces, 1, BLOCKS)[dc_block()] = trace;
  }
}

/* By one warp. One thread alone reads and writes the state. squares are u's, traces v's, one for each block that
 * computed them. */
DC_BLOCK_KERNEL(dc__nearest_check_kernel, dc__cuda_nearest_args, DC_WARP) {
  const double *squares = device_array(args.squares, 1, BLOCKS), *traces = device_array(args.traces, 1, BLOCKS);
  dc__cuda_nearest_result *result = result_of(args);
  double square = 0, trace = 0;
  for (int64_t i = dc_thread(); i < BLOCKS; i += DC_WARP) {
    square += i * THREADS < args.m * args.n ? squares[i] : 0;
    trace += i * THREADS < args.p * args.q ? traces[i] : 0;
  }
  square = sum_of_warp(square);
  trace = sum_of_warp(trace);
  if (dc_thread() == 0 && continues(args)) {
    dc__nearest_check_convergence(&result->state, sqrt(square), of_bits(result->change), args.tolerance);
    result->trace = trace;
    result->change = 0;
  }
}

/* Squares of x - kron(u, v) sigma and of x, row by row. */
DC_BLOCK_KERNEL(dc__nearest_residual_kernel, dc__cuda_nearest_args, THREADS) {
  const matrix_view x = matrix_view_of(args.x, 0);
  const double *u = device_array(args.u, 1, args.m * args.n), *v = device_array(args.v, 1, args.p * args.q);
  const double sigma = result_of(args)->state.sigma;
  double *residual_sums = device_array(args.residual_sums, 1, 2 * args.x.rows);
  for (int64_t i = dc_first() / DC_WARP; i < args.x.rows; i += dc_step() / DC_WARP) {
    double residual = 0, norm = 0;
    for (int64_t j = dc_thread() % DC_WARP; j < args.x.cols; j += DC_WARP) {
      const double value = x.at(i, j) * args.first * args.second;
      const double d = value - sigma * u[i / args.p * args.n + j / args.q] * v[i % args.p * args.q + j % args.q];
      residual += d * d;
      norm += value * value;
    }
    residual = sum_of_warp(residual);
    norm = sum_of_warp(norm);
    if (dc_thread() % DC_WARP == 0) {
      residual_sums[i] = residual;
      residual_sums[args.x.rows + i] = norm;
    }
  }
}
