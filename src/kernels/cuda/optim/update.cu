/* Steps of AdamW and SGD, their beginning, the check of gradients before them, and the loads and stores of Shampoo's
 * blocks. The grid's second axis is the parameter, of a few in a launch. Bit for bit update.c's results, compiled
 * without contraction. */
#include "dc_api.h"
#include "kernels/cuda/threads.h"
#include "kernels/cuda/vec.h"
#include "kernels/elementwise/convert.h"
#include "kernels/optim/update_math.h"

namespace {

enum { VECTOR_WIDTH = 4 };

DC_DEVICE int64_t size_of(int32_t dtype) {
  return dtype == DC_FLOAT32 ? 4 : 2;
}

DC_DEVICE float float_of(uint16_t half, int32_t dtype) {
  return dtype == DC_BFLOAT16 ? dc__f32_of_bf16(half) : dc__f32_of_f16(half);
}
DC_DEVICE uint16_t half_of(float x, int32_t dtype) {
  return dtype == DC_BFLOAT16 ? dc__bf16_of_f32(x) : dc__f16_of_f32(x);
}

/* Reads float32, and 16-bit elements as float32. */
template <int64_t N>
DC_DEVICE dc_pack<float, N> read(const void *data, int32_t dtype, int64_t i) {
  if (dtype == DC_FLOAT32) {
    return dc_load<float, N>(data, i);
  }
  const dc_pack<uint16_t, N> halves = dc_load<uint16_t, N>(data, i);
  dc_pack<float, N> x;
  DC_UNROLL
  for (int64_t j = 0; j < N; j++) {
    x.at[j] = float_of(halves.at[j], dtype);
  }
  return x;
}

template <int64_t N>
DC_DEVICE dc_pack<float, N> read_weight(const dc__update_span &s, int64_t i) {
  const dc_pack<float, N> w = read<N>(s.weight, s.dtype, i);
  if (s.dtype == DC_FLOAT32) {
    return w;
  }
  dc_pack<float, N> master = dc_load<float, N>(s.master, i);
  DC_UNROLL
  for (int64_t j = 0; j < N; j++) {
    const float rounded = float_of(half_of(master.at[j], s.dtype), s.dtype);
    master.at[j] = dc__synced_master(master.at[j], rounded, w.at[j]);
  }
  return master;
}

template <int64_t N>
DC_DEVICE void write_weight(const dc__update_span &s, int64_t i, const dc_pack<float, N> &w) {
  if (s.dtype == DC_FLOAT32) {
    dc_store(s.weight, i, w);
    return;
  }
  dc_pack<uint16_t, N> halves;
  DC_UNROLL
  for (int64_t j = 0; j < N; j++) {
    halves.at[j] = half_of(w.at[j], s.dtype);
  }
  dc_store(s.master, i, w);
  dc_store(s.weight, i, halves);
}

struct adamw_rule {
  static constexpr bool has_gradient = true;
  static constexpr bool is_scan = false;
  template <int64_t N>
  static DC_MEMBER void at(const dc__update_batch &, const dc__update_span &s, int64_t i, const dc_pack<float, N> &g) {
    const dc__adamw_factors *f = &s.factors.adamw;
    dc_pack<float, N> w = read_weight<N>(s, i);
    dc_pack<float, N> m = dc_load<float, N>(s.state[0], i);
    dc_pack<float, N> v = dc_load<float, N>(s.state[1], i);
    DC_UNROLL
    for (int64_t j = 0; j < N; j++) {
      m.at[j] = dc__adamw_mean(m.at[j], g.at[j], f);
      v.at[j] = dc__adamw_square(v.at[j], g.at[j], f);
    }
    dc_store(s.state[0], i, m);
    dc_store(s.state[1], i, v);
    if (s.state[2] != nullptr) {
      const dc_pack<float, N> max_v = dc_load<float, N>(s.state[2], i);
      DC_UNROLL
      for (int64_t j = 0; j < N; j++) {
        v.at[j] = dc__adamw_max(max_v.at[j], v.at[j]);
      }
      dc_store(s.state[2], i, v);
    }
    DC_UNROLL
    for (int64_t j = 0; j < N; j++) {
      w.at[j] = dc__adamw_weight(w.at[j], m.at[j], v.at[j], f);
    }
    write_weight(s, i, w);
  }
};

struct sgd_rule {
  static constexpr bool has_gradient = true;
  static constexpr bool is_scan = false;
  template <int64_t N>
  static DC_MEMBER void at(const dc__update_batch &, const dc__update_span &s, int64_t i, const dc_pack<float, N> &g) {
    const dc__sgd_factors *f = &s.factors.sgd;
    const bool has_momentum = s.state[0] != nullptr;
    dc_pack<float, N> w = read_weight<N>(s, i);
    dc_pack<float, N> b = {};
    if (has_momentum) {
      b = dc_load<float, N>(s.state[0], i);
    }
    DC_UNROLL
    for (int64_t j = 0; j < N; j++) {
      const float d = dc__sgd_direction(w.at[j], g.at[j], f);
      b.at[j] = has_momentum ? dc__sgd_momentum(b.at[j], d, f) : d;
      w.at[j] = has_momentum ? dc__sgd_weight(w.at[j], d, b.at[j], f) : w.at[j] - f->lr * d;
    }
    if (has_momentum) {
      dc_store(s.state[0], i, b);
    }
    write_weight(s, i, w);
  }
};

struct scan_overflow_rule {
  static constexpr bool has_gradient = true;
  static constexpr bool is_scan = true;
  template <int64_t N>
  static DC_MEMBER void at(const dc__update_batch &args, const dc__update_span &s, int64_t,
                           const dc_pack<float, N> &g) {
    uint32_t max_bits = 0;
    DC_UNROLL
    for (int64_t j = 0; j < N; j++) {
      const uint32_t bits = dc__exponent_bits(g.at[j]);
      max_bits = bits > max_bits ? bits : max_bits;
    }
    if (max_bits >= dc__exponent_limit(args.exponent)) {
      dc_atomic_max(DC_MEMORY(args.found, 8, 8), static_cast<uint64_t>(args.indices - s.index));
    }
  }
};

struct load_block_rule {
  static constexpr bool has_gradient = true;
  static constexpr bool is_scan = false;
  template <int64_t N>
  static DC_MEMBER void at(const dc__update_batch &, const dc__update_span &s, int64_t i, dc_pack<float, N> g) {
    if (s.factors.part.add != 0.0f || s.master != nullptr) {
      const dc_pack<float, N> w = read_weight<N>(s, i);
      DC_UNROLL
      for (int64_t j = 0; j < N; j++) {
        g.at[j] = dc__block_from_gradient(g.at[j], w.at[j], &s.factors.part);
      }
      if (s.master != nullptr) {
        dc_store(s.master, i, w);
      }
    }
    dc_store(s.state[0], i, g);
  }
};

struct store_block_rule {
  static constexpr bool has_gradient = false;
  static constexpr bool is_scan = false;
  template <int64_t N>
  static DC_MEMBER void at(const dc__update_batch &, const dc__update_span &s, int64_t i, const dc_pack<float, N> &) {
    const dc_pack<float, N> x = dc_load<float, N>(s.state[0], i);
    dc_pack<float, N> w = read_weight<N>(s, i);
    DC_UNROLL
    for (int64_t j = 0; j < N; j++) {
      w.at[j] = dc__block_to_weight(w.at[j], x.at[j], &s.factors.part);
    }
    write_weight(s, i, w);
  }
};

/* Whether a gradient was found that prevents the step. */
DC_DEVICE bool is_stopped(const uint64_t *found) {
  return found != nullptr && *DC_MEMORY(found, 8, 8) != 0;
}

/* The block's parameter, with its memory named. */
DC_DEVICE dc__update_span span_of(const dc__update_batch &args) {
  dc__update_span s = args.spans[dc_block(1)];
  if (args.recorded) {
    s.factors = DC_MEMORY(s.factors.record, sizeof(dc__update_step_state), 8)->factors;
  }
  s.grad = DC_MEMORY(s.grad, size_of(s.grad_dtype) * s.count, size_of(s.grad_dtype));
  s.weight = DC_MEMORY(s.weight, size_of(s.dtype) * s.count, size_of(s.dtype));
  if (s.master != nullptr) {
    s.master = DC_MEMORY(s.master, s.count * 4, 4);
  }
  DC_UNROLL
  for (int k = 0; k < 3; k++) {
    if (s.state[k] != nullptr) {
      s.state[k] = DC_MEMORY(s.state[k], s.count * 4, 4);
    }
  }
  return s;
}

/* The optimizer's own state is aligned; sources and targets of blocks may not be. */
DC_DEVICE bool is_aligned(const void *data, int32_t dtype) {
  return dtype == DC_FLOAT32 ? dc_is_aligned<float, VECTOR_WIDTH>(data) : dc_is_aligned<uint16_t, VECTOR_WIDTH>(data);
}

template <typename KIND, int64_t N>
DC_DEVICE void run_at(const dc__update_batch &args, const dc__update_span &s, int64_t i, float scale) {
  dc_pack<float, N> g = {};
  if (KIND::has_gradient) {
    g = read<N>(s.grad, s.grad_dtype, i);
    DC_UNROLL
    for (int64_t j = 0; j < N; j++) {
      g.at[j] = g.at[j] * scale;
    }
  }
  KIND::template at<N>(args, s, i, g);
}

template <typename KIND>
DC_DEVICE void run(const dc__update_batch &args) {
  if (!KIND::is_scan && is_stopped(args.found)) {
    return;
  }
  const dc__update_span s = span_of(args);
  const float scale = args.scale != nullptr ? *DC_MEMORY(args.scale, 4, 4) : args.grad_scale;
  const bool aligned =
      is_aligned(s.weight, s.dtype) && is_aligned(s.grad, s.grad_dtype) && is_aligned(s.state[0], DC_FLOAT32);
  const int64_t whole = aligned ? s.count / VECTOR_WIDTH * VECTOR_WIDTH : 0;
  for (int64_t i = dc_first() * VECTOR_WIDTH; i < whole; i += dc_step() * VECTOR_WIDTH) {
    run_at<KIND, VECTOR_WIDTH>(args, s, i, scale);
  }
  for (int64_t i = whole + dc_first(); i < s.count; i += dc_step()) {
    run_at<KIND, 1>(args, s, i, scale);
  }
}

}  // namespace

DC_KERNEL(dc__adamw_kernel, dc__update_batch, DC__CUDA_THREADS) {
  run<adamw_rule>(args);
}

DC_KERNEL(dc__sgd_kernel, dc__update_batch, DC__CUDA_THREADS) {
  run<sgd_rule>(args);
}

DC_KERNEL(dc__scan_overflow_kernel, dc__update_batch, DC__CUDA_THREADS) {
  run<scan_overflow_rule>(args);
}

DC_KERNEL(dc__load_block_kernel, dc__update_batch, DC__CUDA_THREADS) {
  run<load_block_rule>(args);
}

DC_KERNEL(dc__store_block_kernel, dc__update_batch, DC__CUDA_THREADS) {
  run<store_block_rule>(args);
}

DC_KERNEL(dc__update_begin_kernel, dc__update_begin, DC__CUDA_THREADS) {
  const bool stopped = is_stopped(args.found);
  const int64_t i = dc_first();
  if (i == 0 && args.status != nullptr) {
    dc__update_status *status = DC_MEMORY(args.status, sizeof(dc__update_status), 8);
    status->steps += stopped ? 0 : 1;
    status->skipped += stopped ? 1 : 0;
  }
  if (i < args.records_used && !stopped) {
    dc__update_step_state *record = DC_MEMORY(args.records[i], sizeof(dc__update_step_state), 8);
    record->step++;
    record->factors = dc__update_factors_of(args.kind, &args.rule, *DC_MEMORY(args.lr, 8, 8), record->step);
  }
}

DC_KERNEL(dc__update_read_scaler_kernel, dc__update_read_scaler, DC__CUDA_THREADS) {
  if (dc_first() == 0) {
    dc__update_status *status = DC_MEMORY(args.status, sizeof(dc__update_status), 8);
    const float loss_scale = args.loss_scale != nullptr ? *DC_MEMORY(args.loss_scale, 4, 4) : 1.0f;
    const float found_inf = args.found_inf != nullptr ? *DC_MEMORY(args.found_inf, 4, 4) : 0.0f;
    status->scale = dc__update_scale(args.grad_scale, loss_scale);
    status->found = found_inf != 0.0f ? DC__UPDATE_FOUND_INF : 0;
  }
}

DC_KERNEL(dc__update_set_scalar_kernel, dc__update_set_scalar, DC__CUDA_THREADS) {
  if (dc_first() == 0) {
    *DC_MEMORY(args.to, 8, 8) = args.value;
  }
}
