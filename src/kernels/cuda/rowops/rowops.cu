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
struct place {
  uint32_t sample, row;
};

DC_DEVICE place place_of(const dc__cuda_dropout &drop, int64_t row) {
  if (drop.offsets == nullptr) {
    return {static_cast<uint32_t>(row / drop.longest), static_cast<uint32_t>(row % drop.longest)};
  }
  const int32_t *offsets = device_array<DC_FLOAT32>(drop.offsets, drop.batch + 1);
  int64_t low = 0, high = drop.batch; /* the last sample that begins at or before the row */
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    low = offsets[middle] <= row ? middle : low;
    high = offsets[middle] <= row ? high : middle;
  }
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(row - offsets[low])};
}

/* Multiplies by the mask of columns [first, first + 8). */
DC_DEVICE void apply(vec8 &x, const dc__cuda_dropout &drop, const place &p, int64_t first) {
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

struct pair {
  float x, y;
};

/* Two sums over all threads of the block. `parts` must not be that of the preceding sums, which other threads may still
 * read. */
DC_DEVICE pair sums_of_block(pair sum, pair (&parts)[WARPS]) {
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

/* dc__row_moments() of a row as it is stored; `own` is this thread's first piece. */
template <int DTYPE>
DC_DEVICE void moments(const vec8 &own, const void *x, int64_t row, int64_t columns, float eps, pair (&parts)[2][WARPS],
                       float &mean, float &rstd) {
  const float count = static_cast<float>(columns);
  pair sum = {0, 0}, off = {0, 0};
  for (int64_t j = own_piece(); j < columns; j += next_piece()) {
    const vec8 e = j == own_piece() ? own : load<DTYPE>(x, row * columns + j, columns - j);
    DC_UNROLL
    for (int i = 0; i < VEC8; i++) {
      sum.x += e.at[i];
    }
  }
  const float m = sums_of_block(sum, parts[0]).x / count;
  for (int64_t j = own_piece(); j < columns; j += next_piece()) {
    const vec8 e = j == own_piece() ? own : load<DTYPE>(x, row * columns + j, columns - j);
    DC_UNROLL
    for (int i = 0; i < VEC8; i++) {
      const float d = j + i < columns ? e.at[i] - m : 0.0f;
      off.x += d;
      off.y += d * d;
    }
  }
  off = sums_of_block(off, parts[1]);
  const float further = off.x / count, variance = off.y / count - further * further;
  mean = m + further;
  rstd = 1.0f / sqrtf((variance > 0.0f ? variance : 0.0f) + eps);
}

/* The arrays of a normalisation. */
struct norm {
  void *y;
  const void *gamma, *beta;
};

/* y's piece at column j. */
template <int DTYPE>
DC_DEVICE void normalize(const norm &n, const vec8 &x, int64_t row, int64_t columns, int64_t j, float mean,
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
DC_DEVICE void add_residual(const dc__cuda_residual_args &args, pair (&parts)[2][WARPS]) {
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *u = device_array<DTYPE>(args.u, count), *residual = device_array<DTYPE>(args.residual, count);
  const void *bias = device_array<DTYPE>(args.bias, columns);
  const norm n = {device_array<DTYPE>(args.y, count), device_array<DTYPE>(args.gamma, columns),
                  device_array<DTYPE>(args.beta, columns)};
  void *out = args.out != nullptr ? device_array<DTYPE>(args.out, count) : n.y;
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    const place p = args.drop.threshold != 0 ? place_of(args.drop, row) : place{0, 0};
    vec8 own = {};
    for (int64_t j = own_piece(); j < columns; j += next_piece()) {
      const int64_t at = row * columns + j, left = columns - j;
      vec8 x = load<DTYPE>(u, at, left);
      if (bias != nullptr) {
        add(x, load<DTYPE>(bias, j, left));
      }
      if (args.drop.threshold != 0) {
        apply(x, args.drop, p, j);
      }
      if (residual != nullptr) {
        add(x, load<DTYPE>(residual, at, left));
      }
      if (args.out != nullptr || j != own_piece()) {
        store<DTYPE>(out, at, left, x);
      }
      own = j == own_piece() ? rounded<DTYPE>(x) : own;
    }
    if (n.y == nullptr) {
      continue;
    }
    float mean, rstd;
    moments<DTYPE>(own, out, row, columns, args.eps, parts, mean, rstd);
    if (args.stats != nullptr && dc_thread() == 0) {
      float *stats = device_array<DC_FLOAT32>(args.stats, 2 * args.rows);
      stats[row] = mean;
      stats[args.rows + row] = rstd;
    }
    for (int64_t j = own_piece(); j < columns; j += next_piece()) {
      const vec8 x = j == own_piece() ? own : load<DTYPE>(out, row * columns + j, columns - j);
      normalize<DTYPE>(n, x, row, columns, j, mean, rstd);
    }
  }
}

template <int DTYPE>
DC_DEVICE void normalize_again(const dc__cuda_layernorm_args &args) {
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *x = device_array<DTYPE>(args.x, count);
  const norm n = {device_array<DTYPE>(args.y, count), device_array<DTYPE>(args.gamma, columns),
                  device_array<DTYPE>(args.beta, columns)};
  const float *stats = device_array<DC_FLOAT32>(args.stats, 2 * args.rows);
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    for (int64_t j = own_piece(); j < columns; j += next_piece()) {
      normalize<DTYPE>(n, load<DTYPE>(x, row * columns + j, columns - j), row, columns, j, stats[row],
                       stats[args.rows + row]);
    }
  }
}

/* ---- LN's backward ---- */

/* A thread's input of a row's first piece, requested early. WHOLE: rows are aligned to 16 bytes there. */
template <int DTYPE>
struct stored_row {
  stored<DTYPE> dy, x;
  float mean, rstd;
};

template <int DTYPE>
DC_DEVICE stored_row<DTYPE> load_stored_row(const dc__cuda_layernorm_backward_args &args, int64_t row, bool whole) {
  const int64_t columns = args.columns, count = args.rows * columns, at = row * columns + own_piece();
  const void *dy = device_array<DTYPE>(args.dy, count), *x = device_array<DTYPE>(args.x, count);
  const float *stats = device_array<DC_FLOAT32>(args.stats, 2 * args.rows);
  const float mean = stats[row], rstd = stats[args.rows + row];
  if (whole) {
    return {load_stored_aligned<DTYPE>(dy, at), load_stored_aligned<DTYPE>(x, at), mean, rstd};
  }
  const int64_t left = columns - own_piece();
  return {load_stored<DTYPE>(dy, at, left), load_stored<DTYPE>(x, at, left), mean, rstd};
}

/* A piece of dy gamma, and of the normalised x. */
struct slope {
  vec8 scaled, normal;
};

/* Adds a piece to the sums over rows, of dy and of dy times the normalised x. Along the row it adds the slope and the
 * slope times the normalised x. Elements beyond the row contribute 0. */
DC_DEVICE slope add_piece(const vec8 &dy, const vec8 &x, const vec8 &gamma, float mean, float rstd, vec8 &sum,
                          vec8 &dot, pair &along) {
  slope s;
  DC_UNROLL
  for (int i = 0; i < VEC8; i++) {
    s.scaled.at[i] = dy.at[i] * gamma.at[i];
    s.normal.at[i] = (x.at[i] - mean) * rstd;
    sum.at[i] += dy.at[i];
    dot.at[i] = fmaf(dy.at[i], s.normal.at[i], dot.at[i]);
    along.x += s.scaled.at[i];
    along.y = fmaf(s.scaled.at[i], s.normal.at[i], along.y);
  }
  return s;
}

/* The block's partial sums at column j. */
struct partial {
  float *parts;
  int64_t columns;
  DC_MEMBER float *row(int which) const {
    return parts + (which * dc_blocks() + dc_block()) * columns;
  }
  DC_MEMBER vec8 take(int which, int64_t j) const {
    return load<DC_FLOAT32>(row(which), j, columns - j);
  }
  DC_MEMBER void give(int64_t j, const vec8 &sum, const vec8 &dot) const {
    store<DC_FLOAT32>(row(0), j, columns - j, sum);
    store<DC_FLOAT32>(row(1), j, columns - j, dot);
  }
};

/* Stores a piece of dx, and of dropped. along: the means along the row. */
template <int DTYPE>
DC_DEVICE void store_piece(const dc__cuda_layernorm_backward_args &args, const slope &s, const place &p, int64_t row,
                           int64_t j, float rstd, const pair &along) {
  const int64_t columns = args.columns, count = args.rows * columns, at = row * columns + j, left = columns - j;
  void *dropped = device_array<DTYPE>(args.dropped, count);
  vec8 d;
  DC_UNROLL
  for (int i = 0; i < VEC8; i++) {
    d.at[i] = rstd * fmaf(-s.normal.at[i], along.y, s.scaled.at[i] - along.x);
  }
  if (args.add != nullptr) {
    add(d, load<DTYPE>(device_array<DTYPE>(args.add, count), at, left));
  }
  store<DTYPE>(device_array<DTYPE>(args.dx, count), at, left, d);
  if (dropped != nullptr) {
    d = rounded<DTYPE>(d);
    apply(d, args.drop, p, j);
    store<DTYPE>(dropped, at, left, d);
  }
}

/* A block has several rows, one after the other, and keeps its sums over them. The next row is requested early, since a
 * row's own sums make the whole block wait. dx may be dy or `add`, since a thread reads its elements before it writes
 * them. A thread's first piece and its sums stay in registers; other pieces are read again, and their sums are in
 * `parts`. */
template <int DTYPE>
DC_DEVICE void normalize_backward(const dc__cuda_layernorm_backward_args &args, pair (&parts)[2][WARPS]) {
  const int64_t columns = args.columns, count = args.rows * columns, left = columns - own_piece();
  const int64_t later = own_piece() + next_piece();
  const void *dy = device_array<DTYPE>(args.dy, count), *x = device_array<DTYPE>(args.x, count);
  const void *gammas = device_array<DTYPE>(args.gamma, columns);
  const partial sums = {device_array<DC_FLOAT32>(args.sums.parts, 2 * dc_blocks() * columns), columns};
  const bool whole = columns % VEC8 == 0 && is_vectorizable<DTYPE>(dy, own_piece(), left) &&
                     is_vectorizable<DTYPE>(x, own_piece(), left);
  const float share = 1.0f / static_cast<float>(columns);
  const vec8 gamma = load<DTYPE>(gammas, own_piece(), left);
  const auto further = [&](int64_t row, int64_t j, float mean, float rstd, vec8 &sum, vec8 &dot, pair &along) {
    const int64_t at = row * columns + j;
    return add_piece(load<DTYPE>(dy, at, columns - j), load<DTYPE>(x, at, columns - j),
                     load<DTYPE>(gammas, j, columns - j), mean, rstd, sum, dot, along);
  };
  vec8 sum = {}, dot = {};
  stored_row<DTYPE> next = load_stored_row<DTYPE>(args, dc_block(), whole);
  int turn = 0;
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks(), turn ^= 1) {
    const float mean = next.mean, rstd = next.rstd;
    pair along = {0, 0};
    const slope own = add_piece(unpack_vec8(next.dy), unpack_vec8(next.x), gamma, mean, rstd, sum, dot, along);
    if (row + dc_blocks() < args.rows) {
      next = load_stored_row<DTYPE>(args, row + dc_blocks(), whole);
    }
    for (int64_t j = later; j < columns; j += next_piece()) {
      vec8 above = {}, beside = {};
      (void)further(row, j, mean, rstd, above, beside, along);
      if (sums.parts != nullptr && row != dc_block()) {
        add(above, sums.take(0, j));
        add(beside, sums.take(1, j));
      }
      if (sums.parts != nullptr) {
        sums.give(j, above, beside);
      }
    }
    if (args.dx == nullptr) {
      continue;
    }
    along = sums_of_block(along, parts[turn]);
    along = {along.x * share, along.y * share};
    const place p = args.dropped != nullptr ? place_of(args.drop, row) : place{0, 0};
    store_piece<DTYPE>(args, own, p, row, own_piece(), rstd, along);
    for (int64_t j = later; j < columns; j += next_piece()) {
      vec8 unused[2] = {};
      pair none = {0, 0};
      store_piece<DTYPE>(args, further(row, j, mean, rstd, unused[0], unused[1], none), p, row, j, rstd, along);
    }
  }
  if (sums.parts != nullptr) {
    sums.give(own_piece(), sum, dot);
  }
}

/* ---- dropout alone ---- */

template <int DTYPE>
DC_DEVICE void drop(const dc__cuda_dropout_args &args) {
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *from = device_array<DTYPE>(args.x, count);
  void *to = device_array<DTYPE>(args.out, count);
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    const place p = place_of(args.drop, row);
    for (int64_t j = own_piece(); j < columns; j += next_piece()) {
      vec8 x = load<DTYPE>(from, row * columns + j, columns - j);
      apply(x, args.drop, p, j);
      store<DTYPE>(to, row * columns + j, columns - j, x);
    }
  }
}

}  // namespace

DC_BLOCK_KERNEL(dc__residual_kernel, dc__cuda_residual_args, DC__CUDA_ROW_THREADS) {
  DC_SHARED(pair, parts, [2][WARPS]);
  DC_BY_TYPE(args.dtype, add_residual, args, parts);
}

DC_KERNEL(dc__layernorm_kernel, dc__cuda_layernorm_args, DC__CUDA_ROW_THREADS) {
  DC_BY_TYPE(args.dtype, normalize_again, args);
}

DC_BLOCK_KERNEL(dc__layernorm_backward_kernel, dc__cuda_layernorm_backward_args, DC__CUDA_ROW_THREADS) {
  DC_SHARED(pair, parts, [2][WARPS]);
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
