/* Blocks of parameters on a device: cut out and put back, and Shampoo's elementwise work. Bit for bit the CPU's
 * results, except for the ratio of two lengths; compiled without contraction. */
#include <math.h>

#include "kernels/cuda/gpu.h"

#include "kernels/cuda/optim/blockwise_args.h"

namespace {

/* `count` floats of the device; nullptr stays nullptr. */
template <typename T>
DC_DEVICE T *floats(T *data, int64_t count) {
  (void)count;
  return data == nullptr ? data : DC_MEMORY(data, count * 4, 4);
}

/* The same for the array of this thread block. */
DC_DEVICE float *floats(float *data, const dc__cuda_graft_args &args) {
  return data == nullptr ? data : floats(data + static_cast<int64_t>(dc_block(1)) * args.stride, args.count);
}

}  // namespace

DC_KERNEL(dc__stack_kernel, dc__cuda_stack_args, DC__CUDA_THREADS) {
  const uint32_t index = dc_block(1);
  float *block = floats(args.blocks[index], args.count);
  float *slice = floats(args.stack + static_cast<int64_t>(index) * args.stride, args.count);
  const float *from = args.unpack ? slice : block;
  float *to = args.unpack ? block : slice;
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    to[i] = from[i];
  }
}

DC_KERNEL(dc__box_copy_kernel, dc__cuda_box_copy_args, DC__CUDA_THREADS) {
  float *block = floats(args.block, args.count), *part = floats(args.part, args.length);
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    int64_t at = args.begin - args.first, remaining = i;
    for (int32_t d = args.dims - 1; d > 0; d--) {
      const int64_t above = remaining / args.size[d];
      at += (remaining - above * args.size[d]) * args.stride[d];
      remaining = above;
    }
    at += remaining * args.stride[0];
    if (!args.unpack) {
      block[i] = part[at];
    } else if (at >= 0 && at < args.length) {
      part[at] = block[i];
    }
  }
}

DC_KERNEL(dc__graft_update_kernel, dc__cuda_graft_args, DC__CUDA_THREADS) {
  const dc__graft_factors *f = &args.factors;
  float *data = floats(args.data, args);
  float *exp_avg = floats(args.exp_avg, args), *squares = floats(args.squares, args);
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    const float g = data[i];
    if (squares != nullptr) {
      squares[i] = dc__graft_square(squares[i], g, f);
    }
    if (exp_avg != nullptr) {
      const float m = dc__graft_exp_avg(exp_avg[i], g, f);
      exp_avg[i] = m;
      data[i] = f->inv_bias_correction1 * m;
    }
  }
}

DC_KERNEL(dc__graft_direction_kernel, dc__cuda_graft_args, DC__CUDA_THREADS) {
  const float *data = floats(args.data, args), *squares = floats(args.squares, args);
  float *to = floats(args.to, args);
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    to[i] = squares == nullptr ? data[i] : dc__graft_direction(data[i], squares[i], &args.factors);
  }
}

DC_KERNEL(dc__graft_finish_kernel, dc__cuda_graft_args, DC__CUDA_THREADS) {
  if (args.found != nullptr && *DC_MEMORY(args.found, 8, 8) != 0) {
    return;
  }
  const dc__graft_factors *f = &args.factors;
  float *data = floats(args.data, args), *momentum = floats(args.momentum, args);
  float ratio = 1;
  if (args.lengths != nullptr) {
    const dc__cuda_matrix_stats *lengths =
        DC_MEMORY(args.lengths, 2 * args.batch * sizeof *lengths, alignof(dc__cuda_matrix_stats)) + dc_block(1);
    const double length = sqrt(lengths[args.batch].norm);
    ratio = length > 0 ? static_cast<float>(sqrt(lengths[0].norm) / length) : 0;
  }
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    float u = data[i] * ratio;
    if (momentum != nullptr) {
      momentum[i] = dc__graft_momentum(momentum[i], u, f);
      u = dc__graft_step(momentum[i], u, f);
    }
    data[i] = u;
  }
}

DC_KERNEL(dc__permute_kernel, dc__cuda_permute_args, DC__CUDA_THREADS) {
  const int64_t index = dc_block(1);
  const float *x = floats(args.x + index * args.stride, args.count);
  float *to = floats(args.to + index * args.stride, args.count);
  const int64_t *order = DC_MEMORY(args.orders[index], args.n * 8, 8);
  for (int64_t i = dc_first(); i < args.count; i += dc_step()) {
    const int64_t part = i / args.inner, j = part % args.n;
    to[i] = x[i + (order[j] - j) * args.inner];
  }
}
