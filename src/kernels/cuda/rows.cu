/* The layer's rows on a device: what rows.c of the transformer computes on the CPU, without contraction. A block has a row
 * at a time, a thread 8 neighbours of it, for which dropout is one call of Philox. A thread reads again what it wrote
 * itself, so that rows of any length need no memory of the block. */
#include <math.h>

#include "kernels/cuda/gpu.h"

#include "kernels/cuda/eight.h"
#include "kernels/cuda/rows.h"
#include "kernels/gelu.h"
#include "kernels/philox.h"

namespace {

enum { WARPS = DC__CUDA_ROW_THREADS / DC_WARP, LARGE = EIGHT * DC__CUDA_ROW_THREADS };
enum { EPILOGUE_GELU = 2, EPILOGUE_GELU_BACK = 3, GELU_ERF = 1 }; /* enum dc__epilogue, enum dc__gelu_form */

/* ---- dropout ---- */

/* A row's sample, and its place in it. */
struct place {
  uint32_t sample, row;
};

DC_DEVICE place place_of(const dc__cuda_drop &drop, int64_t row) {
  if (drop.offsets == nullptr) {
    return {static_cast<uint32_t>(row / drop.longest), static_cast<uint32_t>(row % drop.longest)};
  }
  const int32_t *offsets = there(drop.offsets, DC_FLOAT32, drop.batch + 1);
  int64_t low = 0, high = drop.batch; /* the last sample that begins at or before the row */
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    low = offsets[middle] <= row ? middle : low;
    high = offsets[middle] <= row ? high : middle;
  }
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(row - offsets[low])};
}

/* Times the mask of columns [first, first + 8). */
DC_DEVICE void apply(eight &x, const dc__cuda_drop &drop, const place &p, int64_t first) {
  const uint32_t counter[4] = {static_cast<uint32_t>(first / EIGHT), p.row, p.sample, 0};
  uint32_t words[4];
  dc__philox_words(words, counter, drop.key);
DC_UNROLL
  for (int j = 0; j < EIGHT; j++) {
    const uint32_t bits = words[j / 2] >> (j % 2 * 16) & 0xffffu;
    x.at[j] *= bits < drop.threshold ? 0.0f : drop.scale;
  }
}

/* ---- sums over a row ---- */

DC_DEVICE float sum_of_block(float x, float (&parts)[WARPS]) {
  for (uint32_t step = DC_WARP / 2; step > 0; step /= 2) {
    x += dc_shuffle_xor(x, step);
  }
  dc_sync(); /* the last sum has been read */
  if (dc_thread() % DC_WARP == 0) {
    parts[dc_thread() / DC_WARP] = x;
  }
  dc_sync();
  float sum = 0;
DC_UNROLL
  for (int w = 0; w < WARPS; w++) {
    sum += parts[w];
  }
  return sum;
}

/* dc__row_moments(). */
DC_DEVICE void moments(const void *x, int32_t dtype, int64_t row, int64_t columns, float eps, float (&parts)[WARPS],
                       float &mean, float &rstd) {
  const int64_t first = row * columns;
  float sum = 0;
  for (int64_t j = dc_thread() * EIGHT; j < columns; j += LARGE) {
    const eight e = load(x, dtype, first + j, columns - j);
    for (int i = 0; i < EIGHT; i++) {
      sum += e.at[i];
    }
  }
  const float m = sum_of_block(sum, parts) / static_cast<float>(columns);
  float off = 0, squares = 0;
  for (int64_t j = dc_thread() * EIGHT; j < columns; j += LARGE) {
    const eight e = load(x, dtype, first + j, columns - j);
    for (int i = 0; i < EIGHT; i++) {
      const float d = j + i < columns ? e.at[i] - m : 0.0f;
      off += d;
      squares += d * d;
    }
  }
  off = sum_of_block(off, parts) / static_cast<float>(columns);
  const float variance = sum_of_block(squares, parts) / static_cast<float>(columns) - off * off;
  mean = m + off;
  rstd = 1.0f / sqrtf((variance > 0.0f ? variance : 0.0f) + eps);
}

DC_DEVICE void normalize_row(void *y, const void *x, const void *gamma, const void *beta, int32_t dtype, int64_t row,
                             int64_t columns, float mean, float rstd) {
  for (int64_t j = dc_thread() * EIGHT; j < columns; j += LARGE) {
    eight e = load(x, dtype, row * columns + j, columns - j);
    const eight g = load(gamma, dtype, j, columns - j), b = load(beta, dtype, j, columns - j);
DC_UNROLL
    for (int i = 0; i < EIGHT; i++) {
      e.at[i] = (e.at[i] - mean) * rstd * g.at[i] + b.at[i];
    }
    store(y, dtype, row * columns + j, columns - j, e);
  }
}

} // namespace

/* The statistics are those of what is stored: where only y is wanted, y has it in between. */
DC_BLOCK_KERNEL(dc__residual_kernel, dc__cuda_residual_args, DC__CUDA_ROW_THREADS) {
  DC_SHARED(float, parts, [WARPS]);
  const int32_t dtype = args.dtype;
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *u = there(args.u, dtype, count), *residual = there(args.residual, dtype, count);
  const void *bias = there(args.bias, dtype, columns);
  void *y = there(args.y, dtype, count);
  void *out = args.out != nullptr ? there(args.out, dtype, count) : y;
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    const place p = args.drop.threshold != 0 ? place_of(args.drop, row) : place{0, 0};
    for (int64_t j = dc_thread() * EIGHT; j < columns; j += LARGE) {
      const int64_t at = row * columns + j, left = columns - j;
      eight x = load(u, dtype, at, left);
      if (bias != nullptr) {
        const eight b = load(bias, dtype, j, left);
        for (int i = 0; i < EIGHT; i++) {
          x.at[i] += b.at[i];
        }
      }
      if (args.drop.threshold != 0) {
        apply(x, args.drop, p, j);
      }
      if (residual != nullptr) {
        const eight r = load(residual, dtype, at, left);
        for (int i = 0; i < EIGHT; i++) {
          x.at[i] += r.at[i];
        }
      }
      store(out, dtype, at, left, x);
    }
    if (y == nullptr) {
      continue;
    }
    float mean, rstd;
    moments(out, dtype, row, columns, args.eps, parts, mean, rstd);
    if (args.stats != nullptr && dc_thread() == 0) {
      float *stats = there(args.stats, DC_FLOAT32, 2 * args.rows);
      stats[row] = mean;
      stats[args.rows + row] = rstd;
    }
    normalize_row(y, out, there(args.gamma, dtype, columns), there(args.beta, dtype, columns), dtype, row, columns, mean,
                  rstd);
  }
}

DC_KERNEL(dc__normalize_kernel, dc__cuda_normalize_args, DC__CUDA_ROW_THREADS) {
  const int64_t columns = args.columns, count = args.rows * columns;
  const float *stats = there(args.stats, DC_FLOAT32, 2 * args.rows);
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    normalize_row(there(args.y, args.dtype, count), there(args.x, args.dtype, count),
                  there(args.gamma, args.dtype, columns), there(args.beta, args.dtype, columns), args.dtype, row,
                  columns, stats[row], stats[args.rows + row]);
  }
}

/* dx may lie where dy or `add` does: a thread has read its elements when it writes them. */
DC_BLOCK_KERNEL(dc__normal_back_kernel, dc__cuda_normal_back_args, DC__CUDA_ROW_THREADS) {
  DC_SHARED(float, parts, [WARPS]);
  const int32_t dtype = args.dtype;
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *dy = there(args.dy, dtype, count), *x = there(args.x, dtype, count), *add = there(args.add, dtype, count);
  const void *gamma = there(args.gamma, dtype, columns);
  void *dx = there(args.dx, dtype, count), *dropped = there(args.dropped, dtype, count);
  const float *stats = there(args.stats, DC_FLOAT32, 2 * args.rows);
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    const float mean = stats[row], rstd = stats[args.rows + row];
    float sum = 0, dot = 0;
    for (int64_t j = dc_thread() * EIGHT; j < columns; j += LARGE) {
      const int64_t at = row * columns + j, left = columns - j;
      const eight d = load(dy, dtype, at, left), g = load(gamma, dtype, j, left), e = load(x, dtype, at, left);
      for (int i = 0; i < EIGHT; i++) {
        const float scaled = d.at[i] * g.at[i];
        sum += scaled;
        dot += scaled * ((e.at[i] - mean) * rstd);
      }
    }
    sum = sum_of_block(sum, parts) / static_cast<float>(columns);
    dot = sum_of_block(dot, parts) / static_cast<float>(columns);
    const place p = dropped != nullptr ? place_of(args.drop, row) : place{0, 0};
    for (int64_t j = dc_thread() * EIGHT; j < columns; j += LARGE) {
      const int64_t at = row * columns + j, left = columns - j;
      const eight g = load(gamma, dtype, j, left), e = load(x, dtype, at, left);
      eight d = load(dy, dtype, at, left);
      for (int i = 0; i < EIGHT; i++) {
        d.at[i] = rstd * (d.at[i] * g.at[i] - sum - (e.at[i] - mean) * rstd * dot);
      }
      if (add != nullptr) {
        const eight a = load(add, dtype, at, left);
        for (int i = 0; i < EIGHT; i++) {
          d.at[i] += a.at[i];
        }
      }
      store(dx, dtype, at, left, d);
      if (dropped != nullptr) {
        for (int i = 0; i < EIGHT; i++) {
          d.at[i] = rounded(d.at[i], dtype);
        }
        apply(d, args.drop, p, j);
        store(dropped, dtype, at, left, d);
      }
    }
  }
}

DC_KERNEL(dc__drop_kernel, dc__cuda_drop_args, DC__CUDA_ROW_THREADS) {
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *from = there(args.x, args.dtype, count);
  void *to = there(args.out, args.dtype, count);
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    const place p = place_of(args.drop, row);
    for (int64_t j = dc_thread() * EIGHT; j < columns; j += LARGE) {
      eight x = load(from, args.dtype, row * columns + j, columns - j);
      apply(x, args.drop, p, j);
      store(to, args.dtype, row * columns + j, columns - j, x);
    }
  }
}

DC_KERNEL(dc__epilogue_kernel, dc__cuda_epilogue_args, DC__CUDA_ROW_THREADS) {
  const int32_t dtype = args.dtype;
  const int64_t columns = args.columns, count = args.rows * columns;
  const void *from = there(args.x, dtype, count), *bias = there(args.bias, dtype, columns);
  void *to = there(args.out, dtype, count), *aux = there(args.aux, dtype, count);
  const bool erf = args.gelu == GELU_ERF;
  for (int64_t row = dc_block(); row < args.rows; row += dc_blocks()) {
    for (int64_t j = dc_thread() * EIGHT; j < columns; j += LARGE) {
      const int64_t at = row * columns + j, left = columns - j;
      eight x = load(from, dtype, at, left);
      eight other = {};
      if (args.epilogue == EPILOGUE_GELU_BACK) {
        other = load(aux, dtype, at, left);
      } else if (bias != nullptr) {
        other = load(bias, dtype, j, left);
      }
DC_UNROLL
      for (int i = 0; i < EIGHT; i++) {
        const float a = other.at[i];
        x.at[i] = args.epilogue == EPILOGUE_GELU_BACK ? x.at[i] * (erf ? gelu_erf_slope(a) : gelu_tanh_slope(a))
                                                      : rounded(x.at[i] + a, dtype);
      }
      if (args.epilogue == EPILOGUE_GELU) {
        if (aux != nullptr) {
          store(aux, dtype, at, left, x);
        }
DC_UNROLL
        for (int i = 0; i < EIGHT; i++) {
          x.at[i] = erf ? gelu_erf(x.at[i]) : gelu_tanh(x.at[i]);
        }
      }
      store(to, dtype, at, left, x);
    }
  }
}

/* ---- sums over rows ---- */

/* A block has a chunk of rows, a thread a column. */
DC_KERNEL(dc__sum_chunks_kernel, dc__cuda_sum_args, DC__CUDA_ROW_THREADS) {
  const int64_t columns = args.columns, count = args.rows * columns;
  const int64_t column = static_cast<int64_t>(dc_block(1)) * dc_threads() + dc_thread();
  const int64_t chunks = (args.rows + DC__CUDA_CHUNK - 1) / DC__CUDA_CHUNK;
  const void *x = there(args.x, args.dtype, count), *normal = there(args.normal, args.dtype, count);
  const float *stats = there(args.stats, DC_FLOAT32, 2 * args.rows);
  float *parts = there(args.parts, DC_FLOAT32, (stats != nullptr ? 2 : 1) * chunks * columns);
  if (column >= columns) {
    return;
  }
  for (int64_t chunk = dc_block(); chunk < chunks; chunk += dc_blocks()) {
    const int64_t last = (chunk + 1) * DC__CUDA_CHUNK < args.rows ? (chunk + 1) * DC__CUDA_CHUNK : args.rows;
    float sum = 0, dot = 0;
    for (int64_t row = chunk * DC__CUDA_CHUNK; row < last; row++) {
      const float d = get(x, args.dtype, row * columns + column);
      sum += d;
      if (stats != nullptr) {
        dot += (get(normal, args.dtype, row * columns + column) - stats[row]) * stats[args.rows + row] * d;
      }
    }
    parts[chunk * columns + column] = sum;
    if (stats != nullptr) {
      parts[(chunks + chunk) * columns + column] = dot;
    }
  }
}

/* The column's sum over chunks [from, from + chunks) of `parts`, into `to`. */
DC_DEVICE void add_parts(const dc__cuda_sum_args &args, const float *parts, int64_t from, int64_t chunks, void *to,
                         int64_t column) {
  if (to == nullptr) {
    return;
  }
  void *array = there(to, args.to_dtype, args.columns);
  float sum = 0;
  for (int64_t chunk = from; chunk < from + chunks; chunk++) {
    sum += parts[chunk * args.columns + column];
  }
  put(array, args.to_dtype, column, args.accumulate != 0 ? sum + get(array, args.to_dtype, column) : sum);
}

DC_KERNEL(dc__sum_parts_kernel, dc__cuda_sum_args, DC__CUDA_ROW_THREADS) {
  const int64_t columns = args.columns, chunks = (args.rows + DC__CUDA_CHUNK - 1) / DC__CUDA_CHUNK;
  const bool both = args.stats != nullptr;
  const float *parts = there(args.parts, DC_FLOAT32, (both ? 2 : 1) * chunks * columns);
  for (int64_t column = dc_first(); column < columns; column += dc_step()) {
    add_parts(args, parts, 0, chunks, args.to[1], column);
    if (both) {
      add_parts(args, parts, chunks, chunks, args.to[0], column);
    }
  }
}

DC_KERNEL(dc__offsets_kernel, dc__cuda_offsets_args, DC__CUDA_ROW_THREADS) {
  int32_t *to = there(args.to, DC_FLOAT32, args.count);
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    to[i] = args.values[i];
  }
}
