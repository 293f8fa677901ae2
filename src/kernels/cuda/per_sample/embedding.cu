/* Gradients per sample of embeddings on a device: delta's rows added up by index. A row of a table belongs to one
 * block, and each column to one thread, which adds in the order of positions: the bits are the CPU's. */
#include "kernels/cuda/float_access.h"
#include "kernels/cuda/per_sample/embedding_args.h"

namespace {

enum { THREADS = DC__CUDA_THREADS, WARPS = THREADS / DC_WARP };

/* dc__cuda_indices with its arrays named. */
struct embedding_positions {
  const dc__cuda_indices &of;
  const void *ids, *delta;
  const double *sample_weights;
  DC_MEMBER int64_t id(int64_t position) const {
    return of.wide_ids ? static_cast<const int64_t *>(ids)[position] : static_cast<const int32_t *>(ids)[position];
  }
  DC_MEMBER bool is_counted(int64_t position) const {
    return id(position) != of.padding;
  }
  /* delta's row for a position; a bag has one for all its positions. */
  DC_MEMBER double at(int64_t position, int64_t column) const {
    return get(delta, of.wide, (of.bag ? position / of.positions : position) * of.columns + column);
  }
};

DC_DEVICE embedding_positions read(const dc__cuda_indices &of) {
  const int64_t num_positions = of.samples * of.positions;
  return {of, device_array(of.ids, of.wide_ids, num_positions),
          device_array(of.delta, of.wide, (of.bag ? of.samples : num_positions) * of.columns),
          of.sample_weights == nullptr ? of.sample_weights : device_array(of.sample_weights, 1, of.samples)};
}

}  // namespace

/* A warp has a sample. */
DC_BLOCK_KERNEL(dc__sample_weights_kernel, dc__cuda_sample_weights_args, THREADS) {
  const embedding_positions in = read(args.indices);
  const int64_t samples = args.indices.samples, positions = args.indices.positions;
  const void *factors = args.factors == nullptr ? args.factors : device_array(args.factors, args.indices.wide, samples);
  double *weights = device_array(args.sample_weights, 1, samples);
  for (int64_t n = dc_first() / DC_WARP; n < samples; n += dc_step() / DC_WARP) {
    double count = 0;
    for (int64_t t = dc_thread() % DC_WARP; t < positions && args.mean; t += DC_WARP) {
      count += in.is_counted(n * positions + t) ? 1 : 0;
    }
    count = sum_of_warp(count);
    if (dc_thread() % DC_WARP == 0) {
      const double factor = factors == nullptr ? 1 : get(factors, args.indices.wide, n);
      weights[n] = factor * (count > 0 ? 1 / count : 1);
    }
  }
}

/* A block has 256 columns of the rows whose number modulo the grid's second axis is its own; the third axis is the
 * table. It scans as many positions at a time as it has threads, and keeps its own ones in their order. */
DC_BLOCK_KERNEL(dc__scatter_kernel, dc__cuda_scatter_args, THREADS) {
  DC_SHARED(int64_t, own, [THREADS]);
  DC_SHARED(uint32_t, found, [WARPS]);
  const embedding_positions in = read(args.indices);
  const dc__cuda_indices &of = args.indices;
  const int64_t tables = args.per_sample ? of.samples : 1, num_positions = of.samples * of.positions / tables;
  const int64_t column = dc_first();
  void *table = device_array(args.table, of.wide, tables * of.rows * of.columns);
  for (int64_t n = dc_block(2); n < tables; n += dc_blocks(2)) {
    for (int64_t begin = n * num_positions; begin < (n + 1) * num_positions; begin += THREADS) {
      const int64_t position = begin + dc_thread();
      const bool is_own = position < (n + 1) * num_positions && in.is_counted(position) &&
                          in.sample_weights[position / of.positions] != 0 &&
                          in.id(position) % dc_blocks(1) == dc_block(1);
      const uint32_t warp = dc_thread() / DC_WARP, ballot = dc_ballot(is_own);
      if (dc_thread() % DC_WARP == 0) {
        found[warp] = dc_ones(ballot);
      }
      dc_sync();
      uint32_t index = dc_ones(ballot & ((1u << dc_thread() % DC_WARP) - 1)), total = 0;
      for (uint32_t w = 0; w < WARPS; w++) {
        index += w < warp ? found[w] : 0;
        total += found[w];
      }
      if (is_own) {
        own[index] = position;
      }
      dc_sync(); /* a thread rewrites `own` only after the next barrier, when all have read it */
      for (uint32_t i = 0; i < total && column < of.columns; i++) {
        const int64_t to = (n * of.rows + in.id(own[i])) * of.columns + column;
        const double term = in.sample_weights[own[i] / of.positions] * in.at(own[i], column);
        put(table, of.wide, to, get(table, of.wide, to) + term);
      }
    }
  }
}

/* A block has a sample: it sorts its positions by index, so that equal ones are neighbours. All comparisons of the
 * bitonic network go upwards, so places past the end count as larger than all. */
DC_BLOCK_KERNEL(dc__rows_squared_kernel, dc__cuda_rows_squared_args, THREADS) {
  DC_SHARED(double, sums, [WARPS]);
  const embedding_positions in = read(args.indices);
  const dc__cuda_indices &of = args.indices;
  int64_t *all = device_array(args.sorted, 1, of.samples * of.positions);
  double *parts = device_array(args.parts, 1, of.samples);
  for (int64_t n = dc_block(); n < of.samples; n += dc_blocks()) {
    int64_t *sorted = all + n * of.positions;
    for (int64_t t = dc_thread(); t < of.positions; t += THREADS) {
      sorted[t] = n * of.positions + t;
    }
    dc_sync();
    for (int64_t run = 2; run < 2 * of.positions; run *= 2) {
      for (int64_t step = run - 1; step > 0; step = (step == run - 1 ? run / 4 : step / 2)) {
        for (int64_t t = dc_thread(); t < of.positions; t += THREADS) {
          const int64_t u = t ^ step;
          if (u > t && u < of.positions) {
            const int64_t a = sorted[t], b = sorted[u];
            if (in.id(a) > in.id(b) || (in.id(a) == in.id(b) && a > b)) {
              sorted[t] = b;
              sorted[u] = a;
            }
          }
        }
        dc_sync();
      }
    }
    double square = 0;
    for (int64_t column = dc_thread(); column < of.columns; column += THREADS) {
      double sum = 0;
      for (int64_t t = 0; t < of.positions; t++) {
        sum += in.is_counted(sorted[t]) ? in.sample_weights[n] * in.at(sorted[t], column) : 0;
        if (t + 1 == of.positions || in.id(sorted[t]) != in.id(sorted[t + 1])) {
          square += sum * sum;
          sum = 0;
        }
      }
    }
    square = sum_of_warp(square);
    if (dc_thread() % DC_WARP == 0) {
      sums[dc_thread() / DC_WARP] = square;
    }
    dc_sync();
    if (dc_thread() == 0) {
      for (uint32_t w = 1; w < WARPS; w++) {
        square += sums[w];
      }
      parts[n] = square;
    }
    dc_sync();
  }
}
