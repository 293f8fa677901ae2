/* The layer's rows on a device: the CPU's results (kernels/nn/rowops.h) within rounding. A block has a row at a time, a
 * thread pieces of 8 neighbours, for which dropout is one call of Philox. The first piece, which is the whole row up to
 * 4096 columns, stays in registers. A thread reads its other pieces again, so that rows of any length need no shared
 * memory. Compiled without contraction: another kernel's recomputation gives the same bits. */
#include <math.h>

#include "kernels/cuda/rowops/rowops_args.h"
#include "kernels/cuda/vec8.h"
#include "kernels/nn/philox.h"

namespace {

enum { WARPS = DC__CUDA_ROW_THREADS / DC_WARP };

/* ---- dropout ---- */

/* A row's sample, and its position in it. */
struct row_position {
  uint32_t sample, row;
};

DC_DEVICE row_position position_of(const dc__cuda_dropout &drop, int64_t row) {
  if (drop.offsets == nullptr) {
    return {static_cast<uint32_t>(row / drop.longest), static_cast<uint32_t>(row % drop.longest)};
  }
  const int32_t *offsets = device_array<DC_FLOAT32>(drop.offsets, drop.batch + 1);
  int64_t low = 0, high = drop.batch; /* the last sample that begins at or before the row */
  while (high - low > 1) {
    const int64_t mid = (low + high) / 2;
    low = offsets[mid] <= row ? mid : low;
    high = offsets[mid] <= row ? high : mid;
  }
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(row - offsets[low])};
}

/* Multiplies by the mask of columns [first, first + 8). */
DC_DEVICE void apply_dropout(vec8 &x, const dc__cuda_dropout &drop, const row_position &p, int64_t first) {
  const uint32_t counter[4] = {static_cast<uint32_t>(first / VEC8), p.row, p.sample, 0};
  uint32_t words[4];
  dc__philox_words(words, counter, drop.key);
  DC_UNROLL
  for (int j = 0; j < VEC8; j++) {
    const uint32_t bits = words[j / 2] >> (j % 2 * 16) & 0xffffu;
    x.at[j] *= bits < drop.threshold ? 0.0f : drop.scale;
  }
}

/* ---- a row ---- */

struct float_pair {
  float x, y;
};

/* Two sums over all threads of the block. `parts` must not be that of the preceding sums, which other threads may still
 * read. */
DC_DEVICE float_pair block_sums(float_pair sum, float_pair (&parts)[WARPS]) {
  for (uint32_t step = DC_WARP / 2; step > 0; step /= 2) {
    sum.x += dc_shuffle_xor(sum.x, step);
    sum.y += dc_shuffle_xor(sum.y, step);
  }
  if (dc_thread() % DC_WARP == 0) {
    parts[dc_thread() / DC_WARP] = sum;
  }
  dc_sync();
  sum = {0, 0};
  for (uint32_t w = 0; w < dc_threads() / DC_WARP; w++) {
    sum.x += parts[w].x;
    sum.y += parts[w].y;
  }
  return sum;
}

/* dc__row_moments() of a row as it is stored; `first` is this thread's first piece. */
template <int DTYPE>
DC_DEVICE void moments(const vec8 &first, const void *x, int64_t row, int64_t columns, float eps,
                       float_pair (&parts)[2][WARPS], float &mean, float &rstd) {
  const float count = static_cast<float>(columns);
  float_pair sum = {0, 0}, deviation = {0, 0};
  for (int64_t j = first_piece(); j < columns; j += piece_stride()) {
    const vec8 e = j == first_piece() ? first : load<DTYPE>(x, row * columns + j, columns - j);
    DC_UNROLL
    for (int i = 0; i < VEC8; i++) {
      sum.x += e.at[i];
    }
  }
  const float m = block_sums(sum, parts[0]).x / count;
  for (int64_t j = first_piece(); j < columns; j += piece_stride()) {
    const vec8 e = j == first_piece() ? first : load<DTYPE>(x, row * columns + j, columns - j);
    DC_UNROLL
    for (int i = 0; i < VEC8; i++) {
      const float d = j + i < columns ? e.at[i] - m : 0.0f;
      deviation.x += d;
      deviation.y += d * d;
    }
  }
  deviation = block_sums(deviation, parts[1]);
  const float shift = deviation.x / count, variance = deviation.y / count - shift * shift;
  mean = m + shift;
  rstd = 1.0f / sqrtf((variance < 0.0f ? 0.0f : variance) + eps);
}

/* The arrays of a normalisation. */
struct layernorm_arrays {
  void *y;
  const void *gamma, *beta;
};

/* y's piece at column j. */
template <int DTYPE>
DC_DEVICE void normalize(const layernorm_arrays &n, const vec8 &x, int64_t row, int64_t columns, int64_t j, float mean,
                         float rstd) {
  const vec8 g = load<DTYPE>(n.gamma, j, columns - j), b = load<DTYPE>(n.beta, j, columns - j);
  vec8 e;
  DC_UNROLL
  for (int i = 0; i < VEC8; i++) {
    e.at[i] = (x.at[i] - mean) * rstd * g.at[i] + b.at[i];
  }
  store<DTYPE>(n.y, row * columns + j, columns - j, e);
}

/* The statistics are those of the stored row. If only y is wanted, y holds the pieces that are not in registers
 * meanwhile. */
template <int DTYPE>
DC_DEVICE void add_residual(const dc__cuda_residual_args &args, float_pair (&parts)[2][WARPS]) {
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *u = device_array<DTYPE>(args.u, count), *residual = device_array<DTYPE>(args.residual, count);
  const void *bias = device_array<DTYPE>(args.bias, columns);
  const layernorm_arrays n = {device_array<DTYPE>(args.y, count), device_array<DTYPE>(args.gamma, columns),
                              device_array<DTYPE>(args.beta, columns)};
  void *out = args.out != nullptr ? device_array<DTYPE>(args.out, count) : n.y;
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    const row_position p = args.drop.threshold != 0 ? position_of(args.drop, row) : row_position{0, 0};
    vec8 first = {};
    for (int64_t j = first_piece(); j < columns; j += piece_stride()) {
      const int64_t at = row * columns + j, left = columns - j;
      vec8 x = load<DTYPE>(u, at, left);
      if (bias != nullptr) {
        add(x, load<DTYPE>(bias, j, left));
      }
      if (args.drop.threshold != 0) {
        apply_dropout(x, args.drop, p, j);
      }
      if (residual != nullptr) {
        add(x, load<DTYPE>(residual, at, left));
      }
      if (args.out != nullptr || j != first_piece()) {
        store<DTYPE>(out, at, left, x);
      }
      first = j == first_piece() ? rounded<DTYPE>(x) : first;
    }
    if (n.y == nullptr) {
      continue;
    }
    float mean, rstd;
    moments<DTYPE>(first, out, row, columns, args.eps, parts, mean, rstd);
    if (args.stats != nullptr && dc_thread() == 0) {
      float *stats = device_array<DC_FLOAT32>(args.stats, 2 * args.rows);
      stats[row] = mean;
      stats[args.rows + row] = rstd;
    }
    for (int64_t j = first_piece(); j < columns; j += piece_stride()) {
      const vec8 x = j == first_piece() ? first : load<DTYPE>(out, row * columns + j, columns - j);
      normalize<DTYPE>(n, x, row, columns, j, mean, rstd);
    }
  }
}

template <int DTYPE>
DC_DEVICE void layernorm_from_stats(const dc__cuda_layernorm_args &args) {
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *x = device_array<DTYPE>(args.x, count);
  const layernorm_arrays n = {device_array<DTYPE>(args.y, count), device_array<DTYPE>(args.gamma, columns),
                              device_array<DTYPE>(args.beta, columns)};
  const float *stats = device_array<DC_FLOAT32>(args.stats, 2 * args.rows);
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    for (int64_t j = first_piece(); j < columns; j += piece_stride()) {
      normalize<DTYPE>(n, load<DTYPE>(x, row * columns + j, columns - j), row, columns, j, stats[row],
                       stats[args.rows + row]);
    }
  }
}

/* ---- LN's backward ---- */

/* A thread's input of a row's first piece, requested early. WHOLE: rows are aligned to 16 bytes there. */
template <int DTYPE>
struct packed_row {
  packed_vec8<DTYPE> dy, x;
  float mean, rstd;
};

template <int DTYPE>
DC_DEVICE packed_row<DTYPE> load_packed_row(const dc__cuda_layernorm_backward_args &args, int64_t row, bool whole) {
  const int64_t columns = args.columns, count = args.rows * columns, at = row * columns + first_piece();
  const void *dy = device_array<DTYPE>(args.dy, count), *x = device_array<DTYPE>(args.x, count);
  const float *stats = device_array<DC_FLOAT32>(args.stats, 2 * args.rows);
  const float mean = stats[row], rstd = stats[args.rows + row];
  if (whole) {
    return {load_packed_aligned<DTYPE>(dy, at), load_packed_aligned<DTYPE>(x, at), mean, rstd};
  }
  const int64_t left = columns - first_piece();
  return {load_packed<DTYPE>(dy, at, left), load_packed<DTYPE>(x, at, left), mean, rstd};
}

/* A piece of dy gamma, and of the normalised x. */
struct layernorm_piece {
  vec8 dy_gamma, xhat;
};

/* Adds a piece to the sums over rows, of dy and of dy times the normalised x. To row_sums it adds
 * dy gamma, and that times the normalised x. Elements beyond the row contribute 0. */
DC_DEVICE layernorm_piece add_piece(const vec8 &dy, const vec8 &x, const vec8 &gamma, float mean, float rstd, vec8 &sum,
                                    vec8 &dot, float_pair &row_sums) {
  layernorm_piece s;
  DC_UNROLL
  for (int i = 0; i < VEC8; i++) {
    s.dy_gamma.at[i] = dy.at[i] * gamma.at[i];
    s.xhat.at[i] = (x.at[i] - mean) * rstd;
    sum.at[i] += dy.at[i];
    dot.at[i] = fmaf(dy.at[i], s.xhat.at[i], dot.at[i]);
    row_sums.x += s.dy_gamma.at[i];
    row_sums.y = fmaf(s.dy_gamma.at[i], s.xhat.at[i], row_sums.y);
  }
  return s;
}

/* The block's partial sums at column j. */
struct partial_sums {
  float *parts;
  int64_t columns;
  DC_MEMBER float *row(int which) const {
    return parts + (which * dc_blocks() + dc_block()) * columns;
  }
  DC_MEMBER vec8 load_sum(int which, int64_t j) const {
    return load<DC_FLOAT32>(row(which), j, columns - j);
  }
  DC_MEMBER void store_sums(int64_t j, const vec8 &sum, const vec8 &dot) const {
    store<DC_FLOAT32>(row(0), j, columns - j, sum);
    store<DC_FLOAT32>(row(1), j, columns - j, dot);
  }
};

/* Stores a piece of dx, and of dropped. row_sums: divided by the number of columns. */
template <int DTYPE>
DC_DEVICE void store_piece(const dc__cuda_layernorm_backward_args &args, const layernorm_piece &s,
                           const row_position &p, int64_t row, int64_t j, float rstd, const float_pair &row_sums) {
  const int64_t columns = args.columns, count = args.rows * columns, at = row * columns + j, left = columns - j;
  void *dropped = device_array<DTYPE>(args.dropped, count);
  vec8 d;
  DC_UNROLL
  for (int i = 0; i < VEC8; i++) {
    d.at[i] = rstd * fmaf(-s.xhat.at[i], row_sums.y, s.dy_gamma.at[i] - row_sums.x);
  }
  if (args.add != nullptr) {
    add(d, load<DTYPE>(device_array<DTYPE>(args.add, count), at, left));
  }
  store<DTYPE>(device_array<DTYPE>(args.dx, count), at, left, d);
  if (dropped != nullptr) {
    d = rounded<DTYPE>(d);
    apply_dropout(d, args.drop, p, j);
    store<DTYPE>(dropped, at, left, d);
  }
}

/* A block has several rows, one after the other, and keeps its sums over them. The next row is requested early, since a
 * row's own sums make the whole block wait. dx may be dy or `add`, since a thread reads its elements before it writes
 * them. A thread's first piece and its sums stay in registers; other pieces are read again, and their sums are in
 * `parts`. */
template <int DTYPE>
DC_DEVICE void normalize_backward(const dc__cuda_layernorm_backward_args &args, float_pair (&parts)[2][WARPS]) {
  const int64_t columns = args.columns, count = args.rows * columns, left = columns - first_piece();
  const int64_t later = first_piece() + piece_stride();
  const void *dy = device_array<DTYPE>(args.dy, count), *x = device_array<DTYPE>(args.x, count);
  const void *gammas = device_array<DTYPE>(args.gamma, columns);
  const partial_sums sums = {device_array<DC_FLOAT32>(args.sums.parts, 2 * dc_blocks() * columns), columns};
  const bool whole = columns % VEC8 == 0 && is_vectorizable<DTYPE>(dy, first_piece(), left) &&
                     is_vectorizable<DTYPE>(x, first_piece(), left);
  const float inverse_columns = 1.0f / static_cast<float>(columns);
  const vec8 gamma = load<DTYPE>(gammas, first_piece(), left);
  const auto add_later_piece = [&](int64_t row, int64_t j, float mean, float rstd, vec8 &sum, vec8 &dot,
                                   float_pair &row_sums) {
    const int64_t at = row * columns + j;
    return add_piece(load<DTYPE>(dy, at, columns - j), load<DTYPE>(x, at, columns - j),
                     load<DTYPE>(gammas, j, columns - j), mean, rstd, sum, dot, row_sums);
  };
  vec8 sum = {}, dot = {};
  packed_row<DTYPE> next = load_packed_row<DTYPE>(args, dc_block(), whole);
  int parity = 0;
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks(), parity ^= 1) {
    const float mean = next.mean, rstd = next.rstd;
    float_pair row_sums = {0, 0};
    const layernorm_piece first =
        add_piece(unpack_vec8(next.dy), unpack_vec8(next.x), gamma, mean, rstd, sum, dot, row_sums);
    if (row + dc_blocks() < args.rows) {
      next = load_packed_row<DTYPE>(args, row + dc_blocks(), whole);
    }
    for (int64_t j = later; j < columns; j += piece_stride()) {
      vec8 piece_sum = {}, piece_dot = {};
      (void)add_later_piece(row, j, mean, rstd, piece_sum, piece_dot, row_sums);
      if (sums.parts != nullptr && row != dc_block()) {
        add(piece_sum, sums.load_sum(0, j));
        add(piece_dot, sums.load_sum(1, j));
      }
      if (sums.parts != nullptr) {
        sums.store_sums(j, piece_sum, piece_dot);
      }
    }
    if (args.dx == nullptr) {
      continue;
    }
    row_sums = block_sums(row_sums, parts[parity]);
    row_sums = {row_sums.x * inverse_columns, row_sums.y * inverse_columns};
    const row_position p = args.dropped != nullptr ? position_of(args.drop, row) : row_position{0, 0};
    store_piece<DTYPE>(args, first, p, row, first_piece(), rstd, row_sums);
    for (int64_t j = later; j < columns; j += piece_stride()) {
      vec8 unused[2] = {};
      float_pair none = {0, 0};
      store_piece<DTYPE>(args, add_later_piece(row, j, mean, rstd, unused[0], unused[1], none), p, row, j, rstd,
                         row_sums);
    }
  }
  if (sums.parts != nullptr) {
    sums.store_sums(first_piece(), sum, dot);
  }
}

/* ---- dropout alone ---- */

template <int DTYPE>
DC_DEVICE void drop(const dc__cuda_dropout_args &args) {
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *from = device_array<DTYPE>(args.x, count);
  void *to = device_array<DTYPE>(args.out, count);
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    const row_position p = position_of(args.drop, row);
    for (int64_t j = first_piece(); j < columns; j += piece_stride()) {
      vec8 x = load<DTYPE>(from, row * columns + j, columns - j);
      apply_dropout(x, args.drop, p, j);
      store<DTYPE>(to, row * columns + j, columns - j, x);
    }
  }
}

}  // namespace

DC_BLOCK_KERNEL(dc__residual_kernel, dc__cuda_residual_args, DC__CUDA_ROW_THREADS) {
  DC_SHARED(float_pair, parts, [2][WARPS]);
  DC_BY_TYPE(args.dtype, add_residual, args, parts);
}

DC_KERNEL(dc__layernorm_kernel, dc__cuda_layernorm_args, DC__CUDA_ROW_THREADS) {
  DC_BY_TYPE(args.dtype, layernorm_from_stats, args);
}

DC_BLOCK_KERNEL(dc__layernorm_backward_kernel, dc__cuda_layernorm_backward_args, DC__CUDA_ROW_THREADS) {
  DC_SHARED(float_pair, parts, [2][WARPS]);
  DC_BY_TYPE(args.dtype, normalize_backward, args, parts);
}

DC_KERNEL(dc__dropout_kernel, dc__cuda_dropout_args, DC__CUDA_ROW_THREADS) {
  DC_BY_TYPE(args.dtype, drop, args);
}

DC_KERNEL(dc__offsets_kernel, dc__cuda_offsets_args, DC__CUDA_ROW_THREADS) {
  int32_t *to = device_array<DC_FLOAT32>(args.to, args.count);
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    to[i] = args.values[i];
  }
}
