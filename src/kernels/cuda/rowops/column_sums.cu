/* Sums over the layer's rows in two steps, whose order depends on the number of rows alone. First chunks of rows, read
 * 16 bytes at a time by enough blocks to fill a device; then the chunks' sums, also those of LN's backward
 * (rowops.cu). */
#include "kernels/cuda/rowops/column_sums_args.h"
#include "kernels/cuda/vec8.h"

namespace {

enum { WARPS = DC__CUDA_PART_THREADS / DC_WARP };

/* A thread's sums over a chunk of rows of 8 columns. WHOLE: all rows are aligned to 16 bytes there. */
template <int DTYPE, bool WHOLE>
DC_DEVICE vec8 sum_rows(const dc__cuda_sum_args &args, int64_t chunk, int64_t j) {
  const int64_t columns = args.columns, left = columns - j;
  const int64_t first = chunk * DC__CUDA_CHUNK, end = first + DC__CUDA_CHUNK, last = end < args.rows ? end : args.rows;
  const void *x = device_array<DTYPE>(args.x, args.rows * columns);
  vec8 sum = {};
  DC_UNROLL_8
  for (int64_t row = first; row < last; row++) {
    add(sum, WHOLE ? load_aligned<DTYPE>(x, row * columns + j) : load<DTYPE>(x, row * columns + j, left));
  }
  return sum;
}

/* A block has a chunk of rows, a thread 8 columns. */
template <int DTYPE>
DC_DEVICE void sum_chunks(const dc__cuda_sum_args &args) {
  const int64_t columns = args.columns, chunks = args.sums.chunks;
  const int64_t j = (static_cast<int64_t>(dc_block(1)) * dc_threads() + dc_thread()) * VEC8, left = columns - j;
  float *parts = device_array<DC_FLOAT32>(args.sums.parts, chunks * columns);
  const bool whole = columns % VEC8 == 0 && is_vectorizable<DTYPE>(args.x, j, left);
  for (int64_t chunk = dc_block(); chunk < chunks && left > 0; chunk += dc_blocks()) {
    const vec8 sum = whole ? sum_rows<DTYPE, true>(args, chunk, j) : sum_rows<DTYPE, false>(args, chunk, j);
    store<DC_FLOAT32>(parts, chunk * columns + j, left, sum);
  }
}

template <int DTYPE>
DC_DEVICE void store_sum(const dc__cuda_sums &args, void *array, int64_t column, float sum) {
  void *to = device_array<DTYPE>(array, args.columns);
  put<DTYPE>(to, column, args.accumulate != 0 ? sum + get<DTYPE>(to, column) : sum);
}

}  // namespace

DC_KERNEL(dc__sum_chunks_kernel, dc__cuda_sum_args, DC__CUDA_SUM_THREADS) {
  DC_BY_TYPE(args.dtype, sum_chunks, args);
}

/* A block has 32 columns of one of the sums, a warp a part of the chunks, a lane a column. */
DC_BLOCK_KERNEL(dc__sum_parts_kernel, dc__cuda_sums, DC__CUDA_PART_THREADS) {
  DC_SHARED(float, sums, [WARPS][DC_WARP]);
  const int64_t columns = args.columns, chunks = args.chunks;
  const uint32_t lane = dc_thread() % DC_WARP, warp = dc_thread() / DC_WARP;
  const int64_t column = static_cast<int64_t>(dc_block()) * DC_WARP + lane;
  void *to = dc_block(1) == 0 ? args.to[0] : args.to[1];
  if (to == nullptr) {
    return;
  }
  const float *parts =
      device_array<DC_FLOAT32>(args.parts, dc_blocks(1) * chunks * columns) + dc_block(1) * chunks * columns;
  const int64_t each = (chunks + WARPS - 1) / WARPS, first = warp * each;
  const int64_t last = first + each < chunks ? first + each : chunks;
  float sum = 0;
  if (column < columns) {
    DC_UNROLL_8
    for (int64_t chunk = first; chunk < last; chunk++) {
      sum += parts[chunk * columns + column];
    }
  }
  sums[warp][lane] = sum;
  dc_sync();
  if (warp != 0 || column >= columns) {
    return;
  }
  sum = 0;
  for (int w = 0; w < WARPS; w++) {
    sum += sums[w][lane];
  }
  DC_BY_TYPE(args.dtype, store_sum, args, to, column, sum);
}
