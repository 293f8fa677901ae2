/* K-FAC beside its products, on a device: the check of inputs, the packed triangles of factors and their running
 * averages, damping, and the store of a direction to its gradient. Compiled without contraction. */
#include <math.h>

#include "dc_api.h"
#include "kernels/cuda/float_access.h"
#include "kernels/cuda/matrix/matrix_view.h"
#include "kernels/cuda/optim/kfac_args.h"
#include "kernels/cuda/vec.h"
#include "kernels/elementwise/convert.h"

namespace {

enum { TILE = DC__CUDA_KFAC_TILE };

/* `count` floats of the device; nullptr stays nullptr. */
template <typename T>
DC_DEVICE T *floats(T *data, int64_t count) {
  return data == nullptr ? data : device_array(data, 0, count);
}

/* The bits of an absolute value, as float32. */
DC_DEVICE uint32_t abs_bits(float x, int32_t) {
  return dc__bits_of_f32(x) & 0x7fffffffu;
}
DC_DEVICE uint32_t abs_bits(uint16_t x, int32_t dtype) {
  return abs_bits(dtype == DC_BFLOAT16 ? dc__f32_of_bf16(x) : dc__f32_of_f16(x), dtype);
}

/* 16 bytes at a time if the address is a multiple of that. */
template <typename T>
DC_DEVICE uint64_t max_abs_bits(const dc__cuda_max_abs_args &args) {
  enum { VECTOR_WIDTH = 16 / sizeof(T) };
  const T *data = static_cast<const T *>(DC_MEMORY(args.data, args.count * sizeof(T), sizeof(T)));
  const int64_t whole = dc_is_aligned<T, VECTOR_WIDTH>(data) ? args.count / VECTOR_WIDTH * VECTOR_WIDTH : 0;
  uint32_t max_bits = 0;
  for (int64_t i = dc_first() * VECTOR_WIDTH; i < whole; i += dc_step() * VECTOR_WIDTH) {
    const dc_pack<T, VECTOR_WIDTH> pack = dc_load<T, VECTOR_WIDTH>(data, i);
    DC_UNROLL
    for (int j = 0; j < VECTOR_WIDTH; j++) {
      const uint32_t value = abs_bits(pack.at[j], args.dtype);
      max_bits = value > max_bits ? value : max_bits;
    }
  }
  for (int64_t i = whole + dc_first(); i < args.count; i += dc_step()) {
    const uint32_t value = abs_bits(data[i], args.dtype);
    max_bits = value > max_bits ? value : max_bits;
  }
  return max_bits;
}

/* The offset of row i of a packed triangle, at the diagonal. */
DC_DEVICE int64_t packed_row(int64_t group, int64_t i, int64_t n) {
  return group * (n * (n + 1) / 2) + i * n - i * (i - 1) / 2;
}

DC_DEVICE double *triangles(const dc__cuda_triangles_args &args) {
  return device_array(args.packed, 1, args.groups * (args.n * (args.n + 1) / 2));
}

/* The mean of n values, the same in every lane. */
DC_DEVICE double mean_of(const float *values, int64_t n) {
  double sum = 0;
  for (int64_t i = dc_thread(); i < n; i += DC_WARP) {
    sum += static_cast<double>(values[i]) / static_cast<double>(n);
  }
  return sum_of_warp(sum);
}

}  // namespace

DC_BLOCK_KERNEL(dc__max_abs_kernel, dc__cuda_max_abs_args, DC__CUDA_KFAC_THREADS) {
  const uint64_t max_bits = args.dtype == DC_FLOAT32 ? max_abs_bits<float>(args) : max_abs_bits<uint16_t>(args);
  warp_atomic_max(DC_MEMORY(args.found, 8, 8), max_bits);
}

DC_KERNEL(dc__fill_ones_kernel, dc__cuda_fill_ones_args, DC__CUDA_KFAC_THREADS) {
  if (args.dtype == DC_FLOAT32) {
    float *to = static_cast<float *>(DC_MEMORY(args.to, args.count * 4, 4));
    for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
      to[i] = 1;
    }
  } else {
    uint16_t *to = static_cast<uint16_t *>(DC_MEMORY(args.to, args.count * 2, 2));
    for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
      to[i] = args.dtype == DC_BFLOAT16 ? 0x3f80 : 0x3c00;
    }
  }
}

DC_KERNEL(dc__pack_triangles_kernel, dc__cuda_triangles_args, DC__CUDA_KFAC_THREADS) {
  const int64_t n = args.n;
  const float *sum = floats(args.sum, args.groups * n * n);
  double *packed = triangles(args);
  for (int64_t row = dc_block(); row < args.groups * n; row += dc_blocks()) {
    const int64_t i = row % n, begin = packed_row(row / n, i, n) - i;
    for (int64_t j = i + dc_thread(); j < n; j += dc_threads()) {
      packed[begin + j] = args.corner >= 0 && i == n - 1 ? args.corner : static_cast<double>(sum[row * n + j]);
    }
  }
}

/* A tile of the upper triangles, which is written transposed. */
DC_BLOCK_KERNEL(dc__average_triangles_kernel, dc__cuda_triangles_args, DC__CUDA_KFAC_TILE_THREADS) {
  DC_SHARED(float, tile, [TILE][TILE + 1]);
  const int64_t n = args.n, j0 = static_cast<int64_t>(dc_block(0)) * TILE,
                i0 = static_cast<int64_t>(dc_block(1)) * TILE;
  if (j0 < i0) {
    return;
  }
  float *sum = floats(args.sum, args.groups * n * n);
  const float *mean = floats(args.mean, args.groups * n * n);
  const double *packed = triangles(args);
  for (int64_t group = dc_block(2); group < args.groups; group += dc_blocks(2)) {
    for (int k = static_cast<int>(dc_thread()); k < TILE * TILE; k += DC__CUDA_KFAC_TILE_THREADS) {
      const int64_t i = i0 + k / TILE, j = j0 + k % TILE;
      if (i <= j && j < n) {
        const double value = packed[packed_row(group, i, n) + j - i] / args.count;
        const double before = static_cast<double>(mean[(group * n + i) * n + j]);
        tile[k / TILE][k % TILE] = static_cast<float>(args.decay * before + (1 - args.decay) * value);
      }
    }
    dc_sync();
    for (int k = static_cast<int>(dc_thread()); k < TILE * TILE; k += DC__CUDA_KFAC_TILE_THREADS) {
      const int64_t row = j0 + k / TILE, column = i0 + k % TILE;
      if (column <= row && row < n) {
        sum[(group * n + row) * n + column] = tile[k % TILE][k / TILE];
      }
    }
    dc_sync(); /* the next group's tile */
  }
}

DC_KERNEL(dc__clamp_min_zero_kernel, dc__cuda_clamp_min_zero_args, DC__CUDA_KFAC_THREADS) {
  float *values = floats(args.values, args.count);
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    values[i] = values[i] > 0 ? values[i] : 0;
  }
}

/* A group by a warp. */
DC_BLOCK_KERNEL(dc__damp_eigenvalues_kernel, dc__cuda_damp_eigenvalues_args, DC_WARP) {
  const float *values_a = floats(args.values_a, args.groups * args.a);
  const float *values_g = floats(args.values_g, args.groups * args.g);
  float *to_a = floats(args.to_a, args.groups * args.a), *to_g = floats(args.to_g, args.groups * args.g);
  for (int64_t group = dc_block(); group < args.groups; group += dc_blocks()) {
    const double mean_a = mean_of(values_a + group * args.a, args.a);
    const double mean_g = mean_of(values_g + group * args.g, args.g);
    const double pi = mean_a > 0 && mean_g > 0 ? sqrt(mean_a / mean_g) : 1;
    for (int64_t i = group * args.a + dc_thread(); i < (group + 1) * args.a; i += DC_WARP) {
      to_a[i] = static_cast<float>(static_cast<double>(values_a[i]) + pi * sqrt(args.damping));
    }
    for (int64_t i = group * args.g + dc_thread(); i < (group + 1) * args.g; i += DC_WARP) {
      to_g[i] = static_cast<float>(static_cast<double>(values_g[i]) + sqrt(args.damping) / pi);
    }
  }
}

/* A row by a warp. */
DC_BLOCK_KERNEL(dc__store_direction_kernel, dc__cuda_store_direction_args, DC__CUDA_KFAC_THREADS) {
  const float *x = floats(args.x, args.rows * args.columns);
  float *weight = floats(args.weight, args.rows * args.in), *bias = floats(args.bias, args.rows);
  double *sums = device_array(args.sums, 1, args.rows);
  for (int64_t row = dc_first() / DC_WARP; row < args.rows; row += dc_step() / DC_WARP) {
    double sum = 0;
    for (int64_t j = dc_thread() % DC_WARP; j < args.columns; j += DC_WARP) {
      float *to = j < args.in ? weight : bias;
      if (to != nullptr) {
        to += j < args.in ? row * args.in + j : row;
        const float value = x[row * args.columns + j];
        sum += static_cast<double>(value) * static_cast<double>(*to);
        *to = value;
      }
    }
    sum = sum_of_warp(sum);
    if (dc_thread() % DC_WARP == 0) {
      sums[row] = sum;
    }
  }
}
